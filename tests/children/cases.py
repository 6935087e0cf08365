"""What other processes do in the tests of reported faults; the module is imported once and forked from."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable
from typing import Any

import aiosqlite  # noqa: F401  # imported before the fork
import asyncpg  # noqa: F401  # imported before the fork
from doubles import RecordingBlock, said, turn
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock

get_tokenizer()("load the encoding before the fork")

Place = tuple[str, str | None]
"""Address and schema of a database."""


def open_storage(place: Place, **options: Any) -> Storage:
    address, schema = place
    return Storage(address, db_schema=schema, **options)


def run(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Entry of a child: sends its result, or what went wrong."""
    try:
        pipe.send(("done", asyncio.run(function(*arguments))))
    except BaseException:  # noqa: BLE001  # the test must see it
        pipe.send(("failed", traceback.format_exc()))
    pipe.close()


async def many_turns(place: Place, name: str, count: int, barrier: Any) -> None:
    """Tasks that put a turn each into one session, while blocks absorb."""
    async with open_storage(place, pool_size=2) as storage:
        memory = flushed_memory(storage)
        await asyncio.to_thread(barrier.wait, 60)
        await asyncio.gather(*(one_turn(memory, f"{name}/{number}") for number in range(count)))
        await memory.aclose()


def flushed_memory(storage: Storage) -> TieredMemory:
    return TieredMemory(
        storage=storage,
        session_id="chat",
        window_messages=6,
        memory_blocks=[RecordingBlock(absorb_on=frozenset({"flush"}))],
    )


async def one_turn(memory: TieredMemory, name: str) -> None:
    await memory.aput(said("user", f"{name} question"))
    await memory.aput(said("assistant", f"{name} answer"))


async def first_reads(place: Place, count: int, barrier: Any) -> list[int]:
    """First uses of a database that does not exist yet, all at once."""
    storages = [open_storage(place, pool_size=1) for _ in range(count)]
    await asyncio.to_thread(barrier.wait, 60)
    found = await asyncio.gather(*(TieredMemory(storage=storage, session_id="chat").aget() for storage in storages))
    for storage in storages:
        await storage.aclose()
    return [len(messages) for messages in found]


async def dies_while_absorbing(place: Place, count: int) -> None:
    """Put turns, then fall dead inside the block's work."""

    def die(_: Any) -> None:
        os._exit(9)

    storage = open_storage(place)
    memory = TieredMemory(storage=storage, session_id="chat", claim_seconds=0.1, memory_blocks=[RecordingBlock()])
    for number in range(count):
        await storage.log.append("", "chat", [], now=storage.now(), consumers=["Recorder"])
        made = await memory._shared.entries.make(turn(number), None, memory._shared.entries.describe())
        await storage.log.append("", "chat", made.entries, now=storage.now(), consumers=["Recorder"])
    memory.memory_blocks[0].on_prepare = die  # type: ignore[attr-defined]
    await memory.aflush()


async def puts(place: Place, name: str, count: int, barrier: Any) -> None:
    """Plain writes to a session of its own and to one that all share."""
    async with open_storage(place) as storage:
        memory = TieredMemory(storage=storage, session_id="shared")
        await asyncio.to_thread(barrier.wait, 60)
        for number in range(count):
            await memory.aput(said("user", f"{name}/{number}"))
        await memory.aclose()


async def tells(place: Place, session: str, content: str) -> None:
    """One process of a user that learns something."""
    async with open_storage(place) as storage:
        memory = known_user(storage, session)
        await memory.aput_messages([said("user", content), said("assistant", "I see.")])
        await memory.aflush()
        await memory.aclose()


async def asks(place: Place, session: str, question: str) -> str:
    """Another process of the user that is asked about it."""
    async with open_storage(place) as storage:
        memory = known_user(storage, session)
        context = await memory.aget(question)
        await memory.aclose()
        return "\n".join(message.content or "" for message in context)


def known_user(storage: Storage, session: str) -> TieredMemory:
    return TieredMemory(
        storage=storage, session_id=session, user_id="logan", memory_blocks=[VectorMemoryBlock(embed_model=None)]
    )
