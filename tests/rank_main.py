"""What a rank of a test runs: calls that come over a pipe, until it closes."""

from __future__ import annotations

import faulthandler
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

import pycollective as pc


def main() -> None:
    faulthandler.enable()
    pipe = Connection(int(sys.argv[1]))
    timeout, join = float(sys.argv[2]), sys.argv[3] == "1"
    communicator = pc.init(timeout=timeout) if join else None
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        answer: tuple[Any, BaseException | None]
        try:
            answer = (function(communicator, *args), None)
        except BaseException as error:  # whatever it is goes to the test, which asked for it
            answer = (None, error)
        try:
            data = pickle.dumps(answer)
        except Exception as error:
            data = pickle.dumps((None, RuntimeError(f"cannot pickle {answer!r}: {error}")))
        pipe.send_bytes(data)
    if communicator is not None:
        communicator.close()


if __name__ == "__main__":
    main()
