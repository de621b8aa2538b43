"""Headroom: of the machine and of each cgroup, read from made-up trees."""

from __future__ import annotations

import pytest

from pycollective import ConfigurationError, host_memory
from pycollective.host_memory import Headroom, check, headroom

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path):
    """Writes files below a folder, and asks for the headroom there."""

    def ask(files):
        for name, text in {
            "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable:  1024000 kB\nMemFree: 5 kB\n",
            **files,
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return headroom(tmp_path / "proc", tmp_path / "cgroup")

    return ask


def v2(folder, limit, usage, stat=""):
    return {
        f"cgroup/{folder}/memory.max": f"{limit}\n",
        f"cgroup/{folder}/memory.current": f"{usage}\n",
        f"cgroup/{folder}/memory.stat": stat,
    }


SELF = {"proc/self/cgroup": "0::/a\n"}
CACHED = f"anon {50 * MIB}\nactive_file {20 * MIB}\ninactive_file {10 * MIB}\nshmem 7\n"
VERSION_1 = {
    "proc/self/cgroup": "5:cpu,memory:/job\n4:cpuset:/job\n",
    "cgroup/memory/job/memory.limit_in_bytes": f"{64 * MIB}\n",
    "cgroup/memory/job/memory.usage_in_bytes": f"{60 * MIB}\n",
    "cgroup/memory/job/memory.stat": f"total_inactive_file {8 * MIB}\ninactive_file 1\n",
    "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "cgroup/memory/memory.usage_in_bytes": "0\n",
}
# Files; the room in bytes; what limits it.
TREES = {
    "the machine": ({}, 1000 * MIB, "the machine's MemAvailable"),
    "a limit of max": ({**SELF, **v2("a", "max", 5)}, 1000 * MIB, "the machine's MemAvailable"),
    "the own group": ({**SELF, **v2("a", 300 * MIB, 100 * MIB)}, 200 * MIB, "cgroup/a/memory.max"),
    "cached files": ({**SELF, **v2("a", 100 * MIB, 90 * MIB, CACHED)}, 40 * MIB, "memory.max"),
    "usage above it": ({**SELF, **v2("a", 100, 200)}, 0, "memory.max"),
    "a container": (
        {"proc/self/cgroup": "0::/docker/0123\n", **v2(".", 50 * MIB, 10 * MIB)},
        *(40 * MIB, "memory.max"),
    ),
    "a limit far above": (
        {**SELF, **v2("a", 9000 * MIB, 5, "it-is-not-read")},
        *(1000 * MIB, "the machine's MemAvailable"),
    ),
    "version 1": (VERSION_1, 12 * MIB, "memory.limit_in_bytes"),
}


@pytest.mark.parametrize("name", TREES)
def test_headroom(tree, name):
    files, room, limit = TREES[name]
    found = tree(files)
    assert found.bytes == room
    assert found.limit.endswith(limit)


@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
def test_every_group_up_to_the_root_limits(tree, tightest):
    files = {"proc/self/cgroup": "0::/a/b/c\n"}
    for folder in ("a", "a/b", "a/b/c"):
        files |= v2(folder, (100 if folder == tightest else 500) * MIB, 40 * MIB)
    assert tree(files).bytes == 60 * MIB


def test_nothing_known_is_no_limit(tmp_path):
    assert headroom(tmp_path / "proc", tmp_path / "cgroup").bytes > 1 << 50


def test_this_machine_has_room():
    assert 0 < headroom().bytes < 1 << 50


def test_ranks_are_asked_for_together():
    room = Headroom(100 * MIB, "the limit F")
    check(50 * MIB, 2, room)
    with pytest.raises(ConfigurationError) as caught:
        check(50 * MIB, 3, room)
    assert "3 ranks need 150.0 MiB" in str(caught.value)
    assert "the limit F leaves 100.0 MiB" in str(caught.value)
    assert "run fewer ranks" in str(caught.value)


def test_the_check_asks_this_machine_unless_told(monkeypatch):
    monkeypatch.setattr(host_memory, "headroom", lambda: Headroom(1, "a test"))
    with pytest.raises(ConfigurationError, match="a test leaves"):
        check(2, 1)
