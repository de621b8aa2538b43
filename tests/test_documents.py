"""The README's examples run as written, and what the documents point at exists."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import measured_tables
from pycollective.config import VARIABLES
from tests.launchers import launcher, python

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "benchmarks", "docs/**", "examples")
DOCUMENTS = sorted(each for folder in FOLDERS for each in ROOT.glob(f"{folder}/*.md"))
README = ROOT / "README.md"
DDP, LEAVES = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
PAGE_OF_NUMPY = ROOT / "docs" / "start" / "numpy.md"
(NUMPY,) = re.findall(r"^```python\n(.*?)^```$", PAGE_OF_NUMPY.read_text(), re.M | re.S)
# In capitals with an underscore in the sources, and no variables.
NO_VARIABLES = {"ANY_SOURCE", "ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING"}
NO_VARIABLES |= {"HAS_FITS", "BFLOAT16_T", "MPIX_BFLOAT16", "PYCOLLECTIVE_"}


def run_example(text: str, ranks: int, folder: Path) -> list[str]:
    """The lines that `ranks` ranks print, each after its rank in brackets."""
    program = folder / "example.py"
    program.write_text(text)
    run = ["-m", "pycollective", "run", "-n", ranks, "--tag-output"]
    return python(*run, program).stdout.splitlines()


def test_the_numpy_example_gives_every_rank_the_same(tmp_path: Path) -> None:
    lines = [line.partition(" ") for line in run_example(NUMPY, 4, tmp_path)]
    assert sorted(rank for rank, _, _ in lines) == ["[0]", "[1]", "[2]", "[3]"]
    assert len({text for _, _, text in lines}) == 1


def run_forks(text: str, ranks: int, folder: Path) -> list[str]:
    """What the ranks print; as forks, because a rank that imports torch takes seconds."""
    (folder / "example.py").write_text(text)
    done = launcher("forks").run(ranks, str(folder / "example.py"))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_ddp_example_prints_one_number_and_two_for_gloo(tmp_path: Path) -> None:
    # Gloo may abort a process that frees its group as it ends ("terminate called").
    kept = "\nimport builtins\nbuiltins.kept = dict(globals())\n"
    words = [line.split() for line in run_forks(DDP + kept, 3, tmp_path)]
    said = ["pycollective 25", "pycollective 0.001", "Gloo 25", "Gloo 0.001"]
    assert [" ".join(each[:2]) for each in words] == said
    *ours, first, second = (number for *_, number in words)
    assert ours[0] == ours[1]
    assert first != second
    short = ours[0][:7]  # further digits differ with torch's kernels
    numbers = rf"one number twice, {short}\d+\. .* two, {short}\d+ and {short}\d+\."
    assert re.search(numbers, README.read_text())


def test_the_example_of_leaves_prints_one_number_on_any_number_of_ranks(tmp_path: Path) -> None:
    lines = [line for ranks in (1, 2, 3) for line in run_forks(LEAVES, ranks, tmp_path)]
    assert len(lines) == 3
    assert len(set(lines)) == 1


def prose(document: Path) -> str:
    """The text without its blocks of code, of which no line is a heading or has a link."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)


def anchors(document: Path) -> list[str]:
    """What GitHub makes of the headings: in lower case, hyphens for spaces, without most signs; a
    number behind those that have come before."""
    before: Counter[str] = Counter()
    made = []
    for heading in re.findall(r"^#+ +(.*?) *$", prose(document), re.M):
        text = re.sub(r"\]\(.*?\)", "", heading)  # of a link
        slug = re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
        made.append(f"{slug}-{before[slug]}" if before[slug] else slug)
        before[slug] += 1
    return made


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_named_files_exist(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\(([^):]+)\)", prose(document)):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    # Paths in backquotes, from the root, from csrc/ or from the package.
    for name in re.findall(r"`([\w/]+\.(?:py|h|inl|cpp|cu|md))`", text):
        homes = (
            document.parent,
            ROOT,
            ROOT / "csrc",
            ROOT / "pycollective",
            *(ROOT / "csrc").iterdir(),
            *(ROOT / "docs").iterdir(),
        )
        written = "/" not in name and f" {name}" in text  # by the reader, who starts it
        assert written or any((home / name).exists() for home in homes), name


def test_every_document_is_reached_from_the_readme() -> None:
    """By its links and tables of contents, and those of what they lead to."""
    reached, left = set(), [README]
    while left:
        document = left.pop()
        if document not in reached:
            reached.add(document)
            links = re.findall(r"\]\(([^):#]+\.md)[)#]", prose(document))
            left += [(document.parent / link).resolve() for link in links]
            for contents in re.findall(
                r"^```{toctree}\n(.*?)^```$", document.read_text(), re.M | re.S
            ):
                for page in re.findall(r"^[\w/*]+$", contents, re.M):
                    left += document.parent.glob(f"{page}.md")
    assert not set(DOCUMENTS) - reached


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 90


@pytest.mark.parametrize("document", measured_tables.TABLES)
def test_measured_tables_are_what_the_result_files_say(document: str) -> None:
    text = (ROOT / document).read_text()
    assert measured_tables.filled(document, text) == text  # python -m benchmarks.measured_tables


def variables_of_the_sources() -> tuple[set[str], set[str]]:
    """Environment variables that the package and its build read or set, as far as the sources show
    it; and all words in capitals there, which others may be among."""
    folders = [(ROOT / "pycollective", "*.py"), (ROOT / "csrc", "*.*")]
    paths = [path for folder, name in folders for path in folder.rglob(name)]
    used, words = set(), set()
    for path in [*paths, ROOT / "setup.py"]:
        if path.is_relative_to(ROOT / "csrc" / "tests") or "__pycache__" in path.parts:
            continue
        text = path.read_text()
        used |= set(re.findall(r'(?:environ\w*(?:\.\w+)?[\[(]|getenv\()\s*"(\w+)"', text))
        used |= set(re.findall(r'"(\w+)" (?:not )?in os\.environ', text))
        words |= set(re.findall(r'"([A-Z][A-Z0-9_]+)"', text))
    return used | {word for word in words if "_" in word} - NO_VARIABLES, words


def test_the_page_of_variables_names_those_that_the_sources_have() -> None:
    page = (ROOT / "docs" / "reference" / "variables.md").read_text()
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.M)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    used, words = variables_of_the_sources()
    not_on_the_page, not_in_the_sources = used - set(named), set(named) - words
    assert not not_on_the_page
    assert not not_in_the_sources
    assert len(named) == len(set(named))
    # A name that is not in this list is warned of as misspelt.
    assert {name for name in named if name.startswith("PYCOLLECTIVE_")} == set(VARIABLES)
