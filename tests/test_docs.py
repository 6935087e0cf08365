"""The pages in docs/ agree with the code, and no link leads nowhere."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import llama_index_memory_tiers as package

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
_NAMED = re.compile(r"`((?:docs|notebooks|benchmarks)/[\w.]+)`")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda path: path.name)
def test_every_link_and_every_file_that_is_named_exists(page):
    text = _text(page)
    for target in _LINK.findall(text):
        file, _, anchor = target.partition("#")
        place = page if not file else page.parent / file
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            assert anchor in _anchors(place), target
    for named in _NAMED.findall(text):
        assert (ROOT / named).exists(), named


def test_every_page_and_every_notebook_can_be_reached_from_both_readmes():
    for readme in ("README.md", "README.zh-CN.md"):
        linked = set(_LINK.findall(_text(ROOT / readme)))
        wanted = [*(ROOT / "docs").glob("*.md"), *NOTEBOOKS]
        assert {str(path.relative_to(ROOT)) for path in wanted} - linked == set()


def test_both_readmes_have_the_same_sections_tables_and_code():
    shapes = []
    for readme in ("README.md", "README.zh-CN.md"):
        text = _text(ROOT / readme)
        shapes.append(
            (
                [len(head) for head in re.findall(r"^(#+) ", text, re.MULTILINE)],
                [row.count("|") for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)],
                [
                    re.sub(r"#.*", "", line).split()
                    for line in re.findall(r"^    (?:pip|make|memory-tiers) .*$", text, re.MULTILINE)
                ],
                len(re.findall(r"```python", text)),
            )
        )
    english, chinese = shapes
    assert english[0] == chinese[0]
    assert english[1] == chinese[1]
    assert [line[:2] for line in english[2]] == [line[:2] for line in chinese[2]]
    assert english[3] == chinese[3]


def test_the_api_page_is_what_the_docstrings_say():
    script = _script("make_api")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run: python docs/make_api.py"


def test_the_api_page_names_everything_public():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in package.__all__ if f"\n### {name}\n" not in page] == []


def test_a_chat_of_locomo_becomes_one_that_can_be_read(tmp_path):
    """A chat of our own in its form."""
    sample = {
        "sample_id": "c1",
        "conversation": {
            "speaker_a": "Ann",
            "speaker_b": "Bob",
            "session_1_date_time": "1:56 pm on 8 May, 2023",
            "session_1": [
                {"speaker": "Ann", "dia_id": "D1:1", "text": "I sail."},
                {"speaker": "Bob", "dia_id": "D1:2", "text": "Look!", "blip_caption": "a boat"},
            ],
        },
        "qa": [
            {"question": "Who sails?", "evidence": ["D1:1; D1:02"], "category": 1},
            {"question": "Who flies?", "evidence": ["D1:1"], "category": 5},
            {"question": "Who walks?", "evidence": ["D9:9"], "category": 2},
        ],
    }
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps(row) + "\n" for row in _script("locomo").rows([sample])), encoding="utf-8")
    read = package.read_chat_file(chat)
    assert [(turn.text, turn.speaker, turn.role) for turn in read.messages] == [
        ("I sail.", "Ann", "user"),
        ("Look! [photo: a boat]", "Bob", "assistant"),
    ]
    assert read.messages[0].said_at.isoformat() == "2023-05-08T13:56:00+00:00"
    assert [(asked.text, asked.evidence) for asked in read.questions] == [("Who sails?", ("c1/D1:1", "c1/D1:2"))]
