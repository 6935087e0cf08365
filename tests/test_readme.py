from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "README.zh-CN.md"]
CODE = [
    (page, code)
    for page in PAGES
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
]
SNIPPETS = [pytest.param(page, code, id=f"{page}-{number}") for number, (page, code) in enumerate(CODE)]
# FastAPI is none of our dependencies: so much of it as the snippet reads.
FASTAPI = """
class HTTPException(Exception): ...
class FastAPI:
    def __init__(self, lifespan): ...
    def post(self, path): return lambda endpoint: endpoint
def Depends(dependency): ...
def Header(): ...
"""


def run(code: str, page: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a snippet as a script, beside the `app.py` of its page."""
    app = next(app for of, app in CODE if of == page and app.startswith("# app.py"))
    for name, text in (("fastapi.py", FASTAPI), ("app.py", app), ("snippet.py", code)):
        (folder / name).write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, *options, folder / "snippet.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("page", "code"), SNIPPETS)
def test_every_snippet_runs_as_a_script_without_a_warning_of_ours(page, code, tmp_path):
    done = run(code, page, tmp_path, "-W", "error", "-W", "ignore::DeprecationWarning")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_snippet_remembers_across_sessions(tmp_path):
    assert "allergic to fish" in run(CODE[0][1], "README.md", tmp_path).stdout


@pytest.mark.parametrize(("page", "answer"), [("README.md", "nine"), ("README.zh-CN.md", "九点")])
def test_the_web_service_remembers_its_user_and_tells_another_nothing(page, answer, tmp_path):
    code = next(code for of, code in CODE if of == page and "from app import" in code)
    hers, another = run(code, page, tmp_path).stdout.splitlines()
    assert answer in hers
    assert another == "I don't know."


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
