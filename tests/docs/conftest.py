"""The documentation site, built once for the tests of a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.site import build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("docs") / "html"
    build(folder)
    return folder
