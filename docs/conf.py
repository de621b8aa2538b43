"""The documentation site: `make docs` builds it into out/docs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pycollective.config import VERSION

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "pycollective"
author = copyright = "the pycollective authors"
version = release = VERSION
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "pycollective"
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"  # the notebook is committed with its output; make storm runs it

# `name` in a docstring is an object that has an entry here, or `-n` fails. All else, such as
# arguments and values, is ``name``. Both are readable in help().
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autoclass_content = "both"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20
linkcheck_rate_limit_timeout = 30

# Links into others' documentation need their inventories, which Sphinx fetches: only where asked.
# The empty one takes the place of one that cannot be fetched.
intersphinx_timeout = 20
if os.environ.get("DOCS_INTERSPHINX"):
    intersphinx_mapping = {
        name: (address, (None, "empty.inv"))
        for name, address in {
            "python": "https://docs.python.org/3",
            "numpy": "https://numpy.org/doc/stable",
            "torch": "https://docs.pytorch.org/docs/stable",
        }.items()
    }
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|datetime|np|npt|numpy|os|pathlib|types|typing)\..*"),
    (r"py:.*", r"torch\.(?!ordered\b|compression\b).*"),
    # What a signature names beside public types, and nobody has to make.
    (r"py:class", r"pycollective\..*\.(Common|GroupMaker|Groups|Leaves|Options|Steps)"),
]

# Files of the repository that are pages here. Links to all others outside docs/ lead to the
# repository, where GitHub Actions tells its address, and are downloads elsewhere.
PAGES = {
    (page.parent / name).resolve(): page
    for page in DOCS.rglob("*.md")
    for name in re.findall(r"^```{include} (.*)$", page.read_text(), re.M)
}
PAGES[ROOT / "README.md"] = DOCS / "index.md"
REPOSITORY = ""
if "GITHUB_REPOSITORY" in os.environ:
    server, name, commit = (
        os.environ[f"GITHUB_{each}"] for each in ("SERVER_URL", "REPOSITORY", "SHA")
    )
    REPOSITORY = f"{server}/{name}/blob/{commit}/"


def with_links_of_the_site(text: str, folder: Path) -> str:
    """The Markdown `text` of a file in `folder`, its links to files as the site has them."""

    def of_the_site(link: re.Match[str]) -> str:
        image, (name, mark, anchor) = link[1] or "", link[2].partition("#")
        path = (folder / name).resolve()
        if not name or not path.is_file():
            return link[0]
        path = PAGES.get(path, path)
        if path.is_relative_to(DOCS):
            name = f"/{path.relative_to(DOCS)}"
        elif REPOSITORY and not image:
            name = f"{REPOSITORY}{path.relative_to(ROOT)}"
        else:
            name = f"{'' if image else 'path:'}/../{path.relative_to(ROOT)}"
        return f"{image}]({name}{mark}{anchor})"

    return re.sub(r"(!\[[^\]]*)?\]\(([^)\s]+)\)", of_the_site, text)


def rewrite_page(app: Sphinx, page: str, text: list[str]) -> None:  # noqa: D103
    text[0] = with_links_of_the_site(text[0], Path(app.env.doc2path(page)).parent)


def rewrite_include(app: Sphinx, path: Path, page: str, text: list[str]) -> None:  # noqa: D103
    text[0] = with_links_of_the_site(text[0], (DOCS / path).parent)


def named_pages(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Make links of the pages that a docstring names, such as (contract.md)."""

    def link(named: re.Match[str]) -> str:
        folders = [named[1]] if named[1] else ["reference", "inside", "measured"]
        folder = next((each for each in folders if (DOCS / each / f"{named[2]}.md").exists()), "")
        return f":doc:`{named[2].replace('_', ' ')} </{folder}/{named[2]}>`"

    page = r"(?:docs/(\w+)/)?\b(\w+)\.md\b(?:#[\w-]+)?"
    lines[:] = [re.sub(page, link, line) for line in lines]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", named_pages)
    app.connect("source-read", rewrite_page)
    app.connect("include-read", rewrite_include)
