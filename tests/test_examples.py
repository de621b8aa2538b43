"""The examples do what they say; those that need more than torch run in `make examples`."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import run_all
from tests.harness import ROOT
from tests.launchers import Forks, Torchrun

COMMANDS = {program.stem: run_all.commands(program) for program in run_all.programs()}
# Ranks of these are forks: what they show does not depend on how ranks start.
FORKED = [
    *("compressed_on_gpus", "ddp", "fsdp", "fsdp_bf16_wire", "nccl_same_bits"),
    *("tensor_parallel", "zero"),
]
SHOWS = {
    "compressed_on_gpus": r"gloo: .* weights \w{16} on all ranks; 4\.7 MB sent .* 120\.4 MB",
    "ddp": r"of the digits right; weights \w{16} with large and small buckets",
    "fsdp": r"loss 2\.\d+; weights \w{16} under FSDP2, HSDP and DDP",
    "fsdp_bf16_wire": r"travelled as bf16 \(18\.1 MB from a rank\) or as fp32 \(36\.3 MB\)",
    "nccl_same_bits": r"gloo: weights \w{16} .* sizes, by the hook\nwithout the hook \d diff",
    "tensor_parallel": r"loss 2\.\d+ to 0\.\d+; at most \S+ from one process's",
    "zero": r"the optimizer keeps \[\d+, \d+, \d+\] numbers, not \d+",
}


def ranks_and_program(command: str) -> tuple[int, list[str]]:
    """Of a command like `torchrun --nproc-per-node 3 PROGRAM ...`."""
    words = shlex.split(command)
    place = words.index("--nproc-per-node")
    return int(words[place + 1]), [str(ROOT / words[place + 2]), *words[place + 3 :]]


def forked(command: str) -> str:
    """What ranks print that are started so, but as forks."""
    ranks, program = ranks_and_program(command)
    done = Forks("tests.torch.example_programs").run(ranks, *program)
    assert done.returncode == 0, done.stderr
    return done.stdout


# One that trains and takes four seconds; the others in `make storm`.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.storm if n != "zero" else ()) for n in FORKED]
)
def test_an_example_shows_what_it_says(name):
    (command,) = COMMANDS[name]
    assert re.search(SHOWS[name], forked(command))


@pytest.mark.storm
def test_any_number_of_ranks_ends_with_the_same_weights():
    pattern = r"(\d) rank\(s\): \S+ of the digits right; weights (\w{16})\n"
    found = [re.fullmatch(pattern, forked(each)) for each in COMMANDS["any_number_of_ranks"]]
    assert [each[1] for each in found] == ["1", "3"]
    assert found[0][2] == found[1][2]


@pytest.mark.storm
def test_any_number_of_gpus_ends_with_the_same_weights():
    pattern = r"(\d) rank\(s\) on CPUs, over Gloo: weights (\w{16})\n"
    found = [re.fullmatch(pattern, forked(each)) for each in COMMANDS["any_number_of_gpus"]]
    assert [each[1] for each in found] == ["1", "2"]
    assert found[0][2] == found[1][2]


@pytest.mark.storm
def test_a_checkpoint_is_loaded_by_fewer_ranks(tmp_path):
    save, load = (
        each.replace(" out/checkpoint", f" {tmp_path}/kept") for each in COMMANDS["checkpoint"]
    )
    digest = re.fullmatch(r"4 ranks, loss \S+: saved (\w{16})\n", forked(save))
    assert digest
    assert re.fullmatch(rf"2 ranks, loss \S+: loaded {digest[1]}; 40 .*\n", forked(load))


# Each start of a rank imports torch. Without it: tests/bootstrap/test_restarts.py.
@pytest.mark.storm
def test_ranks_that_torchrun_starts_anew_go_on(tmp_path):
    (command,) = COMMANDS["elastic"]
    words = shlex.split(command)[1:]
    words[-1] = str(ROOT / words[-1])
    with_torchrun = Torchrun().command(0)[:4]  # on a port that is free, unlike the command's
    done = subprocess.run(
        [*with_torchrun, *words],
        cwd=tmp_path,
        env=Torchrun().environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "went on from step 30" in done.stdout
    assert done.stderr.count("goes on from step 30") == 3


@pytest.mark.storm
def test_a_rank_that_is_killed_changes_no_bit():
    undisturbed, killed = COMMANDS["elastic_leaves"]
    good, said = run_all.run(Path(sys.executable), undisturbed)
    assert good, said
    assert re.fullmatch(r"\[0\] loss 0\.0\d+; weights \w{16}", said)
    assert run_all.run(Path(sys.executable), killed) == (True, said)


@pytest.mark.storm
def test_two_ranks_cannot_differ_over_nccl():
    (command,) = COMMANDS["nccl_same_bits"]
    said = forked(command.replace("--nproc-per-node 3", "--nproc-per-node 2"))
    assert re.search(r"by the hook\ntwo ranks cannot differ, .*: take 3 or more", said)
    assert "different" not in said


def test_the_table_has_each_command():
    text = (ROOT / "examples/README.md").read_text()
    table = re.findall(r"^\| (.*?) ?\| `((?:torchrun|pycollective) .*?)` \|", text, re.M)
    named = [program.strip("`") for program, _ in table if program]
    assert sorted(named) == sorted(f"{name}.py" for name in COMMANDS)
    assert sorted(command for _, command in table) == sorted(itertools.chain(*COMMANDS.values()))
