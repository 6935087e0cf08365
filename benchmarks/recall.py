"""The price of recall: one user's memories among those of many others, without the embedding call."""

from __future__ import annotations

import random
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from benchmarks.timing import table, timed
from llama_index_memory_tiers import Storage
from llama_index_memory_tiers.records import Changes, NewRecord, Reads
from llama_index_memory_tiers.storage import Entry, IndexQuery
from llama_index_memory_tiers.text import analyse

DIMENSIONS = 256
WORDS = [f"word{number}" for number in range(5000)]
SHOWN = 30


async def report(directory: Path, *, quick: bool, postgres: str | None) -> str:
    """Measure recalls.

    Args:
        directory: For database files.
        quick: Small sizes.
        postgres: URI of a server to measure as well.

    Returns:
        Markdown.
    """
    mine, others = (500, 2) if quick else (10_000, 9)
    rows = [["SQLite", *await _measure(str(directory / "recall.db"), mine, others)]]
    if postgres is not None:
        rows.append(["PostgreSQL", *await _measure(postgres, mine, others)])
    return (
        f"## Recall\n\nWall milliseconds of one hybrid recall over {mine} records of one user, with "
        f"{others * mine} of others beside them; {SHOWN} texts read. First: nobody has ever asked, the rows are read one "
        "by one. Cold: a new process, which reads the packed index. Warm: the index is in memory.\n\n"
        + table(["", "first", "cold", "warm"], rows)
    )


async def _measure(address: str, mine: int, others: int) -> tuple[str, str, str]:
    numbers = random.Random(1)
    async with Storage(address) as storage:
        for user in range(others + 1):
            await _fill(storage, f"u:{user}", mine, numbers)
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


async def _fill(storage: Storage, owner: str, count: int, numbers: random.Random) -> None:
    texts = [" ".join(numbers.choices(WORDS, k=12)) for _ in range(count)]
    vectors = np.random.default_rng(numbers.randrange(2**32)).normal(size=(count, DIMENSIONS))
    for start in range(0, count, 1000):
        part = texts[start : start + 1000]
        entries = [Entry(storage.ids(), "user", 30, "bench", storage.now(), _data(text)) for text in part]
        put = await storage.log.append(owner, "s", entries, now=storage.now())
        first = put.head_seq - len(part) + 1
        records = tuple(
            NewRecord(
                id=storage.ids(),
                kind="message",
                sources=((put.sid, first + at),),
                terms=analyse(text),
                tokens=30,
                vector=tuple(vectors[start + at].tolist()),
                model="bench",
            )
            for at, text in enumerate(part)
        )
        epoch = await storage.records.epoch(owner)
        await storage.records.commit(
            owner, "bench", epoch=epoch, fence=_always, reads=Reads(), merge=lambda _, new=records: Changes(add=new)
        )


def _data(text: str) -> str:
    return f'{{"role":"user","additional_kwargs":{{}},"blocks":[{{"block_type":"text","text":"{text}"}}]}}'


async def _always(_: object) -> bool:
    return True
