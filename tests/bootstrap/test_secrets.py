"""A store at a port wants a secret; and whoever knows it, and forges, crashes no rank."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import pycollective as pc
from pycollective.bootstrap.store import StoreClient, job_secret
from tests.harness import PerRank, Ranks, results
from tests.joining import failing, free_place, works
from tests.launchers import OwnLauncher

WORD = "a-word-of-this-test"


def join_at(comm, rank, place):
    return failing(lambda: works(pc.init(rank=rank, size=2, store=place, timeout=20)) or 1 / 0)


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{WORD}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def no_secret(monkeypatch):
    monkeypatch.delenv("PYCOLLECTIVE_SECRET", raising=False)
    monkeypatch.delenv("PYCOLLECTIVE_SECRET_FILE", raising=False)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_read_or_write_keeps_no_secret(
    no_secret, monkeypatch, secret_file, mode
):
    monkeypatch.setenv("PYCOLLECTIVE_SECRET_FILE", str(secret_file))
    assert job_secret() == WORD
    secret_file.chmod(mode)
    with pytest.raises(pc.ConfigurationError, match=r"keeps no secret.*chmod 600"):
        job_secret()


def test_a_secret_that_cannot_be_one_is_said(no_secret, monkeypatch, secret_file):
    assert job_secret() == ""
    monkeypatch.setenv("PYCOLLECTIVE_SECRET_FILE", str(secret_file))
    secret_file.write_text(" \n")
    with pytest.raises(pc.ConfigurationError, match="is empty"):
        job_secret()
    secret_file.write_bytes(b"\xff\xfe")
    with pytest.raises(pc.ConfigurationError, match="not one word of ASCII"):
        job_secret()
    secret_file.unlink()
    with pytest.raises(pc.ConfigurationError, match="cannot be read"):
        job_secret()
    os.mkfifo(secret_file, 0o600)  # nobody writes into it
    with pytest.raises(pc.ConfigurationError, match="keeps no secret"):
        job_secret()
    monkeypatch.setenv("PYCOLLECTIVE_SECRET", "two words")
    with pytest.raises(pc.ConfigurationError, match="PYCOLLECTIVE_SECRET is not one word"):
        job_secret()


@pytest.mark.parametrize("name", ["PYCOLLECTIVE_SECRET", "PYCOLLECTIVE_SECRET_FILE"])
def test_a_launcher_keeps_the_secret_that_it_is_given(secret_file, name):
    """Ranks of several launches can meet by it."""
    given = {name: WORD if name == "PYCOLLECTIVE_SECRET" else str(secret_file)}
    says = "import os; print(os.environ['PYCOLLECTIVE_SECRET'])"
    done = OwnLauncher().run(2, "-c", says, **given)
    assert done.stdout.split() == [WORD, WORD], done.stdout + done.stderr


def forge(spy, change):
    """As soon as both ranks have published their records, write a table that `change` has spoiled,
    before they have."""
    records = [json.loads(spy.get(f"pycollective/init/host/arrived/{rank}")) for rank in range(2)]
    names = ("token", "offset", "data_bytes", "socket_name", "host")
    table = [[each[name] for each in records] for name in names]
    change(table)
    spy.compare_set("pycollective/init/host/arrived", "", "decided " + json.dumps(table))


def hold_the_last_word(comm, rank, place):
    """The rank that comes last says what all are told only when the forger has had its say."""
    from pycollective.bootstrap.rendezvous import Rendezvous

    set_if_unset = Rendezvous._set_if_unset

    def late(self, name, value):
        if self._prefix.endswith("/host/") and name == "arrived":
            assert self._is_set_within(self._key(name), 20)
        return set_if_unset(self, name, value)

    Rendezvous._set_if_unset = late
    return join_at(comm, rank, place)


def huge_offset(table):
    table[1][1] = 2**64 - 4096


def huge_offset_in_range(table):
    table[1][1] = 2**63 - 4096


def no_data(table):
    table[2][1] = 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (huge_offset, "of rank 1 the offset is 18446744073709547520"),
        (huge_offset_in_range, "rank 1 has published another offset than its row"),
        (no_data, "rank 1 has published another data_bytes than its row"),
    ],
)
def test_who_knows_the_secret_and_forges_crashes_no_rank(change, said):
    place = free_place()
    variables = {"PYCOLLECTIVE_SECRET": WORD}
    start = time.monotonic()
    with (
        Ranks(2, join=False, module=__name__, variables=variables) as ranks,
        ThreadPoolExecutor(1) as threads,
    ):
        calling = threads.submit(ranks.call, hold_the_last_word, PerRank([0, 1]), place)
        with closing(StoreClient(place, WORD, 20)) as spy:
            forge(spy, change)
        answers = results(calling.result(30))
    for error, _ in answers:
        assert isinstance(error, pc.ConfigurationError), error
        assert said in str(error)
    assert time.monotonic() - start < 15
