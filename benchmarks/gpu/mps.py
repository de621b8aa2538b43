"""NVIDIA's Multi-Process Service, in which kernels of several processes run at the same time.

Without it processes that share a GPU take turns, and each exchange between their kernels takes
milliseconds. The control daemon is one of our own, with folders of its own. It changes no setting
of a GPU. A client that is killed may take the others along, so what kills ranks runs without it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
ANSWERS = 15.0  # seconds, for the daemon and for its first client
# A context is what the daemon starts its server for, or is refused.
_CLIENT = """
import ctypes, os
driver = ctypes.CDLL(os.environ.get("PYCOLLECTIVE_CUDA_DRIVER") or "libcuda.so.1")
gpu, context = ctypes.c_int(), ctypes.c_void_p()
print(
    driver.cuInit(0)
    or driver.cuDeviceGet(ctypes.byref(gpu), 0)
    or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
)
"""


class Mps:
    """The service: it runs from the first `start` to `stop`, and is started again by the next.

    Attributes:
        why_not: why it cannot be had; empty where it can, as far as is known.
    """

    def __init__(self, environment: Mapping[str, str], why_not: str = "") -> None:
        """`environment`: its clients', but for the service; with `why_not` it is not even tried."""
        self.why_not = why_not
        self._environment = environment
        self._variables: dict[str, str] = {}
        self._folder: Path | None = None

    def start(self) -> dict[str, str]:
        """What a client's environment needs besides; empty where the service cannot be had."""
        if not self.why_not and self._folder is None:
            self.why_not = self._start()
            if self.why_not:
                self.stop()
        return {} if self.why_not else self._variables

    def stop(self) -> None:
        """End it, where it runs, whoever still uses it."""
        if self._folder is None:
            return
        self._control(f"quit -t {ANSWERS / 3:.0f}")  # seconds for its clients
        with suppress(OSError, ValueError):  # it has ended, as it should
            os.kill(int((self._folder / f"{CONTROL}.pid").read_text()), signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def _start(self) -> str:
        """Why it does not run, or nothing."""
        if shutil.which(CONTROL, path=self._environment["PATH"]) is None:
            return f"there is no {CONTROL}"
        self._folder = Path(tempfile.mkdtemp(prefix="mps"))
        named = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        self._variables = dict.fromkeys(named, str(self._folder))
        if said := self._control():
            return f"{CONTROL} -d: {said}"
        end = time.monotonic() + ANSWERS / 5
        while not (self._folder / "control").exists() and time.monotonic() < end:
            time.sleep(0.01)  # the daemon makes its pipe when the command has returned
        try:
            client = subprocess.run(
                [sys.executable, "-c", _CLIENT],
                env={**self._environment, **self._variables},
                capture_output=True,
                text=True,
                timeout=ANSWERS,
            )
        except subprocess.TimeoutExpired:
            return f"a client waits for {ANSWERS:.0f} s and more"
        said = client.stdout.strip()
        return "" if said == "0" else f"a client has CUDA error {said or 'of no number'}"

    def _control(self, command: str = "") -> str:
        """Give the daemon a command, or start it; what is wrong, or nothing."""
        # A client's choice of GPUs counts among those that the daemon has, so it has all.
        environment = {**self._environment, **self._variables}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        program = str(shutil.which(CONTROL, path=environment["PATH"]))
        try:
            done = subprocess.run(
                [program, *([] if command else ["-d"])],
                input=command + "\n",
                env=environment,
                # A pipe would stay open with the daemon.
                **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
                text=True,
                timeout=ANSWERS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return f"status {done.returncode}" if done.returncode else ""
