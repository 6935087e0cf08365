"""The notebooks run from top to bottom, offline, and print what is checked in."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What differs from run to run: the day of the run.
_DAY = re.compile(r"\b\d{1,2} [A-Z][a-z]+ 20\d\d\b")


def _printed(notebook: Any) -> list[str]:
    """What each code cell printed or showed; of a picture, that there is one."""
    shown = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [
                "".join(output.text) if output.output_type == "stream" else _shown(output) for output in cell.outputs
            ]
            shown.append(_DAY.sub("DAY", "".join(outputs)))
    return shown


def _shown(output: Any) -> str:
    data = output.get("data", {})
    return "<picture>" if "image/png" in data else str(data.get("text/plain", ""))


@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_is_checked_in(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    checked_in = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    # In an empty folder: none of them needs a file beside it.
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(fresh, timeout=300, kernel_name="python3", resources=resources).execute()
    assert _printed(fresh) == _printed(checked_in)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_checked_in_with_its_output_and_without_traces_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    assert any(cell.get("outputs") for cell in cells)
    assert not any(output["output_type"] == "error" for cell in cells for output in cell.get("outputs", []))
    assert re.findall(r"/(?:tmp|home|root|Users)/\w+", text) == []
