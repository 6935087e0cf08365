"""What people pass by mistake is refused by name, before anything is stored, and harms nothing that is there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore

from llama_index_memory_tiers import (
    ConfigurationError,
    EpisodicMemoryBlock,
    FactExtractionMemoryBlock,
    ForgetFilter,
    InvalidMessageError,
    JournalMemoryBlock,
    MemoryTiersError,
    Partition,
    Storage,
    TieredMemory,
    VectorMemoryBlock,
    WorkingMemoryBlock,
)
from llama_index_memory_tiers.storage import OwnerReader
from tests.doubles import said

BEYOND = [
    datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-12))),
    datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
    datetime(9999, 12, 31, 23, 59),  # noqa: DTZ001  # naive on purpose
    datetime(1, 1, 1),  # noqa: DTZ001  # as above
]


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    async with Storage(tmp_path / "m.db") as opened:
        yield opened


def memory_with(storage: Storage, *blocks: Any, **fields: Any) -> TieredMemory:
    return TieredMemory(
        **{"storage": storage, "user_id": "ann", "session_id": "s", "delivery": "inline", **fields},
        memory_blocks=list(blocks),
    )


@pytest.mark.parametrize("when", [*BEYOND, "2020-01-01"])
async def test_a_time_that_no_zone_can_show_is_refused(storage: Storage, when: Any) -> None:
    memory = memory_with(storage)
    with pytest.raises(InvalidMessageError, match="created_at"):
        await memory.aput(said("user", "keep me"), created_at=when)
    assert await memory.aget_all() == []


@pytest.mark.parametrize("when", [*BEYOND, "2020-01-01"])
@pytest.mark.parametrize("name", ["since", "until"])
async def test_a_fact_with_such_a_time_is_refused_and_blinds_nobody(storage: Storage, name: str, when: Any) -> None:
    block = FactExtractionMemoryBlock(extractor=lambda _: [])
    facts = block.of(memory_with(storage, block))
    await facts.add("Ann likes plums.")
    with pytest.raises(MemoryTiersError, match=name):
        await facts.add("poison", **{name: when})
    assert [fact.text for fact in await facts.all()] == ["Ann likes plums."]


@pytest.mark.parametrize(
    "field", [{"retention_days": float("inf")}, {"retention_days": 5e6}, {"top_k": "3"}, {"top_k": 1.5}]
)
def test_a_partition_that_could_not_absorb_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(field))):
        Partition("facts", **field)


@pytest.mark.parametrize("seconds", [1e300, 1e13])
def test_a_span_that_no_clock_can_show_is_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="interrupted_after_seconds"):
        EpisodicMemoryBlock(embed_model=None, interrupted_after_seconds=seconds)
    with pytest.raises(ConfigurationError, match="recent_days"):
        JournalMemoryBlock(directory=tmp_path, recent_days=int(seconds))


async def test_a_plan_that_is_too_long_is_refused_and_notes_stay(storage: Storage) -> None:
    block = WorkingMemoryBlock()
    async with block.of(memory_with(storage, block)).task("big") as task:
        with pytest.raises(ConfigurationError, match="300 steps"):
            await task.plan(*[f"step {n}" for n in range(300)])
        await task.plan(*[f"step {n}" for n in range(100)])
        for number in range(150):
            await task.note(f"note {number}")
        state = await task.state()
        assert state is not None
        assert len(state.texts("plan")) == 100
        assert state.texts("note")[-1] == "note 149"


@pytest.mark.parametrize("what", [None, b"x", 123, ["a", "b"]])
async def test_only_text_is_written_into_a_task(storage: Storage, what: Any) -> None:
    block = WorkingMemoryBlock()
    async with block.of(memory_with(storage, block)).task("t") as task:
        for write in (task.note, task.result, task.plan):
            with pytest.raises(ConfigurationError, match="text"):
                await write(what)
        state = await task.state()
        assert state is not None
        assert state.entries == ()


async def test_a_lone_surrogate_is_no_reason_to_fail(storage: Storage, tmp_path: Path) -> None:
    journal, episodes = JournalMemoryBlock(directory=tmp_path / "j"), EpisodicMemoryBlock(embed_model=None)
    memory = memory_with(storage, journal, episodes)
    bad = "lone \ud800"
    await journal.of(memory).append(bad)
    await journal.of(memory).set("Key", bad)
    assert "lone" in (await journal.of(memory).get("Key") or "")
    for call in (
        lambda: episodes.of(memory).get(bad),
        lambda: episodes.of(memory).amend(bad, lessons=["x"]),
        lambda: memory.awhy(bad),
        lambda: memory.aforget(ids=[bad]),
    ):
        try:
            await call()
        except MemoryTiersError:
            continue  # nobody has that id


async def test_a_backup_is_not_taken_for_the_way_back_after_forgetting(storage: Storage, tmp_path: Path) -> None:
    memory = memory_with(storage)
    await memory.aput(said("user", "one"))
    await memory.aexport(tmp_path / "backup.jsonl")
    await memory.aforget(scope="user")
    with pytest.raises(ConfigurationError, match="not brought back"):
        await memory.aimport(tmp_path / "backup.jsonl")
    other = memory_with(Storage(tmp_path / "other.db"))
    await other.aimport(tmp_path / "backup.jsonl")
    assert [message.content for message in await other.aget_all()] == ["one"]
    await other.storage.aclose()


async def test_a_receipt_says_where_people_wrote_what_was_forgotten(storage: Storage, tmp_path: Path) -> None:
    journal = JournalMemoryBlock(directory=tmp_path / "j")
    memory = memory_with(storage, VectorMemoryBlock(embed_model=None), journal)
    await memory.aput(said("user", "My diagnosis is gout."))
    await journal.of(memory).set("Health", "Gout, and gout again")
    receipt = await memory.aforget(filter=ForgetFilter(contains="gout"))
    assert receipt.pending == (journal.name,)
    assert [entry.left for entry in receipt.entries if entry.store == journal.name] == [2]
    await journal.of(memory).remove("Health")
    assert (await memory.aforget(filter=ForgetFilter(contains="gout"))).complete


async def test_a_person_is_forgotten_in_all_windows_of_a_foreign_store(tmp_path: Path) -> None:
    store = SQLAlchemyChatStore(table_name="x", async_database_uri=f"sqlite+aiosqlite:///{tmp_path}/f.db")
    memory = TieredMemory(chat_store=store, user_id="ann", session_id="s1")
    other, bob = memory.for_session("s2"), memory.for_session("s1", "bob")
    for one in (memory, other, bob):
        await one.aput(said("user", "gout"))
    receipt = await memory.aforget(scope="user")
    assert receipt.complete
    assert await other.aget_all() == []
    assert len(await bob.aget_all()) == 1
    await memory.aclose()
    assert store._async_engine is not None
    await store._async_engine.dispose()


@pytest.mark.parametrize(
    "given", [{"query": None}, {"query": "x", "partitions": "facts"}, {"query": "x", "filter": "role"}, {"query": 7}]
)
async def test_a_look_up_names_what_is_wrong(storage: Storage, given: dict[str, Any]) -> None:
    memory = memory_with(storage, VectorMemoryBlock(embed_model=None))
    await memory.aremember("x")
    with pytest.raises(ConfigurationError, match=list(given)[-1]):
        await memory.arecall(**given)


async def test_looking_for_our_tables_changes_no_byte_of_a_foreign_file(tmp_path: Path) -> None:
    import sqlite3  # noqa: PLC0415  # here only

    foreign, empty = tmp_path / "foreign.db", tmp_path / "empty.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE x (a)")
    connection.close()
    empty.touch()
    for path in (foreign, empty):
        before = path.read_bytes()
        storage = Storage(path)
        assert not await storage.amade()
        await storage.aclose()
        assert path.read_bytes() == before


async def test_a_phrase_said_a_hundred_times_does_not_push_the_answer_out(storage: Storage) -> None:
    memory = memory_with(storage, VectorMemoryBlock(embed_model=None), token_limit=400)
    await memory.aput_messages([said("user", "My sister lives in Porto."), said("assistant", "Nice.")])
    for number in range(60):
        asked = memory.for_session(f"later {number}")
        await asked.aput_messages(
            [said("user", "Where does my sister live?"), said("assistant", "I don't know where your sister lives.")]
        )
    shown = repr(await memory.for_session("now").aget("Where does my sister live?"))
    assert "Porto" in shown
    assert shown.count("I don't know where your sister lives.") == 1


async def test_among_repeated_phrases_nothing_is_read_twice(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of candidates grows until enough differ."""
    read: list[int] = []
    plain = OwnerReader.messages_of

    async def counted(self: OwnerReader, hits: Any) -> Any:
        read.extend(hit.id for hit in hits)
        return await plain(self, hits)

    monkeypatch.setattr(OwnerReader, "messages_of", counted)
    memory = memory_with(storage, VectorMemoryBlock(embed_model=None), token_limit=400)
    await memory.aput_messages([said("user", "My sister lives in Porto."), said("assistant", "Nice.")])
    for number in range(60):
        asked = memory.for_session(f"later {number}")
        await asked.aput_messages([said("user", "Where does my sister live?"), said("assistant", "I don't know.")])
    await memory.for_session("now").aget("Where does my sister live?")
    assert len(read) > 50  # more than the first list
    assert len(read) == len(set(read))
