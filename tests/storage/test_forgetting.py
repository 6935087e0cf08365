"""Forgotten means gone: from every store, in its scope only, proven by reading again, and finished after a crash."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from doubles import Clock, Gate, RecordingBlock, absorb_all, refuse_content, rows, said, told, turn
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock
from llama_index.core.memory.memory_blocks.fact import FactExtractionMemoryBlock as CoreFactBlock
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore
from llama_index.core.vector_stores.simple import SimpleVectorStore
from pydantic import Field
from running import MakeStorage
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from llama_index_memory_tiers import (
    ForgetFilter,
    ForgetReceipt,
    Storage,
    TieredMemory,
    VectorMemoryBlock,
    failpoints,
)
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Changes, Forgotten, NewRecord
from llama_index_memory_tiers.storage import DEFAULT_TABLE_NAME
from llama_index_memory_tiers.storage.schema import build_tables
from llama_index_memory_tiers.testing import HashEmbedding, ScriptedLLM

SECRET = "quetzalcoatlus"
TABLES = [table.name.removeprefix("x_") for table in build_tables("x").metadata.sorted_tables]


def memory_of(storage: Storage, *blocks: Any, **arguments: Any) -> TieredMemory:
    defaults = {"user_id": "ada", "session_id": "chat", "delivery": "inline"}
    return TieredMemory(
        storage=storage,
        memory_blocks=list(blocks) or [VectorMemoryBlock(embed_model=HashEmbedding()), RecordingBlock()],
        **{**defaults, **arguments},
    )


async def put_numbered(memory: TieredMemory, first: int, last: int, words: str = "") -> None:
    """Turns `first` to `last`; ids are `q<number>` and `a<number>`."""
    for number in range(first, last + 1):
        for message, uid in zip(turn(number), (f"q{number}", f"a{number}"), strict=True):
            content = f"{message.content} {words}".strip()
            await memory.aput(said(message.role.value, content), uid=uid)


async def everything_written(storage: Storage) -> str:
    """All rows of all tables as one text."""
    found = [str(tuple(row)) for name in TABLES for row in await rows(storage, f"SELECT * FROM {{t}}_{name}")]  # noqa: S608  # our own names
    return "\n".join(found)


async def texts(memory: TieredMemory) -> list[str]:
    return [stored.text for stored in await memory.amessages()]


# --- what is named ----------------------------------------------------------------------------------------------


async def test_without_a_selector_nothing_is_forgotten_and_the_error_says_what_to_do(storage: Storage) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 1)
    with pytest.raises(ConfigurationError, match="without saying what to forget"):
        await memory.aforget()
    assert len(await texts(memory)) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"scope": "all"},
        {"ids": []},
        {"ids": "q1"},
        {"ids": [1]},
        {"before": "yesterday"},
        {"filter": {"contains": "x"}},
        {"scope": "session", "derived": "keep"},
    ],
    ids=str,
)
async def test_a_selector_that_makes_no_sense_is_refused_before_anything_happens(
    make_storage: MakeStorage, given: dict[str, Any]
) -> None:
    memory = memory_of(make_storage("file"))
    await put_numbered(memory, 1, 1)
    with pytest.raises(ConfigurationError) as caught:
        await memory.aforget(**given)
    assert next(reversed(given)) in caught.value.given
    assert len(await texts(memory)) == 2


async def test_the_scope_of_a_user_needs_a_user(make_storage: MakeStorage) -> None:
    memory = memory_of(make_storage("file"), user_id=None)
    with pytest.raises(ConfigurationError, match="without user_id"):
        await memory.aforget(scope="user")


@pytest.mark.parametrize("given", [{}, {"contains": ""}, {"contains": "\u200b"}, {"speaker": 3}], ids=ascii)
def test_an_empty_filter_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ForgetFilter(**given)


# --- what goes, and what stays ----------------------------------------------------------------------------------


async def test_a_forgotten_message_leaves_no_text_in_any_table(storage: Storage) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 2)
    await memory.aput(said("user", f"my secret is {SECRET}"), uid="s", sent_from=f"Ada {SECRET}")
    await memory.aput(said("assistant", "noted"), uid="n")
    assert SECRET in await everything_written(storage)

    receipt = await memory.aforget(ids=["s"])

    assert receipt.complete, receipt
    assert receipt.removed["messages"] == 1
    assert receipt.removed["records"] == 2  # one of each block
    assert receipt.removed["embeddings"] == receipt.removed["terms"] == 1
    assert SECRET not in await everything_written(storage)
    assert await texts(memory) == ["question 1", "answer 1", "question 2", "answer 2", "noted"]
    assert SECRET not in repr(await memory.aexplain(f"what is {SECRET}?")).replace(f"what is {SECRET}?", "")


async def test_forgetting_a_session_reaches_that_session_only(storage: Storage) -> None:
    """Delete A, count B."""
    memory = memory_of(storage)
    others = [memory.for_session("other"), memory.for_session("chat", user_id="bob"), memory_of(storage, user_id=None)]
    for each in (memory, *others):
        await put_numbered(each, 1, 3)
    before = [await texts(each) for each in others]
    heard = (await told(storage)).texts

    receipt = await memory.aforget(scope="session")

    assert receipt.complete
    assert receipt.removed["messages"] == 6
    assert await texts(memory) == []
    assert [await texts(each) for each in others] == before
    assert len((await told(storage)).texts) == len(heard) - 6


async def test_forgetting_a_user_reaches_all_of_the_users_sessions_and_nobody_else(storage: Storage) -> None:
    memory = memory_of(storage)
    others = [memory.for_session("chat", user_id="ada "), memory_of(storage, user_id=None, session_id="ada")]
    for each in (memory, memory.for_session("second"), *others):
        await put_numbered(each, 1, 2)
    desk = memory.desk("Recorder")
    await desk.change(lambda _: Changes(add=(NewRecord(id="by hand", kind="note", text="written by hand"),)))

    receipt = await memory.aforget(scope="user")

    assert receipt.complete
    assert receipt.removed["messages"] == 8
    assert [row.n for row in await rows(storage, "SELECT count(*) AS n FROM {t}_records WHERE owner = 'u:ada'")] == [0]
    for each in others:
        assert len(await texts(each)) == 4


async def test_ids_of_others_are_out_of_reach(storage: Storage) -> None:
    memory = memory_of(storage)
    bob = memory.for_session("chat", user_id="bob")
    await put_numbered(bob, 1, 1)
    found = await rows(storage, "SELECT uid FROM {t}_records")
    receipt = await memory.aforget(ids=["q1", "a1", *(row.uid for row in found)])
    assert receipt.removed["messages"] == receipt.removed.get("records", 0) == 0
    assert len(await texts(bob)) == 2
    assert len(await rows(storage, "SELECT uid FROM {t}_records")) == len(found)


async def test_selectors_narrow_each_other(make_storage: MakeStorage) -> None:
    clock = Clock()
    memory = memory_of(make_storage("file", clock=clock))
    await memory.aput(said("user", "old tea"), uid="1", sent_from="Ada")
    await memory.aput(said("user", "old tea"), uid="2", sent_from="Bob")
    clock.pass_seconds(10)
    await memory.aput(said("user", "new tea"), uid="3", sent_from="Ada")
    middle = clock.now - timedelta(seconds=5)
    receipt = await memory.aforget(before=middle, filter=ForgetFilter(speaker="Ada", contains="TEA"))
    assert receipt.complete
    assert [stored.id for stored in await memory.amessages()] == ["2", "3"]
    assert (await memory.aforget(ids=["2", "3"], before=datetime(2000, 1, 1))).removed["messages"] == 0  # noqa: DTZ001  # naive on purpose
    assert (await memory.aforget(ids=["2"], before=clock.now.astimezone(timezone(timedelta(hours=9))))).complete
    assert [stored.id for stored in await memory.amessages()] == ["3"]


@pytest.mark.parametrize(
    ("chosen", "gone"),
    [
        (ForgetFilter(contains="100%"), ["percent"]),
        (ForgetFilter(contains="汤姆"), ["cat"]),
        (ForgetFilter(contains="Lisbon"), ["tool"]),
        (ForgetFilter(contains="aaaa"), []),
        (ForgetFilter(speaker="tool"), []),
        (ForgetFilter(speaker="user"), ["percent", "picture"]),
        (ForgetFilter(sent_to="Eve"), ["cat"]),
        (ForgetFilter(cause_by="greeting", contains="1000"), []),
    ],
    ids=str,
)
async def test_a_filter_matches_what_it_says(storage: Storage, chosen: ForgetFilter, gone: list[str]) -> None:
    memory = memory_of(storage)
    await memory.aput(said("user", "It was 1000 or 100% of it"), uid="percent")
    await memory.aput(said("assistant", "我的猫叫汤姆。"), uid="cat", send_to=["Bob", "Eve"], cause_by="greeting")
    call = ToolCallBlock(tool_call_id="1", tool_name="weather", tool_kwargs={"city": ["lisbon"]})
    await memory.aput(ChatMessage(role="assistant", blocks=[call]), uid="tool")
    picture = {"block_type": "image", "image": "aaaaaaaa", "image_mimetype": "image/png"}
    message = ChatMessage.model_validate({"role": "user", "blocks": [TextBlock(text="look").model_dump(), picture]})
    await memory.aput(message, uid="picture")
    before = [stored.id for stored in await memory.amessages()]
    assert (await memory.aforget(filter=chosen)).complete
    assert [stored.id for stored in await memory.amessages()] == [one for one in before if one not in gone]


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("Zoe\u0308 came", "Zo\u00eb"),
        ("Zo\u00eb came", "zoe\u0308"),
        ("ｇｏｕｔ", "gout"),
        ("gout", "Ｇｏｕｔ"),
        ("my go\u200but", "gout"),
        ("my gout", "go\u00adut"),
        ("STRASSE", "straße"),
    ],
    ids=ascii,
)
async def test_what_reads_alike_is_forgotten_however_it_is_written(
    make_storage: MakeStorage, written: str, wanted: str
) -> None:
    memory = memory_of(make_storage("file"))
    await memory.aput(said("user", written), uid="said")
    call = ToolCallBlock(tool_call_id="1", tool_name="find", tool_kwargs={"q": {written: 1}})
    await memory.aput(ChatMessage(role="assistant", blocks=[call]), uid="named")
    quoted = json.dumps({"q": json.dumps([written])})
    call = ToolCallBlock(tool_call_id="2", tool_name="find", tool_kwargs=quoted)
    await memory.aput(ChatMessage(role="assistant", blocks=[call]), uid="block")
    asked = {"tool_calls": [{"id": "3", "function": {"name": "find", "arguments": json.dumps({written: "x"})}}]}
    await memory.aput(ChatMessage(role="assistant", content="", additional_kwargs=asked), uid="extra")
    await memory.aput(said("user", "[not JSON"), uid="other")
    note = await memory.aremember(written, {"who": written})
    other = await memory.aremember("of no account")
    receipt = await memory.aforget(filter=ForgetFilter(contains=wanted))
    assert receipt.complete
    assert [stored.id for stored in await memory.amessages()] == ["other"]
    assert written not in await everything_written(memory.storage)
    assert note not in (left := await everything_written(memory.storage))
    assert other in left


async def test_a_record_is_forgotten_by_its_id_and_its_message_stays(storage: Storage) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 1)
    [one] = await rows(storage, "SELECT uid FROM {t}_records WHERE text = 'question 1'")
    receipt = await memory.aforget(ids=[one.uid])
    assert receipt.complete
    assert (receipt.removed["messages"], receipt.removed["records"]) == (0, 1)
    assert (await told(storage)).texts == ["answer 1"]
    assert len(await texts(memory)) == 2


async def test_a_record_with_one_forgotten_source_goes_and_what_it_had_replaced_is_current_again(
    storage: Storage,
) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 3)
    desk = memory.desk("Recorder")

    def fact(name: str, *seqs: int) -> NewRecord:
        return NewRecord(id=name, kind="fact", text=name, sources=tuple((1, seq) for seq in seqs))

    await desk.change(lambda _: Changes(add=(fact("first", 1), fact("second", 3), fact("both", 1, 3), fact("own", 5))))
    await desk.change(lambda _: Changes(supersede={"first": "both", "second": "both"}))
    assert (await memory.aforget(ids=["q1"])).complete
    reader = await desk.reader()
    assert [record.text for record in await reader.records("fact")] == ["second", "own"]


async def test_what_was_replaced_twice_does_not_come_back(storage: Storage) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 3)
    desk = memory.desk("Recorder")
    facts = [NewRecord(id=f"f{n}", kind="fact", text=f"f{n}", sources=((1, 2 * n - 1),)) for n in (1, 2, 3)]
    await desk.change(lambda _: Changes(add=tuple(facts)))
    await desk.change(lambda _: Changes(supersede={"f1": "f2", "f2": "f3"}))
    assert (await memory.aforget(ids=["q2"])).complete
    found = await rows(storage, "SELECT uid, superseded_by FROM {t}_records WHERE kind = 'fact' ORDER BY id")
    assert [tuple(row) for row in found] == [("f1", "f3"), ("f3", None)]


class Summaries(RecordingBlock):
    """One record per batch, of all its messages: text of one stands beside text of others."""

    name: str = "Summaries"

    def merge(self, draft: Any, records: Any) -> Changes:
        told = " | ".join(stored.text for stored in draft.messages)
        places = tuple(stored.place for stored in draft.messages)
        return Changes(add=(NewRecord(id=f"{told}#{draft.lo}", kind="summary", text=told, sources=places),))


async def summaries(storage: Storage) -> list[str]:
    found = await rows(storage, "SELECT text FROM {t}_records WHERE kind = 'summary' ORDER BY id")
    return [row.text for row in found]


@pytest.mark.parametrize("derived", ["drop", "rederive"])
async def test_a_summary_of_a_forgotten_message_is_dropped_or_made_again_from_the_others(
    storage: Storage, derived: Any
) -> None:
    memory = memory_of(storage, Summaries(absorb_every=2))
    await put_numbered(memory, 1, 6)
    before = await summaries(storage)
    assert len(before) == 3
    receipt = await memory.aforget(ids=["q3"], derived=derived)
    await absorb_all(memory)
    after = await summaries(storage)
    assert receipt.complete
    assert "question 3" not in " ".join(after)
    if derived == "drop":
        assert after == [before[0], before[2]]
        return
    assert receipt.removed["cursors moved back"] == 1
    words = sorted(text for one in after for text in one.split(" | "))
    assert words == sorted(
        text for number in range(1, 7) for text in (f"question {number}", f"answer {number}") if text != "question 3"
    )


async def test_a_forgotten_message_put_again_under_its_id_does_not_come_back(storage: Storage) -> None:
    memory = memory_of(storage)
    await memory.aput(said("user", SECRET), uid="s")
    await memory.aforget(ids=["s"])
    await memory.aput(said("user", SECRET), uid="s")
    assert await texts(memory) == []
    assert SECRET not in await everything_written(storage)


async def test_dead_letters_that_hold_nothing_any_more_go(storage: Storage) -> None:
    memory = memory_of(storage, RecordingBlock(on_prepare=refuse_content("question 1", "question 3")))
    await put_numbered(memory, 1, 3)
    for _ in range(40):
        await memory.aflush()
    assert len(await memory.adead_letters()) == 2
    receipt = await memory.aforget(ids=["q1"])
    assert receipt.removed["dead letters"] == 1
    assert receipt.complete
    assert len(await memory.adead_letters()) == 1


async def test_what_a_block_prepares_while_it_is_forgotten_is_rolled_back(storage: Storage) -> None:
    gate = Gate()
    memory = memory_of(storage, RecordingBlock(on_prepare=gate), delivery="background")
    await memory.aput(said("user", SECRET), uid="s")
    await memory.aput(said("assistant", "noted"), uid="n")
    await gate.entered.wait()
    receipt = await memory.aforget(ids=["s"])
    gate.opened.set()
    await absorb_all(memory)
    assert receipt.complete
    assert (await told(storage)).texts == ["noted"]
    await memory.aclose()


async def test_the_running_turn_as_it_was_said_and_remembered_recalls_go_from_memory(storage: Storage) -> None:
    memory = memory_of(storage)
    key = "AKIAIOSFODNN7EXAMPLE"
    await memory.aput(said("user", f"my key is {key} {SECRET}"), uid="s")
    await memory.aput(said("assistant", "ok"))
    await memory.aget("anything")
    shared = memory._shared
    assert key in repr(shared.raw)
    await memory.aforget(ids=["s"])
    held: list[Any] = [
        shared.raw,
        shared.contexts._answers._turns.kept,
        shared.contexts.views._kept,
        storage.log._cache.windows,
    ]
    assert [len(each) for each in held] == [0, 0, 0, 0]
    assert storage.records.cached({"u:ada", "s:1"}) == 0


async def test_packed_indexes_of_before_go(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_index_memory_tiers.storage.catch_up._PACKED_ROWS", 4)
    memory = memory_of(storage, VectorMemoryBlock(embed_model=None), token_limit=60)
    await put_numbered(memory, 1, 6)
    await memory.aget("question 1")
    await storage.records.indexes.settle()
    assert await rows(storage, "SELECT * FROM {t}_packs") != []
    receipt = await memory.aforget(ids=["q1"])
    assert receipt.complete
    assert "packs" in receipt.removed
    assert await rows(storage, "SELECT * FROM {t}_packs") == []


async def test_tombstones_take_no_part_in_the_size_of_the_window(storage: Storage) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 4)
    await memory.aforget(ids=["q1", "a2"])
    [sums] = await rows(
        storage,
        "SELECT active_tokens, (SELECT SUM(tokens) FROM {t}_messages m WHERE m.sid = s.sid AND status = 'active') "
        "AS tokens FROM {t}_sessions s",
    )
    assert sums.active_tokens == sums.tokens


async def test_a_claim_on_the_session_is_void_afterwards(storage: Storage) -> None:
    """Whoever the owner of what is prepared from it may be."""
    memory = memory_of(storage)
    await put_numbered(memory, 1, 2)
    assert await storage.cursors.claim(1, "Recorder", "me", now=storage.now(), until=2**60) is not None
    await memory.aforget(ids=["q1"])
    assert (await storage.cursors.all(1))["Recorder"].claimed_until == 0


async def test_a_receipt_is_not_taken_in_by_deletes_that_did_nothing(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 2)

    async def nothing(*_: Any) -> int:
        return 2

    monkeypatch.setattr(storage.log, "tombstone", nothing)
    receipt = await memory.aforget(ids=["q1", "a2"])
    assert receipt.removed["messages"] == 2  # so it was told
    [entry] = [entry for entry in receipt.entries if entry.store == "messages"]
    assert entry.left == 2
    assert not receipt.complete


async def test_forgetting_the_same_again_finds_nothing(storage: Storage) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 2)
    assert (await memory.aforget(scope="user")).removed["messages"] == 4
    again = await memory.aforget(scope="user")
    assert again.complete
    assert set(again.removed.values()) == {0}
    assert await rows(storage, "SELECT * FROM {t}_forgetting") == []


async def test_thousands_of_messages_are_forgotten_page_by_page(make_storage: MakeStorage) -> None:
    memory = memory_of(make_storage("file"), VectorMemoryBlock(embed_model=None))
    await memory.aput_messages([said("user", f"note {n} {SECRET}") for n in range(950)])
    await absorb_all(memory)
    receipt = await memory.aforget(filter=ForgetFilter(contains=SECRET))
    assert receipt.complete
    assert receipt.removed["messages"] == receipt.removed["records"] == receipt.removed["terms"] == 950


async def test_a_session_of_before_the_call_is_forgotten_and_later_messages_stay(make_storage: MakeStorage) -> None:
    storage = make_storage("file")
    memory = memory_of(storage)
    await put_numbered(memory, 1, 1)
    run = await storage.forgetting.begin(_session_of(memory))
    await put_numbered(memory, 2, 2)
    await storage.forgetting.run(run)
    assert await texts(memory) == ["question 2", "answer 2"]


def _session_of(memory: TieredMemory) -> Any:
    from llama_index_memory_tiers.storage.selection import Selection  # noqa: PLC0415  # used once

    return Selection(memory.user_id or "", memory.session_id)


# --- bytes ------------------------------------------------------------------------------------------------------


async def test_the_bytes_of_the_file_hold_no_forgotten_text(make_storage: MakeStorage, tmp_path: Path) -> None:
    memory = memory_of(make_storage("file"))
    await put_numbered(memory, 1, 30)
    for number in range(20):
        await memory.aput(said("user", f"{SECRET} {number} " + "and much more text " * 40), uid=f"s{number}")
    await put_numbered(memory, 31, 40)

    def planted() -> int:
        return sum(path.read_bytes().count(SECRET.encode()) for path in tmp_path.iterdir())

    assert planted() > 20
    receipt = await memory.aforget(ids=[f"s{number}" for number in range(20)])
    assert receipt.complete, receipt
    assert planted() == 0
    assert len(await texts(memory)) == 80


async def test_an_engine_of_yours_overwrites_what_is_forgotten_as_well(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'yours.db'}")

    @event.listens_for(engine.sync_engine, "connect")
    def careless(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA secure_delete=OFF")

    async with Storage(engine=engine) as storage:
        memory = memory_of(storage, VectorMemoryBlock(embed_model=None))
        for number in range(5):
            await memory.aput(said("user", f"{SECRET} {number} " + "and more text " * 30), uid=f"s{number}")
        receipt = await memory.aforget(filter=ForgetFilter(contains=SECRET))
        assert receipt.complete, receipt
    await engine.dispose()
    assert sum(path.read_bytes().count(SECRET.encode()) for path in tmp_path.iterdir()) == 0  # noqa: ASYNC240  # a few small files


async def test_a_reader_in_the_way_of_the_write_ahead_log_is_named_in_the_receipt(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, reading = make_storage("file"), make_storage("file")
    memory = memory_of(storage)
    await put_numbered(memory, 1, 1)
    monkeypatch.setattr("llama_index_memory_tiers.storage.database.CHECKPOINT_MILLISECONDS", 20)

    async def look(connection: Any) -> ForgetReceipt:
        await connection.exec_driver_sql("BEGIN")
        await connection.exec_driver_sql(f"SELECT count(*) FROM {DEFAULT_TABLE_NAME}_messages")  # noqa: S608  # our own name
        receipt = await memory.aforget(ids=["q1"])
        await connection.exec_driver_sql("COMMIT")
        return receipt

    receipt = await reading._database.read(look)
    assert receipt.pending == ("write-ahead log",)
    assert not receipt.complete


# --- what is kept elsewhere -------------------------------------------------------------------------------------


class Shelf(RecordingBlock):
    """Keeps copies in a list of its own, which may refuse to delete."""

    name: str = "Shelf"
    told_of: list[Forgotten] = Field(default_factory=list, exclude=True)
    broken: bool = False

    @property
    def holds_external_data(self) -> bool:
        return True

    async def forget(self, forgotten: Forgotten) -> None:
        if self.broken:
            raise ConnectionError("no answer")
        self.told_of.append(forgotten)


async def test_a_block_with_data_elsewhere_is_told_what_is_gone(storage: Storage) -> None:
    shelf = Shelf()
    memory = memory_of(storage, shelf)
    await put_numbered(memory, 1, 2)
    [one] = await rows(storage, "SELECT uid FROM {t}_records WHERE text = 'answer 1'")
    receipt = await memory.aforget(ids=["a1"])
    assert receipt.complete
    assert receipt.removed["Shelf"] == 1
    assert shelf.told_of == [Forgotten((one.uid,), ((1, 2, "a1"),))]


async def test_a_failed_deletion_elsewhere_stays_pending_says_so_and_is_tried_at_the_next_start(
    make_storage: MakeStorage, storage_kind: str
) -> None:
    memory = memory_of(make_storage(storage_kind), Shelf(broken=True))
    await put_numbered(memory, 1, 2)
    receipt = await memory.aforget(ids=["a1", "q2"])
    assert not receipt.complete
    assert receipt.pending == ("Shelf",)
    [entry] = [entry for entry in receipt.entries if entry.store == "Shelf"]
    assert (entry.removed, entry.left, entry.error) == (0, 2, "ConnectionError")
    assert "ConnectionError" in str(receipt)
    await memory.storage.aclose()

    shelf = Shelf()
    reopened = memory_of(make_storage(storage_kind), shelf)
    await reopened.aget("anything")
    await reopened.aclose()
    assert [message[2] for note in shelf.told_of for message in note.messages] == ["a1", "q2"]
    assert await rows(reopened.storage, "SELECT * FROM {t}_forgotten") == []


class DeletingStore(SimpleVectorStore):
    """A vector store that can be read by id."""

    async def aget_nodes(self, node_ids: Any = None, filters: Any = None) -> list[Any]:
        return [one for one in node_ids or () if one in self.data.embedding_dict]


@pytest.mark.parametrize("forgets", [True, False])
async def test_nodes_of_a_vector_store_are_deleted_and_looked_for_again(storage: Storage, forgets: bool) -> None:
    vectors = DeletingStore()
    memory = memory_of(storage, VectorMemoryBlock(vector_store=vectors, embed_model=HashEmbedding()))
    await put_numbered(memory, 1, 3)
    assert len(vectors.data.embedding_dict) == 6
    if not forgets:
        object.__setattr__(vectors, "delete_nodes", lambda *_, **__: None)
    receipt = await memory.aforget(ids=["q1", "a3"])
    assert receipt.complete is forgets
    assert len(vectors.data.embedding_dict) == (4 if forgets else 6)


async def test_a_block_that_is_not_ours_makes_the_receipt_incomplete(storage: Storage) -> None:
    memory = memory_of(storage, CoreFactBlock(name="Theirs", llm=ScriptedLLM([])))
    receipt = await memory.aforget(scope="session")
    assert receipt.unreached == ("Theirs",)
    assert not receipt.complete
    assert receipt.pending == ()


async def test_the_window_in_a_chat_store_of_yours_goes_with_the_session_or_is_named_as_out_of_reach() -> None:
    engine = create_async_engine("sqlite+aiosqlite:///:memory:")
    store = SQLAlchemyChatStore(table_name="theirs", async_engine=engine)
    memory = TieredMemory(chat_store=store, user_id="ada", session_id="chat")
    await put_numbered(memory, 1, 2)
    by_time = await memory.aforget(before=datetime(2000, 1, 1, tzinfo=timezone.utc))
    assert by_time.pending == ("chat store",)
    whole = await memory.aforget(scope="session")
    assert whole.complete
    assert whole.removed["chat store"] == 4
    assert await texts(memory) == []
    await memory.aclose()
    await engine.dispose()


# --- interrupted ------------------------------------------------------------------------------------------------


async def test_an_interrupted_job_is_finished_when_the_storage_is_opened_again(
    make_storage: MakeStorage, storage_kind: str
) -> None:
    storage = make_storage(storage_kind)
    memory = memory_of(storage)
    await put_numbered(memory, 1, 3, SECRET)
    await storage.forgetting.begin(_session_of(memory))
    await storage.aclose()
    reopened = make_storage(storage_kind)
    assert await texts(memory_of(reopened)) == []
    assert SECRET not in await everything_written(reopened)
    jobs = await rows(reopened, "SELECT spec, finished_at FROM {t}_forgetting")
    assert [(job.spec, job.finished_at is not None) for job in jobs] == [("{}", True)]


async def test_a_lost_reply_leaves_no_second_job(storage: Storage) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 1, SECRET)
    lost = []

    def lose(name: str) -> None:
        if name == "transaction.committed" and not lost:
            lost.append(name)
            raise ConnectionResetError

    with failpoints.armed(lose):
        receipt = await memory.aforget(filter=ForgetFilter(contains=SECRET))
    assert lost
    assert receipt.complete
    assert receipt.removed["messages"] == 2
    assert await rows(storage, "SELECT * FROM {t}_forgetting") == []


async def test_what_a_failed_call_has_left_is_finished_by_the_next_call(storage: Storage) -> None:
    memory = memory_of(storage)
    await put_numbered(memory, 1, 2)
    await memory.aput(said("user", SECRET), uid="s")

    def fail(name: str) -> None:
        if name == "forget.noted":
            raise ConnectionAbortedError

    with failpoints.armed(fail), pytest.raises(ConnectionAbortedError):
        await memory.aforget(filter=ForgetFilter(contains=SECRET))
    assert SECRET in await everything_written(storage)
    assert (await memory.aforget(ids=["q1"])).complete
    assert SECRET not in await everything_written(storage)


async def test_finished_jobs_whose_receipt_nobody_read_are_removed_after_a_day(make_storage: MakeStorage) -> None:
    clock = Clock()
    storage = make_storage("file", clock=clock)
    memory = memory_of(storage)
    await put_numbered(memory, 1, 1)
    await storage.forgetting.run(await storage.forgetting.begin(_session_of(memory)))
    clock.pass_seconds(86_401)
    reopened = await make_storage("file", clock=clock).aopen()
    assert await rows(reopened, "SELECT * FROM {t}_forgetting") == []


async def test_two_processes_finish_one_job_together(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    memory = memory_of(storage)
    await put_numbered(memory, 1, 3)
    run = await storage.forgetting.begin(_session_of(memory))
    others = [asyncio.create_task(make_storage(storage_kind).aopen()) for _ in range(2)]
    outcome = await storage.forgetting.run(run)
    await asyncio.gather(*others)
    assert outcome.left["messages"] == 0
    assert outcome.removed["messages"] == 6


@pytest.mark.parametrize("word", ["Lisbon", "sunny"], ids=["the call", "the result"])
@pytest.mark.parametrize("blocks", [[], [VectorMemoryBlock(embed_model=None)]], ids=["alone", "block"])
async def test_a_model_is_shown_no_half_of_a_tool_exchange_of_which_the_other_was_forgotten(
    storage: Storage, word: str, blocks: list[Any]
) -> None:
    memory = TieredMemory(storage=storage, session_id="s", user_id="ann", memory_blocks=blocks)
    call = ToolCallBlock(tool_call_id="1", tool_name="weather", tool_kwargs={"city": "Lisbon"})
    told = [
        said("user", "What is it like there?"),
        ChatMessage(role="assistant", blocks=[call]),
        ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": "1"}),
        said("assistant", "Fine."),
        said("user", "Thanks."),
    ]
    await memory.aput_messages(told)
    assert [message.role.value for message in await memory.aget()][-5:] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert (await memory.aforget(filter=ForgetFilter(contains=word))).removed["messages"] == 1
    assert [message.role.value for message in await memory.aget()][-3:] == ["user", "assistant", "user"]
    assert "tool" not in {message.role.value for message in await memory.aget()}
    report = await memory.aexplain()
    assert (report.window_left_out, report.window_broken) == (1, 1)
    assert "1 of broken tool calls" in str(report)
    await memory.aclose()


@pytest.mark.parametrize("way", ["delete", "clear", "chat store"])
async def test_what_is_deleted_without_a_job_is_deleted_elsewhere_at_the_next_occasion(
    storage: Storage, way: str
) -> None:
    vectors = DeletingStore()
    memory = memory_of(storage, VectorMemoryBlock(vector_store=vectors, embed_model=HashEmbedding()))
    await put_numbered(memory, 1, 3)
    if way == "delete":
        await memory.board().delete("q1")
    elif way == "clear":
        await memory.board().clear()
    else:
        await memory.sql_store.delete_messages(memory.session_id)
    await memory.aget("anything")
    await memory._shared.forgetter.aclose()
    assert len(vectors.data.embedding_dict) == (5 if way == "delete" else 0)
    assert await rows(storage, "SELECT * FROM {t}_forgotten") == []


async def test_a_receipt_counts_what_was_deleted_elsewhere_once(storage: Storage) -> None:
    shelf = Shelf()
    memory = memory_of(storage, shelf)
    await put_numbered(memory, 1, 2)
    await memory.board().delete("q1")
    receipt = await memory.aforget(ids=["a1"])
    assert receipt.removed["Shelf"] == 2
    assert [message[2] for note in shelf.told_of for message in note.messages] == ["q1", "a1"]
