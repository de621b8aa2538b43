"""A ledger's file: what was written is read, whatever was cut or damaged."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock
from zlib import crc32

import numpy as np
import pytest
import xxhash

from pycollective import ConfigurationError
from pycollective.ledger.layout import CHECK, LINE, MAGIC, PREFIX, RESULT
from pycollective.ledger.reader import read
from pycollective.ledger.writer import Writer
from tests.ledger.made import NAMES, header, note


def test_what_was_noted_is_read(tmp_path):
    writer = Writer(tmp_path, header(), 2, 5)
    writer.gradient(7, 4, 1, np.arange(6.0))
    writer.gradient(7, 4, 0, b"")
    writer.end_leaf()
    writer.result(7, 2, b"average")
    writer.flush()
    writer.flush()  # nothing
    writer.result(8, 2, b"next")
    writer.note_ranks(0, 4)
    writer.result(1 << 40, 0, b"last")
    writer.flush()
    writer.result(9, 2, b"of no whole step")
    writer.close()
    found = read(writer.path)
    assert found.header == header()
    assert found.records["step"].tolist() == [7, 7, 7, 8, 1 << 40]
    assert found.records["parameter"].tolist() == [1, 0, 2, 2, 0]
    assert found.records["leaf"].tolist() == [4, 4, RESULT, RESULT, RESULT]
    assert found.ranks.tolist() == [[2, 5]] * 4 + [[0, 4]]
    digests = [each.tobytes() for each in found.records["digest"]]
    contents = [np.arange(6.0).tobytes(), b"", b"average", b"next", b"last"]
    assert digests == [xxhash.xxh3_128_digest(each) for each in contents]


def test_a_leaf_that_was_not_whole_is_not_noted(tmp_path):
    writer = Writer(tmp_path, header(), 0, 1)
    writer.gradient(0, 1, 2, b"raises")
    for place in (2, 1):
        writer.gradient(0, 3, place, b"")
    writer.end_leaf()
    writer.gradient(0, 4, 2, b"raises")
    writer.flush()
    writer.close()
    assert read(writer.path).records["leaf"].tolist() == [3, 3]


def test_a_folder_is_read_whole_and_names_never_collide(tmp_path):
    paths = {note(tmp_path / "a", 1, 2, [step]) for step in range(20)}
    assert len(paths) == 20
    assert {each.name.partition("-")[0] for each in paths} == {"rank1"}
    (tmp_path / "a" / "notes.txt").write_text("is no ledger")
    found = read(tmp_path / "a")
    assert sorted(np.unique(found.records["step"]).tolist()) == [*range(20)]
    assert len(found.records) == len(found.ranks) == 20 * 4 * len(NAMES)


def test_a_file_may_be_cut_at_any_byte(tmp_path):
    """What is left of whole blocks is read; a header that was cut leaves nothing."""
    path = note(tmp_path, steps=range(30))
    data = path.read_bytes()
    whole = read(path).records
    block = (7 * len(NAMES) + 1) * LINE
    draw = random.Random(1)
    tail = range(len(data) - 2 * block, len(data))
    beside = note(tmp_path / "beside", steps=[0])
    for size in [*tail, *range(300), *(draw.randrange(len(data)) for _ in range(300))]:
        path.write_bytes(data[:size])
        begin = len(data) - 30 * block
        if size < begin:
            with pytest.raises(ConfigurationError, match="ends within its header"):
                read(path)
        else:
            left = read(path).records
            assert len(left) == (size - begin) // block * 7 * len(NAMES)
            assert (left == whole[: len(left)]).all()
    path.write_bytes(data[:40])
    os.rename(path, beside.parent / path.name)
    assert len(read(beside.parent).records) == 7 * len(NAMES)  # the other's


def test_any_damaged_byte_is_told_or_was_of_no_matter(tmp_path):
    path = note(tmp_path, steps=range(5))
    data = bytearray(path.read_bytes())
    whole = read(path)
    told = 0
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        data[at] ^= 1 << at % 8
        found = None
        with suppress(ConfigurationError):
            found = read(path)
        told += found is None
        if found is not None:
            assert found.header == whole.header
            assert (found.records == whole.records[: len(found.records)]).all()
    # But for 8 bytes of the prefix, and 4 by which the last block is known to be whole.
    assert told == len(data) - CHECK.size + 4 - 4


def damaged(data: bytes, case: str) -> bytes:
    """A file's bytes, made wrong in a way that no checksum tells."""

    def with_header(text: bytes, version: int = 1, length: int | None = None) -> bytes:
        text += b" " * (-len(text) % LINE)
        prefix = PREFIX.pack(MAGIC, version, len(text) if length is None else length, crc32(text))
        return prefix + CHECK.pack(crc32(prefix)) + text

    size = header().packed()
    rows = '"parameters": [["w", "float32", [2]]]'
    return {
        "garbage": bytes(random.Random(2).randbytes(500)),
        "text": b"what is this\n",
        "version": with_header(b"{}", version=9),
        "header of 4 GB": with_header(b"{}", length=0xFFFFFFE0) + data,
        "odd header": with_header(b"{}", length=33) + data,
        "no JSON": with_header(b"\xff{"),
        "a list": with_header(b"[]"),
        "nested": with_header(b"[" * 100_000),
        "no parameters": with_header(b'{"leaves": 1, "seed": 0, "parameters": []}'),
        "half a row": with_header(b'{"leaves": 1, "seed": 0, "parameters": [["w"]]}'),
        "leaves": with_header(b'{"leaves": 1e99, "seed": 0, ' + rows.encode() + b"}"),
        "many leaves": with_header(b'{"leaves": 9999999999, "seed": 0, ' + rows.encode() + b"}"),
        "name": with_header(b'{"leaves": 1, "seed": 0, "parameters": [[7, "float32", [2]]]}'),
        "shape": with_header(b'{"leaves": 1, "seed": 0, "parameters": [["w", "f", "ab"]]}'),
        "fewer parameters": header(NAMES[:1]).packed() + data[len(size) :],
        "fewer leaves": header(leaves=2).packed() + data[len(size) :],
        "a block twice": data + data[len(size) :],
    }[case]


CASES = {
    "garbage": "byte 0: this is no ledger",
    "text": "byte 0: this is no ledger",
    "version": "byte 8: a ledger of version 9, and this pycollective reads 1",
    "header of 4 GB": "byte 0: the ledger is damaged here",
    "odd header": "byte 0: the ledger is damaged here",
    "no JSON": "byte 32: the header is damaged",
    "a list": "byte 32: the header is damaged",
    "nested": "byte 32: the header is damaged",
    "no parameters": "byte 32: the header is damaged: it names no parameters",
    "half a row": "byte 32: the header is damaged",
    "leaves": "byte 32: the header is damaged: it has no number where one belongs",
    "many leaves": "byte 32: the header is damaged",
    "name": "byte 32: the header is damaged: it names no parameters",
    "shape": "byte 32: the header is damaged: it has no number where one belongs",
    "fewer parameters": "is no record of this header",
    "fewer leaves": "is no record of this header",
    "a block twice": "block 4 is damaged",
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_ledger_is_refused_and_where(tmp_path, case):
    path = note(tmp_path)
    path.write_bytes(damaged(path.read_bytes(), case))
    with pytest.raises(ConfigurationError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}, byte ")
    assert CASES[case] in str(raised.value)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"holds no ledger: there is no file \*\.ledger"):
        read(tmp_path)
    for make in (
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to(tmp_path / "nowhere"),
        lambda path: path.symlink_to("/dev/zero"),
    ):
        path = tmp_path / "rank0.ledger"
        make(path)
        with pytest.raises(ConfigurationError, match=r"rank0\.ledger is no file"):
            read(tmp_path)
        path.rename(tmp_path / f"{len([*tmp_path.iterdir()])}.txt")


def test_ledgers_of_two_trainings_do_not_share_a_folder(tmp_path):
    first = note(tmp_path)
    for other, what in (
        (header(leaves=7), "leaves 6, and leaves 7|leaves 7, and leaves 6"),
        (header(seed=4), "seed [34], and seed [34]"),
        (header(NAMES[:2]), "[23] parameters, and [23]"),
        (header(("first.weight", "x", "last.weight")), "parameter .* of float32, shape"),
    ):
        path = note(tmp_path, of=other)
        with pytest.raises(ConfigurationError, match=what) as raised:
            read(tmp_path)
        assert str(first) in str(raised.value)
        path.unlink()


# --- What a writer refuses.


def test_a_ledger_without_xxhash_says_how_to_install_it(tmp_path):
    lacking = mock.patch.dict(sys.modules, {"xxhash": None})
    with lacking, pytest.raises(ConfigurationError, match=r"pip install xxhash"):
        Writer(tmp_path, header(), 0, 1)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ConfigurationError, match=rf"the ledger {folder}/rank0-.* cannot be w"):
            Writer(folder, header(), 0, 1)


def test_a_disk_that_gets_full_is_told_and_what_was_written_is_read(tmp_path):
    writer = Writer(tmp_path, header(), 0, 1)
    writer.result(0, 0, b"")
    writer.flush()
    on_disk = writer._file
    left = [40]

    def nearly_full(data):
        data = data[: left[0]]
        left[0] -= len(data)
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return on_disk.write(data)

    writer._file = mock.Mock(wraps=on_disk, write=nearly_full, closed=False)
    writer.result(1, 0, b"")
    full = f"the ledger {writer.path} cannot be written: No space left on device"
    with pytest.raises(ConfigurationError, match=full):
        writer.flush()
    writer._file = on_disk
    with pytest.raises(ConfigurationError, match="is closed, or could not be written"):
        writer.flush()
    writer.close()
    assert read(writer.path).records["step"].tolist() == [0]


def test_a_write_that_takes_a_part_goes_on(tmp_path):
    writer = Writer(tmp_path, header(), 0, 1)
    on_disk = writer._file
    writer._file = mock.Mock(closed=False, write=lambda data: on_disk.write(data[:50]))
    for step in range(3):
        writer.result(step, 0, b"")
        writer.flush()
    assert read(writer.path).records["step"].tolist() == [0, 1, 2]
    on_disk.close()


def test_a_ledger_is_one_processs(tmp_path):
    """A copy would write into the same file."""
    writer = Writer(tmp_path, header(), 0, 1)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot pickle"):
            copied(writer)
    writer.close()
