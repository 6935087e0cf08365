"""Packs: a cold start reads one piece instead of thousands of rows, and never anything that is no longer so."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import pytest
from running import MakeStorage
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.records import Changes, NewRecord, Reads, Record
from llama_index_memory_tiers.storage import Entry, IndexQuery, catch_up
from llama_index_memory_tiers.storage import packs as packs_module
from llama_index_memory_tiers.text import analyse

NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)
OWNER = "u:ann"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds at which a handful of rows is many."""
    monkeypatch.setattr(catch_up, "_PACKED_ROWS", 6)
    monkeypatch.setattr(catch_up, "_PAGE_ROWS", 3)
    monkeypatch.setattr(packs_module, "PART_BYTES", 300)


async def remember(storage: Storage, *words: str, owner: str = OWNER) -> None:
    records = tuple(NewRecord(id=str(uuid.uuid4()), kind="fact", text=word, terms=analyse(word)) for word in words)

    def merge(_: Sequence[Record]) -> Changes:
        return Changes(add=records)

    await storage.records.change(owner, "facts", reads=Reads(), merge=merge)


async def found(storage: Storage, text: str, owner: str = OWNER) -> list[str]:
    hits = await storage.records.search(owner, "", IndexQuery(text=text, now=NOW))
    return [record.text for record in await storage.records.records_of(owner, hits)]


async def rows(storage: Storage, owner: str = OWNER) -> int:
    packs = storage._tables.packs

    async def work(connection: AsyncConnection) -> int:
        return int((await connection.execute(select(func.count()).where(packs.c.owner == owner))).scalar_one())

    return await storage._database.read(work)


async def cost(storage: Storage, text: str) -> int:
    """Statements of one search."""
    await storage.aopen()
    before = storage.statements
    await storage.records.search(OWNER, "", IndexQuery(text=text, now=NOW))
    return storage.statements - before


WORDS = [f"parrot number{n}" for n in range(9)]


async def test_a_cold_start_reads_the_pack_and_what_came_since(make_storage: MakeStorage, storage_kind: str) -> None:
    first = make_storage(storage_kind)
    await remember(first, *WORDS)
    assert await cost(first, "parrot") == 1 + 4  # no pack, and four pages of three rows, the last one empty
    await first.records.indexes.settle()
    await remember(first, "otter late")
    second = make_storage(storage_kind)
    assert await cost(second, "parrot") == 1 + 1
    assert sorted(await found(second, "parrot")) == WORDS
    assert await found(second, "otter") == ["otter late"]
    assert await rows(second) > 1  # in parts


async def test_a_pack_never_brings_back_what_was_put_aside(make_storage: MakeStorage, storage_kind: str) -> None:
    first = make_storage(storage_kind)
    await remember(first, *WORDS)
    await found(first, "parrot")
    await first.records.indexes.settle()
    gone = (await first.records.records(OWNER, kinds=["fact"]))[0]
    await first.records.change(OWNER, "facts", reads=Reads(), merge=lambda _: Changes(archive=(gone.id,)))
    assert sorted(await found(make_storage(storage_kind), "parrot")) == WORDS[1:]


async def test_a_deletion_takes_packs_along(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    message = '{"role":"user","additional_kwargs":{},"blocks":[]}'
    await storage.log.append("ann", "s", [Entry("m1", "user", 1, "words", 1, message)], now=storage.now())
    await remember(storage, *WORDS)
    await found(storage, "parrot")
    await storage.records.indexes.settle()
    assert await rows(storage) > 0
    await storage.log.clear("ann", "s", ["active", "archived"], gone=True)
    assert await rows(storage) == 0


async def test_forgetting_a_person_proves_that_no_pack_is_left(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    memory = TieredMemory(
        storage=storage,
        user_id="ann",
        session_id="s",
        memory_blocks=[VectorMemoryBlock(embed_model=None)],
        delivery="inline",
    )
    for word in WORDS:
        await memory.aremember(word)
    assert await memory.arecall("parrot")
    await storage.records.indexes.settle()
    assert await rows(storage) > 0
    receipt = await memory.aforget(scope="user")
    assert receipt.complete
    assert await rows(storage) == 0
    assert await memory.arecall("parrot") == []
    await memory.aclose()


async def test_a_pack_made_during_a_deletion_is_not_kept(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    await remember(storage, *WORDS)
    store = storage.records.indexes._packs
    assert not await store.write(OWNER, "", packs_module.Pack(epoch=99, rev=1, body=b"x" * 1000))
    assert await rows(storage) == 0


async def test_of_several_packs_the_newest_whole_one_counts_and_older_ones_go(
    make_storage: MakeStorage, storage_kind: str
) -> None:
    storage = make_storage(storage_kind)
    await remember(storage, *WORDS)
    store = storage.records.indexes._packs
    for rev, body in ((3, b"old"), (5, b"new" * 300)):
        assert await store.write(OWNER, "", packs_module.Pack(0, rev, body))
    half = {"pack": "torn", "part": 0, "parts": 2, "owner": OWNER, "model": "", "epoch": 0, "rev": 9, "body": b"torn"}

    async def tear(connection: AsyncConnection) -> None:
        await store._put(connection, half)

    await storage._database.write(tear)
    kept = await store.read(OWNER, "")
    assert kept == packs_module.Pack(0, 5, b"new" * 300)
    assert await store.read(OWNER, "another model") is None
    assert await store.read("u:bob", "") is None
    assert await store.write(OWNER, "", packs_module.Pack(0, 9, b"newest"))
    assert await rows(storage) == 1  # what a killed writer left has gone as well


async def test_a_damaged_pack_costs_time_and_nothing_else(
    make_storage: MakeStorage, storage_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_storage(storage_kind)
    await remember(first, *WORDS)
    await found(first, "parrot")
    await first.records.indexes.settle()

    async def damage(connection: AsyncConnection) -> Any:
        return await connection.execute(update(first._tables.packs).values(body=b"\0" * 300))

    await first._database.write(damage)
    assert sorted(await found(make_storage(storage_kind), "parrot")) == WORDS
    assert "damaged pack skipped" in caplog.text


async def test_small_owners_are_not_packed(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    await remember(storage, *WORDS[:5])
    await found(storage, "parrot")
    await storage.records.indexes.settle()
    assert await rows(storage) == 0
