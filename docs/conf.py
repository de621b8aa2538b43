"""The documentation site: `make docs` builds it into out/docs."""

from __future__ import annotations

project = "pycollective"
author = "the pycollective authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx_copybutton"]
html_theme = "furo"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
