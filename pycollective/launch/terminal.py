"""Lends the launcher's terminal to a rank that reads from it, as for `breakpoint()`.

Each rank leads a process group, which is in the background of the terminal, so Ctrl-C reaches the
launcher alone. Linux stops a group that reads a terminal from there. Then the launcher makes it the
terminal's foreground, as a shell does with ``fg``, and Ctrl-C and Ctrl-Z are that rank's.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from contextlib import suppress
from typing import Any

_LOOK = 0.2  # seconds between two looks whether the launcher has come to the foreground


class Terminal:
    """The launcher's, if it has one."""

    def __init__(self) -> None:
        self._fd = -1  # /dev/tty, once a rank has read from it
        # To restore: a rank that is killed while it reads leaves echo off.
        self._modes: list[Any] = []
        self._asks: list[int] = []  # groups that are stopped because they read
        self._holder = 0  # the group that has the terminal
        self._told = False

    def stopped(self, group: int, number: int) -> None:
        """Take note that a rank's group was stopped by a signal."""
        if number in (signal.SIGTTIN, signal.SIGTTOU):
            self._asks.append(group)
        elif number == signal.SIGTSTP and group == self._holder:  # Ctrl-Z is for the whole job
            self._holder = 0
            os.killpg(0, signal.SIGTSTP)
            os.killpg(group, signal.SIGCONT)
            with suppress(OSError):  # Linux stops no job that no shell could bring back
                if os.tcgetpgrp(self._fd) == group:
                    self._holder = group

    def lend(self) -> list[float]:
        """Lend it to a group that asks, if there is one and the launcher has the terminal.

        Returns:
            seconds after which to call this again; empty: not before a rank is stopped.
        """
        try:
            return self._lend() if self._asks else []
        except (OSError, termios.error):  # there is none any more, or the group has ended
            self._asks.pop(0)
            return [0.0]

    def _lend(self) -> list[float]:
        if self._fd < 0:
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        if os.tcgetpgrp(self._fd) not in (os.getpgrp(), self._holder):
            if not self._told:
                print(
                    "pycollective run: a rank reads from the terminal, and waits until you bring "
                    "the job to the foreground (fg)",
                    file=sys.stderr,
                    flush=True,
                )
            self._told = True
            return [_LOOK]
        self._modes = self._modes or termios.tcgetattr(self._fd)
        self._set_foreground(self._asks[0])
        os.killpg(self._asks[0], signal.SIGCONT)
        self._holder, self._told = self._asks.pop(0), False
        return [0.0]  # another may ask

    def take_back(self, group: int) -> bool:
        """Take it from a group whose rank has ended; return whether that had it."""
        if group in self._asks:
            self._asks.remove(group)
        if group != self._holder:
            return False
        self._holder = 0
        with suppress(OSError, termios.error):  # the terminal has gone
            if os.tcgetpgrp(self._fd) == group:  # else a shell has it already
                self._set_foreground(os.getpgrp())
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)
        return True

    def close(self) -> None:
        """Close the terminal's file."""
        if self._fd >= 0:
            os.close(self._fd)

    def _set_foreground(self, group: int) -> None:
        # From the background this would stop the launcher.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(self._fd, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
