"""The price of topics: absorbing a batch and building a context with a thousand and a hundred thousand pages."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median

import numpy as np
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.embeddings import MockEmbedding
from pydantic import PrivateAttr

from benchmarks.timing import table
from llama_index_memory_tiers import HeatMemoryBlock, Storage, TieredMemory
from llama_index_memory_tiers.blocks.heat.calibration import unit
from llama_index_memory_tiers.blocks.heat.pages import make_page, page_record
from llama_index_memory_tiers.blocks.heat.segments import Segment, begun, segment_record
from llama_index_memory_tiers.records import Changes, NewRecord, StoredMessage

DIMENSIONS = 256
PAGES_A_TOPIC = 50
BATCH = 10
PART = 1000
WORDS = [f"word{number}" for number in range(20_000)]


class _Topics(MockEmbedding):
    """Embeds at no cost by the first word that names a topic, so that only what is ours is measured."""

    _rows: dict[str, list[float]] = PrivateAttr(default_factory=dict)

    def _get_text_embedding(self, text: str) -> list[float]:
        topic = next((word for word in text.split() if word.startswith("topic")), text)
        if topic not in self._rows:
            seed = uuid.uuid5(uuid.NAMESPACE_OID, topic).int % 2**32
            self._rows[topic] = np.random.default_rng(seed).normal(size=DIMENSIONS).tolist()
        return self._rows[topic]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embedding(text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@dataclass(frozen=True)
class _Talk:
    """What is said on topics, each with words of its own.

    Args:
        topics: How many.
        numbers: Chance.
    """

    topics: int
    numbers: random.Random

    def pair(self, topic: int) -> list[ChatMessage]:
        """A question and its answer."""
        own = [WORDS[(topic * 37 + step * 101) % len(WORDS)] for step in range(20)]
        asked = " ".join([f"topic{topic}", "what", "about", *self.numbers.choices(own, k=6)])
        answered = " ".join(["it", "is", *self.numbers.choices(own, k=15), *self.numbers.choices(WORDS, k=3)])
        return [
            ChatMessage(role=MessageRole.USER, content=f"{asked}?"),
            ChatMessage(role=MessageRole.ASSISTANT, content=f"{answered}."),
        ]

    def some(self, pairs: int) -> Iterator[list[ChatMessage]]:
        """Pairs on topics by chance."""
        for _ in range(pairs):
            yield self.pair(self.numbers.randrange(self.topics))


async def report(directory: Path, *, quick: bool) -> str:
    """Measure absorbing and contexts.

    Args:
        directory: For database files.
        quick: Small sizes.

    Returns:
        Markdown.
    """
    sizes, times = ((100, 400), 3) if quick else ((1000, 100_000), 25)
    rows = []
    for name, dense in (("by words", False), ("by meaning", True)):
        found: dict[str, list[float]] = {}
        for pages in sizes:
            async with Storage(directory / f"heat-{name}-{pages}.db") as storage:
                for way, milliseconds in await _measure(storage, pages, times, dense=dense):
                    found.setdefault(way, []).append(milliseconds)
        for way, (few, many) in found.items():
            rows.append([name, way, f"{few:.1f}", f"{many:.1f}", f"{many / few:.1f}"])
    heads = ["", "", f"{sizes[0]:,} pages", f"{sizes[1]:,} pages", "ratio"]
    return (
        f"## Topics\n\nMedian CPU milliseconds for one user, their topics in memory, {PAGES_A_TOPIC} pages a topic, "
        f"without model calls. A context is warm when nothing was absorbed since the last.\n\n" + table(heads, rows)
    )


async def _measure(storage: Storage, pages: int, times: int, *, dense: bool) -> list[tuple[str, float]]:
    model = _Topics(embed_dim=DIMENSIONS) if dense else None
    block = HeatMemoryBlock(llm=None, embed_model=model, short_term_capacity=0, absorb_every=BATCH)
    memory = TieredMemory(
        storage=storage, user_id="u", session_id="s", memory_blocks=[block], delivery="inline", token_limit=8000
    )
    talk = _Talk(max(1, pages // PAGES_A_TOPIC), random.Random(1))
    await _fill(memory, block, talk, pages)
    absorbing, cold, warm = [], [], []
    for _ in range(times):
        await memory.aput_messages([message for pair in talk.some(BATCH - 1) for message in pair])
        last = talk.pair(talk.numbers.randrange(talk.topics))
        absorbing.append(await _cpu(lambda last=last: memory.aput_messages(last)) / BATCH)  # type: ignore[misc]  # bound at once
        asked = [str(pair[0].content) for pair in talk.some(6)]
        first, *others = [await _cpu(lambda text=text: memory.aget(input=text)) for text in asked]  # type: ignore[misc]  # bound at once
        cold.append(first)
        warm += others
    return [
        ("absorb, per page", median(absorbing)),
        ("context after absorbing", median(cold)),
        ("context, warm", median(warm)),
    ]


async def _cpu(work: Callable[[], Awaitable[object]]) -> float:
    start = time.process_time()
    await work()
    return (time.process_time() - start) * 1e3


# --- filling --------------------------------------------------------------------------------------------------


async def _fill(memory: TieredMemory, block: HeatMemoryBlock, talk: _Talk, pages: int) -> None:
    """Write pages and their topics in bulk, past the filing, and move the block's cursor behind them."""
    segments: dict[int, Segment] = {}
    before = memory.for_session("before")
    plain = TieredMemory(storage=memory.storage, user_id="u", session_id="before", token_limit=8000)
    desk = before.desk(block.name)
    for start in range(0, pages, PART):
        topics = [number % talk.topics for number in range(start, min(start + PART, pages))]
        await plain.aput_messages([message for topic in topics for message in talk.pair(topic)])
        stored = await _newest(plain, 2 * len(topics))
        new = [
            _page(block, segments, topic, stored[2 * at : 2 * at + 2], number=start + at)
            for at, topic in enumerate(topics)
        ]
        await desk.change(lambda _, new=tuple(new): Changes(add=new))  # type: ignore[misc]  # bound at once
    for start in range(0, len(segments), PART):
        found = tuple(segment_record(one) for one in list(segments.values())[start : start + PART])
        await desk.change(lambda _, new=found: Changes(add=new))  # type: ignore[misc]  # bound at once
    session = await memory.storage.log.session("u", "before")
    assert session is not None
    await memory.storage.cursors.add(session.sid, [(block.key, session.head_seq)])


async def _newest(memory: TieredMemory, count: int) -> Sequence[StoredMessage]:
    session = await memory.storage.log.session("u", "before")
    assert session is not None
    rows, _ = await memory.storage.log.read(session.sid, "before", after=session.head_seq - count, limit=count)
    return rows


def _page(
    block: HeatMemoryBlock, segments: dict[int, Segment], topic: int, messages: Sequence[StoredMessage], number: int
) -> NewRecord:
    said = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=number)
    page = replace(make_page(block.key, messages), said_at=said, tokens=40)
    if block.embed_model is not None:
        page = replace(page, vector=unit(block.embed_model.get_text_embedding(page.text)))
    model = block.embed_model.model_name if block.embed_model is not None else ""
    old = segments.get(topic) or begun(page, str(uuid.uuid4()), said)
    segments[topic] = old.joined(page, model)
    return page_record(page, old.id, segments[topic].pages, model)
