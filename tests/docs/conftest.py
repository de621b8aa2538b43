"""The documentation site, built once for the tests of a worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.site import build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    if sys.version_info < (3, 11):
        pytest.skip("the last Sphinx for Python 3.10 builds the site with a warning")
    folder = tmp_path_factory.mktemp("docs") / "html"
    build(folder)
    return folder
