"""Reports look right everywhere: as text, as escaped HTML, in a terminal; and all that is kept as one table."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from doubles import absorb_all, said, turn
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from running import MakeStorage

from llama_index_memory_tiers import (
    ConfigurationError,
    ContextReport,
    FactExtractionMemoryBlock,
    FlushReport,
    ForgetReceipt,
    RecallOutcome,
    RecallQuestion,
    RecallReport,
    Redactor,
    StaticMemoryBlock,
    Storage,
    TieredMemory,
    TransferReport,
    VectorMemoryBlock,
)
from llama_index_memory_tiers.display import Grid, Shown, as_html, as_rich, as_text, harmless, table
from llama_index_memory_tiers.errors import MissingExtraError
from llama_index_memory_tiers.events import (
    BlockProgress,
    ForgetEntry,
    ItemReport,
    MaintenanceReport,
    PartReport,
    SegmentView,
    TiersReport,
    TierView,
)
from llama_index_memory_tiers.listing import COLUMNS
from llama_index_memory_tiers.provenance import Provenance, SourceView
from llama_index_memory_tiers.records import Departure
from llama_index_memory_tiers.testing import HashEmbedding, ScriptedLLM

EVIL = "<script>alert(1)</script> [bold red]x[/] \x1b[31mred\x1b[0m & \u202egnp"
NOW = datetime(2026, 3, 2, tzinfo=timezone.utc)


def in_a_terminal(shown: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=400, force_terminal=True, color_system=None).print(shown)
    return file.getvalue()


def reports() -> list[Shown]:
    item = ItemReport(EVIL, 3, 1.5, {"bm25": 0.5}, "")
    return [
        ContextReport(EVIL, 100, 90, 10, 2, 1, (PartReport(EVIL, 1, 3, (item,), (item,), EVIL),), overflow=True),
        FlushReport((BlockProgress(EVIL, 1, 2, EVIL, 3),)),
        ForgetReceipt((ForgetEntry(EVIL, 1, None, EVIL),), (EVIL,)),
        TiersReport((TierView(EVIL, 1, 2, 3),), (SegmentView("id", EVIL, 5.0, 1.0, 3.0, 1.0, 3, 0),), 2, 7),
        MaintenanceReport((Departure("id", EVIL, EVIL, EVIL, EVIL),), dry_run=True),
        RecallReport((RecallOutcome(RecallQuestion(EVIL, ("a",), EVIL), 1000, 10, ("a",), ()),)),
        TransferReport(1, 2, 3, 4),
        Provenance(
            EVIL, EVIL, EVIL, EVIL, NOW, "live", (SourceView(EVIL, EVIL, EVIL, EVIL, NOW, EVIL),), (), {"model": EVIL}
        ),
    ]


@pytest.mark.parametrize("report", reports(), ids=lambda report: type(report).__name__)
def test_html_is_escaped_and_a_terminal_is_not_commanded(report: Shown) -> None:
    html = report._repr_html_()
    assert "<script" not in html
    assert set(re.findall(r"</?([a-z]+)", html)) <= {"p", "table", "tr", "th", "td"}
    for shown in (str(report), in_a_terminal(report), html):
        assert "\x1b[31m" not in shown
        assert "\u202e" not in shown
        if not isinstance(report, TransferReport):
            assert "[bold red]x[/]" in shown.replace("\n", "")


@pytest.mark.parametrize("report", reports(), ids=lambda report: type(report).__name__)
def test_all_three_ways_show_the_same_cells(report: Shown) -> None:
    numbers = {str(cell) for grid in report._grids() for row in grid.rows for cell in row if isinstance(cell, int)}
    for shown in (str(report), in_a_terminal(report), report._repr_html_()):
        assert numbers <= set(re.findall(r"\d+", shown))


def test_a_context_shows_its_items_where_there_is_room() -> None:
    report = reports()[0]
    assert "bm25 0.50" not in str(report)
    assert "bm25 0.50" in in_a_terminal(report)
    assert "bm25 0.50" in report._repr_html_()


def test_an_empty_report_is_shown_too() -> None:
    for report in (FlushReport(), ForgetReceipt(), MaintenanceReport(), RecallReport(())):
        assert str(report)
        assert report._repr_html_().startswith("<")
        assert in_a_terminal(report)


def test_columns_stay_in_line_with_chinese_in_them() -> None:
    lines = table(("name", "n"), [("乌龙茶", 1), ("tea", 22)]).splitlines()
    assert lines == ["name    n", "乌龙茶  1", "tea     22"]


cells = st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.none())


@given(st.lists(st.tuples(cells, cells), max_size=5), st.text())
def test_any_text_can_be_shown(rows: Sequence[tuple[Any, Any]], title: str) -> None:
    grid = Grid(("a", "b"), rows, title)
    assert isinstance(as_text([grid]), str)
    html = as_html([grid])
    assert html.count("<tr>") == len(rows) + 1
    assert html.count("<td>") == 2 * len(rows)
    file = io.StringIO()
    Console(file=file, width=200, color_system=None).print(as_rich([grid]))
    assert "\x1b" not in file.getvalue()


@given(st.text())
def test_what_is_harmless_keeps_every_visible_character(text: str) -> None:
    shown = harmless(text)
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in shown)
    assert [letter for letter in text if letter.isprintable()] == [
        letter for letter in re.sub(r"\\u\{[0-9a-f]+\}", "", shown) if letter.isprintable()
    ] or "\\u{" in text


def test_rich_is_imported_only_when_a_terminal_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report = reports()[1]
    assert str(report)
    assert report._repr_html_()
    with pytest.raises(ImportError):
        report.__rich__()


# --- all that is kept -----------------------------------------------------------------------------------------

FACT = '{"subject": "Ada", "relation": "drinks", "value": "oolong", "fact": "Ada drinks oolong.", "said": [1]}'


def memory_of(storage: Storage | Path, user: str | None, session: str) -> TieredMemory:
    blocks = [VectorMemoryBlock(), FactExtractionMemoryBlock(llm=ScriptedLLM([FACT] * 9), absorb_every=1)]
    return TieredMemory(storage=storage, user_id=user, session_id=session, memory_blocks=blocks)


async def test_every_message_and_record_of_the_owner_is_one_row_and_nobody_elses(
    make_storage: MakeStorage, storage_kind: str
) -> None:
    storage = make_storage(storage_kind)
    ada, bob = memory_of(storage, "ada", "one"), memory_of(storage, "bob", "one")
    for memory in (ada, ada.for_session("two"), bob):
        await memory.aput_messages(turn(len(memory.session_id)))
    for memory in (ada, bob):
        await absorb_all(memory)
    found = await ada.alist()
    assert {(row["kind"], row["place"]) for row in found} == {
        ("message", "window"), ("message", "RetrievedMessages"), ("fact", "ExtractedFacts"),
    }  # fmt: skip
    messages = [row for row in found if row["place"] == "window"]
    assert [(row["session_id"], row["by"]) for row in messages] == [
        ("one", "user"), ("one", "assistant"), ("two", "user"), ("two", "assistant"),
    ]  # fmt: skip
    known = {row["id"] for row in messages}
    assert all(set(row["sources"]) <= known and row["sources"] for row in found if row["place"] != "window")
    references = [row for row in found if row["place"] == "RetrievedMessages"]
    assert sorted(row["text"] for row in references) == sorted(row["text"] for row in messages)
    assert not known & {row["id"] for row in await bob.alist()}
    for memory in (ada, bob):
        await memory.aclose()


def test_a_data_frame_has_these_columns_and_a_row_for_each(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with_session = memory_of(tmp_path / "a.db", None, "one")
    assert list(with_session.to_dataframe().columns) == list(COLUMNS)
    with_session.put(said("user", "I drink oolong."))
    with_session.put(said("assistant", "Noted."))
    with_session.flush()
    frame = with_session.to_dataframe()
    assert len(frame) == 5
    assert frame[frame["kind"] == "fact"]["text"].tolist() == ["Ada drinks oolong."]
    assert str(frame["said_at"].dtype).startswith("datetime64")
    with_session.close()


def test_without_pandas_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    memory = TieredMemory(user_id="ada", memory_blocks=[])
    with pytest.raises(MissingExtraError, match=re.escape("llama-index-memory-tiers[pandas]")):
        memory.to_dataframe()
    memory.close()


async def test_why_knows_only_what_is_the_owners(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    ada, bob = memory_of(storage, "ada", "one"), memory_of(storage, "bob", "one")
    await ada.aput_messages([said("user", "I drink oolong."), said("assistant", "Noted.")])
    await absorb_all(ada)
    fact = next(row for row in await ada.alist() if row["kind"] == "fact")
    origin = await ada.awhy(fact["id"])
    assert [source.text for source in origin.sources] == ["I drink oolong."]
    assert {one.kind for one in (await ada.awhy(origin.sources[0].id)).derived} == {"message", "fact"}
    for id_ in (fact["id"], origin.sources[0].id, "no such id"):
        with pytest.raises(ConfigurationError):
            await bob.awhy(id_)
    for memory in (ada, bob):
        await memory.aclose()


async def test_a_workers_drain_reaches_everybody_and_waits_for_complete_turns(
    make_storage: MakeStorage, storage_kind: str
) -> None:
    storage = make_storage(storage_kind)
    for user, session in (("ada", "one"), ("ada", "two"), ("bob", "one"), (None, "three")):
        putting = TieredMemory(storage=storage, user_id=user, session_id=session, memory_blocks=[VectorMemoryBlock()])
        await putting.astop()
        await putting.aput_messages([*turn(1), said("user", "an open question")])
        await putting.aclose()
    worker = TieredMemory(storage=storage, session_id="worker", memory_blocks=[VectorMemoryBlock()])
    report = await worker.adrain()
    assert [(one.absorbed, one.pending, one.error) for one in report.blocks] == [(8, 4, None)]
    assert (await worker.adrain()).blocks[0].absorbed == 0
    await worker.aclose()


async def test_looking_whether_tables_are_there_makes_none(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind, table_name="not_there_yet")
    assert not await storage.amade()
    assert not await storage.amade()
    await storage.aopen()
    assert await storage.amade()


async def test_a_survey_counts_what_is_there(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    memory = memory_of(storage, "ada", "one")
    await memory.aput_messages(turn(1))
    await absorb_all(memory)
    nobody = memory_of(storage, None, "alone")
    await nobody.aput_messages(turn(2))
    await absorb_all(nobody)
    now = storage.now() + 1
    assert {(one.user_id, one.sessions, one.messages) for one in await storage.survey.people()} == {
        ("ada", 1, 2),
        ("", 1, 2),
    }
    mine = {(one.place, one.kind, one.state): one.count for one in await storage.survey.kept("ada", now=now)}
    assert mine == {
        ("window", "message", "live"): 2,
        ("RetrievedMessages", "message", "live"): 2,
        ("ExtractedFacts", "fact", "live"): 1,
    }
    everybodys = await storage.survey.kept(now=now)
    assert sum(one.count for one in everybodys) == 10
    assert sum(one.count for one in await storage.survey.kept("", "alone", now=now)) == 5
    assert [(one.block, one.messages) for one in await storage.survey.waiting(now=now)] == [
        ("ExtractedFacts", 0), ("RetrievedMessages", 0),
    ]  # fmt: skip
    texts = [text async for page in storage.survey.texts() for text in page]
    assert (len(texts), any(text.damaged for text in texts)) == (10, False)
    assert await storage.survey.unfinished_forgetting() == 0
    for each in (memory, nobody):
        await each.aclose()


def shown_at(width: int, grid: Grid) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(as_rich([grid]))
    return console.export_text()


def test_where_there_is_little_room_an_id_is_shortened_until_it_would_mean_another() -> None:
    ids = [f"{number:08d}-4f9a-4f9a-4f9a-0123456789ab" for number in (1, 2)]
    grid = Grid(("text", "id"), [("long words " * 20, each) for each in ids])
    assert all(each in shown_at(160, grid) for each in ids)
    narrow = shown_at(80, grid)
    assert "00000001 " in narrow
    assert "4f9a" not in narrow
    alike = Grid(("text", "id"), [("long words " * 20, f"{ids[0]}-{number}") for number in (1, 2)])
    assert f"{ids[0]}-2" in shown_at(80, alike)


async def test_a_memory_and_its_blocks_print_as_one_short_line_without_texts_or_keys() -> None:
    class KeyedLLM(ScriptedLLM):
        api_key: str = "sk-private"

    blocks = [
        StaticMemoryBlock(name="core", static_content="Ada has a secret."),
        VectorMemoryBlock(embed_model=HashEmbedding()),
        FactExtractionMemoryBlock(llm=KeyedLLM("[]")),
    ]
    async with TieredMemory(
        user_id="ada", session_id="one", token_limit=4000, memory_blocks=blocks, redaction=Redactor(key=b"sk-private")
    ) as memory:
        assert repr(memory) == (
            "TieredMemory(user_id='ada', session_id='one', token_limit=4000, "
            f"memory_blocks=['core', 'RetrievedMessages', 'ExtractedFacts'], storage={memory.storage.address!r})"
        )
        assert str(blocks[1]) == (
            "VectorMemoryBlock(name='RetrievedMessages', priority=2, scope='user', embed_model='HashEmbedding')"
        )
        for shown in (memory, *blocks, Redactor(key=b"sk-private")):
            for text in (repr(shown), str(shown), f"{shown}"):
                assert len(text) < 300
                assert "secret" not in text
                assert "sk-private" not in text
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(memory, *blocks)
        assert "secret" not in console.export_text()
