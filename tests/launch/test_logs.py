"""`pycollective run --log-dir`: what ranks print, in files."""

from __future__ import annotations

from tests.launch.test_output import DEFAULT, run

# On both streams; the second line of stdout has no end.
SCRIPT = r"printf 'out %s\nrest' $RANK; printf 'err %s\n' $RANK >&2"


def logs(folder):
    """By its place in the folder, what is in each file."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_tag_of_torch_is_not_doubled(tmp_path):
    """The rank's own, where a line begins; logs have the output as it is."""
    text = "[rank0]: Error\n[rank0]:[W1]\n[rank1]: x\na [rank0]: y\n"
    done = run("-n", 1, "--log-dir", tmp_path, "printf", text, command=DEFAULT)
    tagged = ["[0] Error", "[0] [W1]", "[0] [rank1]: x", "[0] a [rank0]: y"]
    assert done.stdout.splitlines() == tagged
    assert logs(tmp_path)["0/stdout.log"] == text


def test_each_rank_has_two_files_and_its_output_is_shown_all_the_same(tmp_path):
    folder = tmp_path / "runs" / "first"
    done = run("-n", 2, "--log-dir", folder, "sh", "-c", SCRIPT, command=DEFAULT)
    assert logs(folder) == {
        f"{rank}/{name}.log": text
        for rank in range(2)
        for name, text in (("stdout", f"out {rank}\nrest"), ("stderr", f"err {rank}\n"))
    }
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[0] rest", "[1] out 1", "[1] rest"]
    assert sorted(done.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert done.returncode == 0


def test_a_folder_that_has_something_stays_as_it_is(pycollective, tmp_path):
    (tmp_path / "old").write_text("of another run")
    done = pycollective("run", "--log-dir", tmp_path, "echo", "new")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"pycollective run: --log-dir {tmp_path} is not empty, and may hold another run's output: "
        "name a new folder\n"
    )
    assert logs(tmp_path) == {"old": "of another run"}
    done = pycollective("run", "--log-dir", tmp_path / "old", "echo", "new")
    assert done.stderr == f"pycollective run: --log-dir {tmp_path / 'old'}: File exists\n"


def test_what_has_begun_as_a_line_is_in_the_file_at_once(tmp_path):
    """As what a rank that hangs has printed last."""
    log = tmp_path / "a" / "0" / "stdout.log"
    wait = f"for i in $(seq 2000); do [ -s {log} ] && exit; sleep 0.01; done; exit 1"
    done = run("--log-dir", tmp_path / "a", "sh", "-c", f"printf begun; {wait}", command=DEFAULT)
    assert (done.returncode, done.stdout) == (0, "[0] begun\n")


def test_a_file_that_cannot_be_written_is_named_and_costs_no_line(tmp_path):
    folder = tmp_path / "a"
    lines = "ulimit -f unlimited; for i in $(seq 300); do echo line $i of some length; done"
    limited = ["sh", "-c", 'ulimit -S -f 4; "$@"', "sh", *DEFAULT]
    done = run("--log-dir", folder, "sh", "-c", lines, command=limited)
    assert len(done.stdout.splitlines()) == 300
    assert "output is lost: [Errno 27] File too large" in done.stderr
    assert str(folder / "0" / "stdout.log") in done.stderr
    assert done.returncode == 1


def test_a_program_that_cannot_be_started_leaves_no_folder(pycollective, tmp_path):
    assert pycollective("run", "--log-dir", tmp_path / "a", "no-such-program").returncode == 2
    assert list(tmp_path.iterdir()) == []
