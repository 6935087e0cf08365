"""The price of recalling episodes: ten thousand attempts of one user, without the embedding call."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
from llama_index.core.embeddings import MockEmbedding

from benchmarks.timing import table
from llama_index_memory_tiers import EpisodeStep, EpisodicMemoryBlock, Storage, TieredMemory, ToolUse
from llama_index_memory_tiers.blocks.episodic.episodes import Episode, to_record
from llama_index_memory_tiers.records import Changes

DIMENSIONS = 256
WORDS = [f"word{number}" for number in range(5000)]
VERBS = ("deploy", "repair", "translate", "compare", "order")
PART = 1000


class _Instant(MockEmbedding):
    """Embeds at no cost, so that only the recall is measured."""

    def _get_query_embedding(self, query: str) -> list[float]:
        numbers = np.random.default_rng(len(query))
        return numbers.normal(size=DIMENSIONS).tolist()  # type: ignore[no-any-return]  # numpy says Any


async def report(directory: Path, *, quick: bool) -> str:
    """Measure recalls.

    Args:
        directory: For database files.
        quick: Small sizes.

    Returns:
        Markdown.
    """
    count, times = (500, 20) if quick else (10_000, 200)
    rows = []
    for name, model in (("by words", None), ("hybrid", _Instant(embed_dim=DIMENSIONS))):
        async with Storage(directory / f"episodes-{name}.db") as storage:
            block = EpisodicMemoryBlock(embed_model=model)
            memory = TieredMemory(storage=storage, user_id="u", session_id="s", memory_blocks=[block])
            tasks = await _fill(memory, count, dense=model is not None)
            book = block.of(memory)
            ways: list[tuple[str, Callable[[str], Awaitable[Any]]]] = [
                ("recall_similar, k=3", book.recall_similar),
                ("recall_failures, k=10", book.recall_failures),
                ("aget", lambda task, memory=memory: memory.aget(input=task)),
            ]
            for way, recall in ways:
                middle, most = await _percentiles(recall, tasks, times)
                rows.append([name, way, f"{middle:.1f}", f"{most:.1f}"])
    return f"## Episodes\n\nWall milliseconds over {count} episodes of one user, index in memory.\n\n" + table(
        ["", "", "median", "p95"], rows
    )


async def _percentiles(recall: Callable[[str], Awaitable[Any]], tasks: list[str], times: int) -> tuple[float, float]:
    numbers = random.Random(2)
    await recall(tasks[0])
    walls = []
    for at in range(times):
        # Every other one is a task that was tried before.
        task = numbers.choice(tasks) if at % 2 else _task(numbers)
        start = time.perf_counter()
        assert await recall(task)
        walls.append(time.perf_counter() - start)
    walls.sort()
    return walls[times // 2] * 1e3, walls[int(times * 0.95)] * 1e3


def _task(numbers: random.Random) -> str:
    return " ".join((numbers.choice(VERBS), "the", *numbers.choices(WORDS, k=8)))


async def _fill(memory: TieredMemory, count: int, *, dense: bool) -> list[str]:
    numbers = random.Random(1)
    tasks = [_task(numbers) for _ in range(count)]
    vectors = np.random.default_rng(1).normal(size=(count, DIMENSIONS))
    desk = memory.desk("Episodes")
    began = datetime(2026, 1, 1, tzinfo=timezone.utc)
    model = _Instant(embed_dim=DIMENSIONS).model_name
    records = []
    for at, task in enumerate(tasks):
        step = EpisodeStep("fetch", tool_calls=(ToolUse("fetch", '{"page": 1}', "a page " * 40),), at=began)
        lesson = " ".join(numbers.choices(WORDS, k=12))
        start = began + timedelta(minutes=at)
        outcome: Any = ("success", "failure", "partial")[at % 3]
        episode = Episode(desk.new_id(), task, outcome, start, (step,) * 8, (lesson,), (), start, None, None, start)
        vector = tuple(vectors[at].tolist()) if dense else None
        records.append(to_record(episode, tokens=100, vector=vector, model=model if dense else ""))
    for start_at in range(0, count, PART):
        part = tuple(records[start_at : start_at + PART])
        await desk.change(lambda _, new=part: Changes(add=new))  # type: ignore[misc]  # bound at once
    return tasks
