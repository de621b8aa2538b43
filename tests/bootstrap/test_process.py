"""What a process has one of, and who may begin anew."""

from __future__ import annotations

import gc
import os

from pycollective.bootstrap.attach import NODE, ProcessNode


def test_the_node_is_found_again_while_somebody_has_it() -> None:
    finder = ProcessNode()
    node = finder.get()
    assert finder.get() is node
    token = node.token
    del node
    gc.collect()
    assert finder.get().token != token  # the finder kept nothing alive


def test_a_forgotten_node_is_its_owners_alone() -> None:
    finder = ProcessNode()
    old = finder.get()
    finder.forget()
    new = finder.get()
    assert new is not old
    assert new.token != old.token
    assert finder.get() is new


def test_finders_have_nothing_in_common() -> None:
    node = NODE.get()
    assert ProcessNode().get() is not node
    assert NODE.get() is node


def test_a_fork_finds_one_of_its_own() -> None:
    finder = ProcessNode()
    node = finder.get()
    child = os.fork()
    if not child:
        alike = 3
        try:
            own = finder.get()
            alike = int(own is node) + int(own.token == node.token) + int(finder.get() is not own)
        finally:
            os._exit(alike)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert finder.get() is node
