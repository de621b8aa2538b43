"""The notebook runs from beginning to end, and shows what its text says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.harness import ROOT

NOTEBOOK = ROOT / "docs" / "start" / "any_number_of_ranks.ipynb"


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_the_notebook_shows_the_same_weights_on_any_number_of_ranks(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
        patch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
        nbclient.NotebookClient(
            notebook, timeout=250, kernel_name="python3", resources=place
        ).execute()
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    said = "".join(each.text for each in outputs if each.output_type == "stream")
    digests = re.findall(r"rank.*  ([0-9a-f]{16})$", said, re.M)
    gloo, leaves = set(digests[:3]), set(digests[3:])
    assert len(digests) == 6
    assert len(leaves) == 1
    assert len(gloo) == 3
    assert any("image/png" in each.get("data", {}) for each in outputs)


def test_the_notebook_is_kept_with_its_pictures_and_is_small() -> None:
    text = NOTEBOOK.read_text()
    assert '"image/png"' in text
    assert len(text) < 300_000
