"""What a put, a context and a delivery cost: counted in statements, rows and model calls, never in time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from doubles import RecordingBlock, absorb_all, rows, said, turn
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.memory.memory import BaseMemoryBlock
from pydantic import Field
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import (
    EpisodicMemoryBlock,
    FactExtractionMemoryBlock,
    HeatMemoryBlock,
    Storage,
    TieredMemory,
    VectorMemoryBlock,
)
from llama_index_memory_tiers.embeddings import embed_query, one_context
from llama_index_memory_tiers.storage.schema import build_tables

# BEGIN IMMEDIATE and COMMIT are statements of their own on SQLite; asyncpg's are not seen by SQLAlchemy's events.
PUT_STATEMENTS = {"file": 4, "postgres": 2}
WINDOW_STATEMENTS = 1
FRESHEN_STATEMENTS = 1  # only with blocks that need no model: is there anything that they have not absorbed?
RECALL_STATEMENTS = 2  # bring the index up to date; fetch the texts


class CountingEmbedding(MockEmbedding):
    """Remembers what it was asked."""

    batches: list[int] = Field(default_factory=list)
    queries: list[str] = Field(default_factory=list)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        self.batches.append(len(texts))
        return [[1.0] * self.embed_dim for _ in texts]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        self.queries.append(query)
        return [1.0] * self.embed_dim


async def cost(storage: Storage, work: Awaitable[object]) -> int:
    """Statements that some work sends."""
    before = storage.statements
    await work
    return storage.statements - before


async def sizes(storage: Storage) -> dict[str, int]:
    """Rows of each table."""
    names = [table.name.removeprefix("x_") for table in build_tables("x").metadata.sorted_tables]
    return {name: (await rows(storage, "SELECT COUNT(*) AS n FROM {t}_" + name))[0].n for name in names}  # noqa: S608  # our own names


def memory_of(storage: Storage, *blocks: VectorMemoryBlock | RecordingBlock) -> TieredMemory:
    return TieredMemory(
        storage=storage,
        user_id="ada",
        session_id="chat",
        memory_blocks=list(blocks),
        delivery="inline",
        token_limit=1_000_000,
    )


async def test_a_put_is_two_statements_and_one_row_however_long_the_window(storage: Storage, storage_kind: str) -> None:
    memory = memory_of(storage)
    await memory.aput(said("user", "the first put makes the session"))
    for length in (10, 100, 1000):
        filling = [said("user", f"message {number}") for number in range(length)]
        assert await cost(storage, memory.aput_messages(filling)) == PUT_STATEMENTS[storage_kind]
        before = await sizes(storage)
        assert await cost(storage, memory.aput(said("user", "one more"))) == PUT_STATEMENTS[storage_kind]
        assert await sizes(storage) == {**before, "messages": before["messages"] + 1}


async def test_a_delivery_costs_the_same_however_long_the_session(storage: Storage) -> None:
    memory = memory_of(storage, RecordingBlock(), VectorMemoryBlock(embed_model=None))
    await memory.aput_messages(turn(0))
    early = [await cost(storage, memory.aput_messages(turn(number))) for number in range(1, 4)]
    filling = [message for number in range(100) for message in turn(number)]
    await memory.aput_messages(filling)
    late = [await cost(storage, memory.aput_messages(turn(number))) for number in range(3)]
    assert set(early) == set(late)
    assert len(set(early)) == 1


async def test_the_message_that_opens_a_turn_sets_no_block_to_work(storage: Storage, storage_kind: str) -> None:
    memory = memory_of(storage, VectorMemoryBlock())
    await memory.aput_messages(turn(1))
    assert await cost(storage, memory.aput(said("user", "and then?"))) == PUT_STATEMENTS[storage_kind]


async def test_a_turn_that_was_never_answered_is_absorbed_when_the_next_one_begins(storage: Storage) -> None:
    block = RecordingBlock()
    memory = memory_of(storage, block)
    await memory.aput_messages(turn(1))
    await memory.aput(said("user", "are you there?"))
    await memory.aput(said("user", "hello?"))
    assert block.batches[-1] == ["are you there?"]


async def test_a_turn_is_claimed_and_merged_and_nothing_is_read_twice(storage: Storage, storage_kind: str) -> None:
    memory = memory_of(storage, VectorMemoryBlock())
    await memory.aput_messages(turn(1))
    await memory.aput(said("user", "and then?"))
    # Read: session, cursors, epoch, messages. Claim. Merge: owner, cursor, records and their ids, sources, terms.
    looked, claimed, merged = 4, 1, 6
    frames = 4 if storage_kind == "file" else 0  # BEGIN and COMMIT, as above
    spent = await cost(storage, memory.aput(said("assistant", "then it rained")))
    assert spent == PUT_STATEMENTS[storage_kind] + looked + claimed + merged + frames


async def test_a_warm_context_without_blocks_is_one_statement(storage: Storage) -> None:
    memory = memory_of(storage)
    for number in range(3):
        await memory.aput_messages(turn(number))
        assert await cost(storage, memory.aget()) == WINDOW_STATEMENTS
        assert await cost(storage, memory.aget()) == WINDOW_STATEMENTS


async def test_a_context_with_recall_is_four_statements_and_two_within_the_same_turn(storage: Storage) -> None:
    model = CountingEmbedding(embed_dim=4)
    memory = memory_of(storage, VectorMemoryBlock(embed_model=model))
    await memory.for_session("earlier").aput_messages([said("user", "the cat is grey"), said("assistant", "noted")])
    await memory.aget("hello")
    for number in range(3):
        await memory.aput_messages([said("assistant", f"more {number}"), said("user", f"which cat is grey? {number}")])
        asked = len(model.queries)
        assert await cost(storage, memory.aget()) == FRESHEN_STATEMENTS + WINDOW_STATEMENTS + RECALL_STATEMENTS
        for _ in range(3):  # as an agent does in each round of tools
            assert await cost(storage, memory.aget()) == FRESHEN_STATEMENTS + WINDOW_STATEMENTS
        assert len(model.queries) == asked + 1


@pytest.mark.parametrize("count", [3, 64, 150])
async def test_a_batch_is_one_embedding_call(make_storage: Callable[..., Storage], count: int) -> None:
    model = CountingEmbedding(embed_dim=4, embed_batch_size=100)
    memory = memory_of(make_storage("file"), VectorMemoryBlock(embed_model=model, absorb_every=1000))
    await memory.aput_messages([said("user", f"message {number}") for number in range(count)])
    await absorb_all(memory)
    assert model.batches == [min(64, count - start) for start in range(0, count, 64)]


async def test_what_was_absorbed_costs_no_model_call_again(make_storage: Callable[..., Storage]) -> None:
    storage, model = make_storage("file"), CountingEmbedding(embed_dim=4)
    for _ in range(3):  # as after restarts
        memory = memory_of(storage, VectorMemoryBlock(embed_model=model))
        await memory.aput_messages(turn(0))
        await memory.aflush()
        await memory.aflush()
        await memory.aclose()
    assert model.batches == [2, 2, 2]


async def test_a_memory_for_another_session_costs_no_statement(make_storage: Callable[..., Storage]) -> None:
    storage = make_storage("file")
    memory = memory_of(storage, RecordingBlock())
    await memory.aput_messages(turn(0))

    async def many() -> None:
        for number in range(1000):
            memory.for_session(f"chat {number}", user_id=f"user {number}")

    assert await cost(storage, many()) == 0


async def test_a_question_is_embedded_once_for_all_blocks_of_a_memory(storage: Storage) -> None:
    model = CountingEmbedding(embed_dim=4)
    facts = FactExtractionMemoryBlock(extractor=lambda _: [], embed_model=model)
    blocks = [
        VectorMemoryBlock(embed_model=model),
        HeatMemoryBlock(llm=None, embed_model=model, short_term_capacity=0, absorb_every=1),
        EpisodicMemoryBlock(embed_model=model),
        facts,
    ]
    memory = TieredMemory(
        storage=storage, user_id="ada", session_id="chat", memory_blocks=blocks, delivery="inline", token_limit=2000
    )
    for number in range(3):
        await memory.aput_messages(turn(number))
    await facts.of(memory).add("Ada has a dog.")
    other = memory.for_session("other")
    await other.aput(said("user", "which dog?"))
    asked = len(model.queries)
    context = await other.aget()
    assert len(model.queries) == asked + 1
    assert all(name in str(context[0].content) for name in ("RetrievedMessages", "ExtractedFacts"))
    await other.aput(said("user", "and the cat?"))
    await other.aget()
    assert len(model.queries) == asked + 2


async def test_a_block_without_the_patience_for_a_question_s_embedding_leaves_it_to_the_others(
    storage: Storage,
) -> None:
    class Slow(CountingEmbedding):
        async def _aget_query_embedding(self, query: str) -> list[float]:
            self.queries.append(query)
            await asyncio.sleep(0.3)
            raise ConnectionError

    model = Slow(embed_dim=4)
    blocks = [VectorMemoryBlock(embed_model=model), EpisodicMemoryBlock(embed_model=model, timeout_seconds=0.1)]
    memory = TieredMemory(storage=storage, user_id="ada", memory_blocks=blocks, delivery="inline", token_limit=2000)
    await memory.aput_messages(turn(0))
    model.queries.clear()
    context = await memory.for_session("other").aget("what was said in turn 0?")
    assert "RetrievedMessages" in str(context[0].content)  # found by its words
    assert len(model.queries) == 1


async def test_a_task_that_outlives_a_context_asks_for_itself() -> None:
    model = CountingEmbedding(embed_dim=4)
    with one_context():
        go_on = asyncio.Event()

        async def later() -> list[float]:
            await go_on.wait()
            return await embed_query(model, "which dog?")

        task = asyncio.create_task(later())
        await embed_query(model, "which dog?")
        await embed_query(model, "which dog?")
        assert len(model.queries) == 1
    go_on.set()
    assert await task == [1.0] * 4
    assert len(model.queries) == 2


class AskingAnother(BaseMemoryBlock[str]):
    """Looks another user's memory up by a synchronous call in a thread, as a retriever of documents may."""

    name: str = "Library"
    priority: int = 1
    look: Callable[[], str] = Field(exclude=True)

    async def _aget(self, messages: list[ChatMessage] | None = None, **_: Any) -> str:  # LlamaIndex's
        await asyncio.sleep(0.01)  # the question is being embedded on this loop
        return await asyncio.to_thread(self.look)

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """It only reads."""


async def test_a_block_may_ask_the_same_question_from_another_thread(storage: Storage) -> None:
    class Slow(CountingEmbedding):
        async def _aget_query_embedding(self, query: str) -> list[float]:
            await asyncio.sleep(0.1)
            return await super()._aget_query_embedding(query)

    model = Slow(embed_dim=4)
    library = memory_of(storage, VectorMemoryBlock(embed_model=model)).for_session("books", user_id="library")
    await library.aput_messages(turn(7))
    blocks = [VectorMemoryBlock(embed_model=model), AskingAnother(look=lambda: str(library.recall("which dog?")))]
    memory = TieredMemory(storage=storage, user_id="ada", memory_blocks=blocks, delivery="inline", token_limit=2000)
    await memory.aput_messages(turn(0))
    context = str((await memory.for_session("other").aget("which dog?"))[0].content)
    assert "question 7" in context
    assert "question 0" in context
    assert model.queries.count("which dog?") == 2


async def test_no_statement_of_a_put_a_context_or_a_delivery_reads_a_whole_table(
    make_storage: Callable[..., Storage],
) -> None:
    """What is stored for others costs nothing: SQLite looks everything up by keys; PostgreSQL plans by size."""
    storage = make_storage("file")
    blocks = [VectorMemoryBlock(embed_model=None), HeatMemoryBlock(llm=None, embed_model=None), RecordingBlock()]
    memory = TieredMemory(
        storage=storage, user_id="ada", session_id="chat", memory_blocks=blocks, delivery="inline", token_limit=300
    )
    await memory.aget()
    sent: dict[str, Any] = {}

    def see(_: Any, __: Any, sql: str, values: Any, ___: Any, many: bool) -> None:  # SQLAlchemy's
        sent.setdefault(sql, values[0] if many else values)

    event.listen(Engine, "before_cursor_execute", see)
    try:
        for number in range(12):
            await memory.aput_messages(turn(number))
            await memory.aget("what was said about turn 3?")
        await memory.for_session("other").aget("what was said?")
        await memory.aflush()
    finally:
        event.remove(Engine, "before_cursor_execute", see)

    async def whole(connection: AsyncConnection) -> list[str]:
        found = []
        for sql, values in sent.items():
            if sql.split()[0] in {"SELECT", "INSERT", "UPDATE", "DELETE", "WITH"}:
                plan = (await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)).all()
                # "SEARCH messages USING INDEX messages_active (sid=?)", but not without what stands in brackets.
                found += [sql for row in plan if re.match(rf"\w+ (?:TABLE )?{storage.table_name}_[^(]+$", row[3])]
        return found

    assert len(sent) > 20
    assert await storage._database.read(whole) == []
