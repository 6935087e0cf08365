"""The price of recall: one user's memories among those of many others, without the embedding call."""

from __future__ import annotations

import random
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median, quantiles

import numpy as np
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.timing import table, timed
from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.records import Changes, NewRecord, Reads
from llama_index_memory_tiers.storage import Entry, IndexQuery
from llama_index_memory_tiers.testing import HashEmbedding
from llama_index_memory_tiers.text import analyse

DIMENSIONS = 256
WORDS = [f"word{number}" for number in range(5000)]
SHOWN = 30
GETS = 200
_MODEL = HashEmbedding(dims=DIMENSIONS)


async def report(directory: Path, *, quick: bool, postgres: str | None) -> str:
    """Measure recalls.

    Args:
        directory: For database files.
        quick: Small sizes.
        postgres: URI of a server to measure as well.

    Returns:
        Markdown.
    """
    mine, others, many = (500, 2, 1000) if quick else (10_000, 9, 100_000)
    among = f"{mine} among {(others + 1) * mine}"
    rows = [["SQLite", among, *await _measure(str(directory / "recall.db"), mine, others)]]
    if postgres is not None:
        rows.append(["PostgreSQL", among, *await _measure(postgres, mine, others)])
    rows.append(["SQLite", f"{many}, all", *await _measure(str(directory / "recall-many.db"), many, 0)])
    gets = await _gets(directory, quick=quick)
    return (
        f"## Recall\n\nWall milliseconds of one hybrid recall over the records of one user; {SHOWN} texts read. First: "
        "nobody has ever asked, rows are read one by one. Cold: a storage just opened in this process, which reads the "
        "packed index. Warm: the index is in memory. PostgreSQL has analysed its tables, as it does by itself within a "
        "minute.\n\n" + table(["", "the user's records", "first", "cold", "warm"], rows) + "\n\n" + gets
    )


async def _gets(directory: Path, *, quick: bool) -> str:
    """`aget` of one user, alone and beside others; embeddings are hashes, which cost next to nothing."""
    mine, others = (500, 2) if quick else (5_000, 20)
    path, rows = directory / "gets.db", []
    numbers, block = random.Random(4), VectorMemoryBlock(embed_model=_MODEL).key
    for users in (0, others):
        async with Storage(path) as storage:
            for user in range(users + 1) if not users else range(1, users + 1):
                await _fill(storage, str(user), mine, numbers, model=_MODEL.model_name, block=block)
        rows.append([f"{users * mine}", *await _asked(path, numbers)])
    growth = float(rows[1][2]) / float(rows[0][2])
    return (
        f"Wall milliseconds of `aget` at 4 000 tokens over {mine} records of the user, index in memory, by records of "
        f"others in the database. The 95th percentile grows by {growth:.2f} ×.\n\n"
        + table(["records of others", "median", "p95", "CPU, mean"], rows)
    )


async def _asked(path: Path, numbers: random.Random) -> list[str]:
    times: list[float] = []
    cpu = 0.0
    block = VectorMemoryBlock(embed_model=_MODEL)
    async with Storage(path) as storage:
        memory = TieredMemory(
            storage=storage, user_id="0", session_id="asking", token_limit=4000, memory_blocks=[block]
        )
        # The user's other session is looked at with every context, and nothing in it is due.
        assert await storage.log.sessions("0")
        assert not await storage.log.behind("0", [block.key], asking="asking")
        for _ in range(GETS + 1):
            question = " ".join(numbers.sample(WORDS[:500], 5))
            start, spent = time.perf_counter(), time.process_time()
            context = await memory.aget(question)
            times.append((time.perf_counter() - start) * 1e3)
            cpu += (time.process_time() - spent) * 1e3 if len(times) > 1 else 0.0
            assert "word" in (context[0].content or "")
    warm = times[1:]
    return [f"{median(warm):.1f}", f"{quantiles(warm, n=20)[-1]:.1f}", f"{cpu / GETS:.1f}"]


async def _measure(address: str, mine: int, others: int) -> tuple[str, str, str]:
    numbers = random.Random(1)
    async with Storage(address) as storage:
        for user in range(others + 1):
            await _fill(storage, str(user), mine, numbers)
    await _analyse(address)
    question = " ".join(numbers.sample(WORDS[:500], 5))
    vector = tuple(np.random.default_rng(2).normal(size=DIMENSIONS).tolist())

    async def recall(storage: Storage) -> None:
        now = datetime.now(timezone.utc)
        query = IndexQuery(text=question, now=now, vector=vector, kinds=frozenset({"message"}), limit=SHOWN)
        hits = await storage.records.search("u:0", "bench", query)
        assert len(await storage.records.messages_of("u:0", hits)) == SHOWN

    async with Storage(address) as storage:
        first, _ = await timed(lambda: recall(storage), 1)
    colds = []
    for _ in range(5):
        async with Storage(address) as storage:
            colds.append((await timed(lambda: recall(storage), 1))[0])
    async with Storage(address) as storage:
        await recall(storage)
        warm, _ = await timed(lambda: recall(storage), 50)
    return f"{first:.0f}", f"{sorted(colds)[2]:.0f}", f"{warm:.1f}"


async def _fill(
    storage: Storage, user: str, count: int, numbers: random.Random, *, model: str = "bench", block: str = "bench"
) -> None:
    """Write messages of a user and a block's records of them in bulk, and put the block's cursor behind them."""
    owner = f"u:{user}"
    texts = [" ".join(numbers.choices(WORDS, k=12)) for _ in range(count)]
    vectors = np.random.default_rng(numbers.randrange(2**32)).normal(size=(count, DIMENSIONS))
    for start in range(0, count, 1000):
        part = texts[start : start + 1000]
        entries = [Entry(storage.ids(), "user", 30, "bench", storage.now(), _data(told)) for told in part]
        put = await storage.log.append(user, "s", entries, now=storage.now())
        first = put.head_seq - len(part) + 1
        records = tuple(
            NewRecord(
                id=storage.ids(),
                kind="message",
                sources=((put.sid, first + at),),
                terms=analyse(told),
                tokens=30,
                vector=tuple(vectors[start + at].tolist()),
                model=model,
            )
            for at, told in enumerate(part)
        )
        epoch = await storage.records.epoch(owner)
        await storage.records.commit(
            owner, block, epoch=epoch, fence=_always, reads=Reads(), merge=lambda _, new=records: Changes(add=new)
        )
    await storage.cursors.add(put.sid, [(block, put.head_seq)])


async def _analyse(address: str) -> None:
    if "://" in address:
        engine = create_async_engine(address)
        async with engine.begin() as connection:
            await connection.execute(text("ANALYZE"))
        await engine.dispose()


def _data(told: str) -> str:
    return f'{{"role":"user","additional_kwargs":{{}},"blocks":[{{"block_type":"text","text":"{told}"}}]}}'


async def _always(_: object) -> bool:
    return True
