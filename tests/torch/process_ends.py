"""Ends processes in every way that people do; `python -m tests.torch.process_ends --help`.

One process imports torch once; each rank of each round is a fork of it, which joins, does what the
way says, and then ends as any program does: with the whole end of the interpreter. So a round costs
a second or two, and hundreds of them can be had.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.torch.ways_to_end import WAYS, daemon_trains, slow_callback

ROUND_LIMIT = 60.0  # seconds until it counts as a hang, and is aborted
ABORT_LIMIT = 5.0  # from then until it is killed


def start(way, rank, size, path, log):
    """The pid of a rank. The rank itself returns, and ends as the program does."""
    pid = os.fork()
    if pid:
        return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()  # for whoever is still there at the limit
    way(rank, size, path)
    return 0


def statuses_of(pids):
    """How each ended, and which had not by the limit: they are killed."""
    deadline = time.monotonic() + ROUND_LIMIT
    statuses, hung = {}, set()
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline and pid not in hung:
                    hung.add(pid)
                    os.kill(pid, signal.SIGABRT)  # tells where Python is, if it still can
                elif time.monotonic() > deadline + ABORT_LIMIT:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids], sorted(hung)


def main():
    """Runs the rounds, and prints what went wrong. Returns in each rank too, which then ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--frozen", action="store_true", help="seek no garbage in what is imported")
    parser.add_argument("ways", nargs="*", help="all of them unless given")
    given = parser.parse_args()
    if given.frozen:
        gc.freeze()
    chosen = [way for way in WAYS if not given.ways or way.__name__ in given.ways]
    bad = []
    folder = tempfile.mkdtemp()  # not in a `with`: a rank returns through here as well
    for turn in range(given.rounds):
        for way in chosen:
            place = f"{folder}/{turn}-{way.__name__}"
            logs = [Path(f"{place}-{rank}") for rank in range(given.ranks)]
            pids = []
            for rank, log in enumerate(logs):
                pids.append(start(way, rank, given.ranks, place, log))
                if not pids[-1]:
                    return
            began = time.monotonic()
            statuses, hung = statuses_of(pids)
            texts = [log.read_text(errors="replace") for log in logs]
            right = not hung and set(statuses) <= WAYS[way]
            if way is daemon_trains:
                right = right and all(
                    status == 0 or "terminate called without an active exception" in text
                    for status, text in zip(statuses, texts, strict=True)
                )
            if way is slow_callback:
                right = right and all("the callback has run" in text for text in texts)
            if not right:
                took = round(time.monotonic() - began, 1)
                bad.append({"way": way.__name__, "round": turn, "seconds": took, "hung": hung})
                bad[-1] |= {"statuses": statuses, "said": texts, "load": os.getloadavg()}
                print(json.dumps(bad[-1]), file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    print(json.dumps({"ends": given.rounds * len(chosen), "bad": bad}), flush=True)


if __name__ == "__main__":
    main()
