"""The documentation site has every public name, and no link of it is broken."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import runpy
import types
from functools import cache, cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.site import DOCS, build

inventory = pytest.importorskip("sphinx.util.inventory")
pytestmark = pytest.mark.timeout(600)  # a build takes minutes beside busy processes

MODULES = re.findall(
    r"automodule:: ([\w.]+)",
    "".join(page.read_text() for page in sorted((DOCS / "reference" / "api").glob("*.md"))),
)
# Methods of public classes that the library alone calls.
OF_THE_LIBRARY = {
    "pycollective.torch.LeafSampler.indices_of",
    "pycollective.torch.LeafSampler.note_next",
    "pycollective.torch.LedgerState.noted",
    "pycollective.torch.OneBitState.check_ranks",
    "pycollective.torch.Int8State.check_ranks",
    "pycollective.torch.TopKState.check_ranks",
    "pycollective.torch.CompressedReduceScatter.allocate",
    "pycollective.torch.ordered.ReduceScatter.allocate",
}
METHODS = (types.FunctionType, types.MethodDescriptorType, classmethod, staticmethod)
PROPERTIES = (property, cached_property, types.GetSetDescriptorType)


def public_names(module: types.ModuleType) -> list[str]:
    """Those of `__all__`, or, without it, what the module itself defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [name for name, value in vars(module).items() if is_of(value, module.__name__)]
    return [name for name in [*own, *inspect.get_annotations(module)] if not name.startswith("_")]


def is_of(thing: object, module: str) -> bool:
    return callable(thing) and getattr(thing, "__module__", None) == module


def public_members(kind: type) -> list[tuple[type, str]]:
    """Methods and properties that a class or a base of ours defines; what overrides another
    library's is documented there."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("pycollective")]
    theirs = [base for base in kind.__mro__ if base not in ours]
    return [
        (base, name)
        for base in ours
        for name, value in vars(base).items()
        if not name.startswith("_") and not any(hasattr(each, name) for each in theirs)
        if isinstance(value, METHODS + PROPERTIES) or type(value).__name__ == "instancemethod"
    ]


def documented(thing: object) -> bool:
    """It has a docstring; of what is no class, method or function its page has the words."""
    if inspect.isclass(thing):
        return bool(vars(thing).get("__doc__"))  # and not that of a base
    return bool(inspect.getdoc(thing)) or not inspect.isroutine(thing)


def test_every_public_name_has_a_docstring_and_an_entry(site: Path) -> None:
    read = inventory.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    entries = {name for kind, names in read.items() for name in names if kind[:3] == "py:"}
    assert len(MODULES) >= 6
    lacking = []
    for module in map(importlib.import_module, MODULES):
        assert module.__doc__
        for name in public_names(module):
            thing, entry = getattr(module, name), f"{module.__name__}.{name}"
            if entry not in entries or not documented(thing):
                lacking.append(entry)
            if not inspect.isclass(thing):
                continue
            for base, member in public_members(thing):
                names = {f"{entry}.{member}", f"{base.__module__}.{base.__qualname__}.{member}"}
                names.add(f"{module.__name__}.{base.__name__}.{member}")
                if names & OF_THE_LIBRARY:
                    continue
                if not names & entries or not documented(getattr(base, member)):
                    lacking.append(f"{entry}.{member}")
    assert not lacking, lacking


class Page(HTMLParser):
    """Reads the anchors of a page, and what it links to and shows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors = {""}
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value is not None and (name == "id" or (tag, name) == ("a", "name")):
                self.anchors.add(value)
            elif value is not None and name in ("href", "src"):
                self.links.append(value)


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    read = cache(Page)
    broken, checked = [], 0
    for path in site.rglob("*.html"):
        for link in read(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            checked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            lacks = not target.is_file()
            if not lacks and target.suffix == ".html":
                lacks = unquote(parts.fragment) not in read(target).anchors
            if lacks:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, broken
    assert checked > 1000


def test_a_reader_who_searches_for_an_error_finds_its_page(site: Path) -> None:
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    for word in ("collectivemismatch", "peerfailur", "call"):  # stems
        found = [index[where].get(word, []) for where in ("terms", "titleterms")]
        numbers = [n for each in found for n in ([each] if isinstance(each, int) else each)]
        assert "reference/errors" in [index["docnames"][n] for n in numbers], word


def test_the_programs_of_quick_starts_print_what_they_say(site: Path) -> None:
    said = build(site.parent / "doctest", "doctest")
    assert "0 failures in tests" in said
    assert re.search(r"Document: start/numpy\n", said), said


@pytest.mark.parametrize("actions", [False, True])
def test_links_to_files_outside_the_site(actions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lead to their page here, or into the repository where its address is known."""
    for name, value in (("SERVER_URL", "https://a.example"), ("REPOSITORY", "b/c"), ("SHA", "d")):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    if not actions:
        monkeypatch.delenv("GITHUB_REPOSITORY")
    of_the_site = runpy.run_path(str(DOCS / "conf.py"))["with_links_of_the_site"]
    licence = "https://a.example/b/c/blob/d/LICENSE" if actions else "path:/../LICENSE"
    for before, after in {
        "[a](../../LICENSE)": f"[a]({licence})",
        "[a](../../CONTRIBUTING.md#commits)": "[a](/inside/contributing.md#commits)",
        "[a](wire.md#b)": "[a](/inside/wire.md#b)",
        "[a](#b)": "[a](#b)",
        "![a](../../LICENSE)": "![a](/../LICENSE)",
        "[a](https://b.example/c.md)": "[a](https://b.example/c.md)",
    }.items():
        assert of_the_site(before, DOCS / "inside") == after


@pytest.mark.parametrize("page", sorted((DOCS / "howto").glob("*.md")), ids=lambda page: page.stem)
def test_a_how_to_is_short_and_begins_with_what_to_do(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= 600
    assert "```" in "\n".join(text.splitlines()[:10])
