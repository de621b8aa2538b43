"""What `pycollective schedule` says of the bytes between hosts: the codecs', and what is sent."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.native_parts import pack_into
from pycollective.cli.schedule_table import HEADERS, LENGTH, least
from pycollective.dtypes import numpy_type
from pycollective.planning.tuning_table import ELEMENTS
from tests.cli.test_schedule import invoke
from tests.launchers import launcher

PROGRAM = """
import ml_dtypes
import numpy as np
import pycollective as pc

with pc.init(timeout=30, wire="exact") as comm:
    for algorithm, dtype, fill in {calls}:
        x = np.zeros({count}, np.dtype(dtype))
        if fill == "random":
            x = np.random.default_rng(comm.rank).integers(0, 256, x.nbytes, np.uint8).view(x.dtype)
        before = comm.stats()
        comm.all_reduce(x, algorithm=algorithm)
        after = comm.stats()
        sent = [after[key] - before[key] for key in ("sent_bytes", "sent_raw_bytes")]
        sent = np.array(sent + [after["sent_messages"] - before["sent_messages"]])
        comm.all_reduce(sent)
        if comm.rank == 0:
            print("SENT", *sent, flush=True)
"""


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 300, 12_800, 100_003])
def test_the_least_is_what_zeros_take(dtype, count):
    size = ELEMENTS[dtype].size
    if dtype not in HEADERS:
        with pytest.raises(ValueError, match="no packing of"):
            pack_into(np.zeros(1, numpy_type(dtype)), np.empty(99, np.uint8))
        assert least(dtype, size, count) == size * count
        return
    room = np.empty(size * count + 64, np.uint8)
    packed = pack_into(np.zeros(count, numpy_type(dtype)), room)
    assert least(dtype, size, count) == min(size * count, LENGTH + packed)


def between(*arguments):
    """(raw, packed at least) or (raw, None) of the line about hosts; None without one."""
    done = invoke(*arguments)
    assert done.exit_code == 0
    found = re.findall(
        r"^between hosts.*: all ranks together send ([\d,]+) bytes raw(.*)$",
        done.stdout,
        re.MULTILINE,
    )
    if not found:
        return None
    [(raw, rest)] = found
    packed = re.search(r"=exact from ([\d,]+), where all values are 0, to 4 a piece more", rest)
    return tuple(
        int(each.replace(",", "")) if each else None for each in (raw, packed and packed[1])
    )


def test_hierarchical_on_two_hosts():
    # Of each of 4 shards of 4,096 elements two nodes cross, one each way, added at both ends or a
    # node and a result; each is packed by itself.
    raw, packed = between("hierarchical", "-n", 4, "--topology", "2x2", "--size", "32K")
    assert raw == 4 * 4096 * (4 + 2)
    assert packed == 4 * (32 * 4 + 4 + 32 * 3 + 4)


COUNT = 1 << 19
CALLS = [
    (algorithm, dtype, fill)
    for algorithm in ("ring", "hierarchical", "halving_doubling", "tree", "direct")
    for dtype in ("bfloat16", "float32")
    for fill in ("zeros", "random")
]


def test_what_is_sent_lies_in_the_range(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(calls=CALLS, count=COUNT))
    done = launcher("forks").run(4, str(tmp_path / "program.py"), PYCOLLECTIVE_TOPOLOGY="2x2")
    assert done.returncode == 0, done.stderr
    sent = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("SENT")]
    assert len(sent) == len(CALLS)
    for (algorithm, dtype, fill), counted in zip(CALLS, sent, strict=True):
        actual, actual_raw, messages = map(int, counted)
        size = COUNT * ELEMENTS[dtype].size
        raw, packed = between(algorithm, "-n", 4, "--topology", "2x2", "-d", dtype, "--size", size)
        heads = 300 * messages  # what went before the data, and of each message some lengths
        what = algorithm, dtype, fill, actual, actual_raw, messages, raw, packed
        assert raw <= actual_raw <= raw + heads, what
        assert packed <= actual <= raw + heads, what
        if fill == "zeros":
            assert actual <= 1.2 * packed + heads, what
