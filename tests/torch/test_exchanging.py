"""The threads of states of compression, and what the end of a process does to them."""

from __future__ import annotations

import threading

import pytest

from pycollective.errors import ConfigurationError
from pycollective.torch.worker import Worker, Workers


def test_the_end_waits_for_what_was_issued_and_takes_no_more() -> None:
    those, others = Workers(), Workers()
    worker = Worker("a state of compression", lambda reason: None, those)
    other = Worker("a state of compression", lambda reason: None, others)
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        assert released.wait(10)
        ended.set()

    worker.post(call)
    assert begun.wait(10)
    threading.Timer(0.1, released.set).start()
    those.let_end()
    assert ended.is_set()
    assert not worker.busy
    with pytest.raises(ConfigurationError, match="the process ends"):
        worker.post(call)
    assert other.call(lambda: 7) == 7  # of those the end has not begun
    those.end_all()
    assert worker.ended
    assert not other.ended
    others.end_all()
    assert other.ended


def test_at_the_end_what_hangs_is_aborted() -> None:
    those = Workers()
    aborted: list[str] = []
    released = threading.Event()

    def abort(reason: str) -> None:
        aborted.append(reason)
        released.set()

    worker = Worker("a state of compression", abort, those)
    worker.post(lambda: released.wait(10))
    those.end_all()
    assert aborted == ["the process ends"]
    assert not worker.busy
    with pytest.raises(ConfigurationError, match="the process ends"):
        Worker("a state of compression", abort, those).post(lambda: None)


def test_who_was_let_go_of_is_not_kept() -> None:
    those = Workers()
    worker = Worker("a state of compression", lambda reason: None, those)
    assert list(those._live) == [worker]
    del worker
    assert list(those._live) == []


@pytest.mark.parametrize("how", ["let_end", "end_all"])
def test_the_end_waits_for_a_thread_whose_last_call_lets_go_of_its_exchanger(how) -> None:
    those = Workers()
    freeing, released, freed = threading.Event(), threading.Event(), threading.Event()
    left = threading.Event()  # the frame that holds what the call does

    class Groups:
        """What gives back the interpreter's lock while it is freed."""

        def __del__(self) -> None:
            freeing.set()
            assert released.wait(10)
            freed.set()

    def give_last() -> None:
        worker = Worker("a state of compression", lambda reason: None, those)
        kept = (Groups(), worker)  # from the last on
        worker.post(lambda: left.wait(10) and kept and None)

    give_last()
    left.set()
    assert freeing.wait(10)
    assert list(those._live) == []
    threading.Timer(0.1, released.set).start()
    getattr(those, how)()
    assert freed.is_set()
