from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "README.zh-CN.md"]
SNIPPETS = [
    pytest.param(code, id=f"{page}-{number}")
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    )
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_every_snippet_runs_as_a_script_without_a_warning_of_ours(code, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_snippet_remembers_across_sessions(tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPETS[0].values[0], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert "allergic to fish" in done.stdout


def test_every_relative_link_leads_somewhere():
    for page in [*PAGES, "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page} links to {target}"


def test_the_architecture_is_short_and_names_every_room():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.split()) < 900
    package = ROOT / "llama_index_memory_tiers"
    rooms = [path.stem for path in package.glob("*.py") if not path.stem.startswith("_")]
    rooms += [f"storage/{path.stem}" for path in (package / "storage").glob("*.py") if not path.stem.startswith("_")]
    rooms += [f"{path.parent.name}/" for path in package.glob("*/__init__.py") if path.parent.name != "storage"]
    assert [room for room in rooms if f"`{room}`" not in text] == []
