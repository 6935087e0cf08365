"""Many sessions at once: puts, mixed load and flushes next to stock, and how each grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_index.core.memory import Memory

from benchmarks.pictures import Curve, draw
from benchmarks.sides import Side, pair
from benchmarks.timing import message, table

WHOLE = {"token_limit": 10**9}
"""Nothing leaves the window."""
SMALL = {"token_limit": 4000, "token_flush_size": 600}
"""About 90 messages fit; about 20 leave at once."""
ASKED = "what did we plan for the weekend by the lake?"

Task = Callable[[Memory, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took: until its calls had returned, and with what went on in the background.

    Args:
        calls: How many.
        wall: Seconds until the last call had returned.
        cpu: Seconds of this process until nothing was left to do.
        settled: Seconds until nothing was left to do.
    """

    calls: int
    wall: float
    cpu: float
    settled: float

    @property
    def per_second(self) -> float:
        return self.calls / self.wall

    @property
    def cpu_each(self) -> float:
        """Milliseconds."""
        return self.cpu / self.calls * 1e3


async def report(directory: Path, *, quick: bool, postgres: str | None, pictures: Path | None = None) -> str:
    """Measure load.

    Args:
        directory: For database files.
        quick: Small sizes.
        postgres: URI of a server to measure as well.
        pictures: Where growth curves go.

    Returns:
        Markdown.
    """
    tasks, size, puts = (4, 20, 3) if quick else (64, 200, 10)
    bases = {"SQLite": None} if postgres is None else {"SQLite": None, "PostgreSQL": postgres}
    many, mixed, flushed = [], [], []
    for base, uri in bases.items():
        many.append((base, await _both(directory, f"many-{base}", uri, tasks, size, puts, WHOLE, _put)))
        mixed.append((base, await _both(directory, f"mixed-{base}", uri, tasks, size, puts, SMALL, _talk)))
        flushed.append((base, await _both(directory, f"flush-{base}", uri, 1, 0, 20 * puts, SMALL, _put)))
    heads = ["", "TieredMemory, calls/s", "stock, calls/s", "ours / stock", "CPU ms each", "stock", "until absorbed"]
    parts = [
        "## Load",
        _COMPARED,
        f"Puts of {tasks} tasks, each in its own session of {size} active messages:",
        table(heads, [_row(*each) for each in many]),
        f"The same tasks in small windows, {3 * puts} calls each: put a question, get a context, put an answer:",
        table(heads, [_row(*each) for each in mixed]),
        f"{20 * puts} puts into one small window, with the flushes that they cause:",
        table(heads, [_row(*each) for each in flushed]),
    ]
    if pictures is not None:
        parts.append(await _growth(directory, pictures, quick=quick))
    return "\n\n".join(parts)


_COMPARED = (
    "Stock is `Memory` over one `SQLAlchemyChatStore` engine with `VectorMemoryBlock` on Qdrant's local mode in a "
    "folder. Both sides have 5 connections, the same messages and the same local embedding model, and run one after "
    "the other. Databases are as each side opens them: on SQLite ours writes ahead (WAL, synchronous=FULL), stock has "
    "SQLite's defaults (a rollback journal, synchronous=FULL). What differs by design: ours embeds every complete turn "
    "in the background, stock only what is flushed, within the put. CPU is that of the whole process until nothing is "
    "left to do, so it holds the absorbing; a PostgreSQL server's own is in neither. The last column is the time until "
    "everything was absorbed, as a multiple of the time until the calls had returned."
)


def _row(base: str, costs: Sequence[Cost]) -> list[str]:
    ours, stock = costs
    return [
        base,
        f"{ours.per_second:.0f}",
        f"{stock.per_second:.0f}",
        f"{ours.per_second / stock.per_second:.1f} ×",
        f"{ours.cpu_each:.1f}",
        f"{stock.cpu_each:.1f}",
        f"{ours.settled / ours.wall:.2f} ×",
    ]


async def _both(
    directory: Path, name: str, uri: str | None, tasks: int, size: int, times: int, limits: dict[str, Any], task: Task
) -> list[Cost]:
    return [
        await _run(side, tasks, size, times, limits, task) for side in pair(directory, f"{name}-{tasks}-{size}", uri)
    ]


async def _run(side: Side, tasks: int, size: int, times: int, limits: dict[str, Any], task: Task) -> Cost:
    """Fill the sessions, then let all tasks run at once."""
    await side.open()
    prefix = f"{task.__name__}-{tasks}-{size}-{len(limits)}"
    memories = [side.memory(f"{prefix}-{number}", **limits) for number in range(tasks)]
    for memory in memories:
        if size:  # stock fails on an empty list
            await memory.aput_messages([message(number) for number in range(size)])
        await memory.aget()
    await side.settle()
    before, cpu = time.perf_counter(), time.process_time()
    calls = await asyncio.gather(*(_times(memory, size, times, task) for memory in memories))
    wall = time.perf_counter() - before
    await side.settle()
    cost = Cost(sum(calls), wall, time.process_time() - cpu, time.perf_counter() - before)
    await side.close()
    return cost


async def _times(memory: Memory, size: int, times: int, task: Task) -> int:
    for number in range(times):
        await task(memory, size + 2 * number)
    return times * (3 if task is _talk else 1)


async def _put(memory: Memory, number: int) -> None:
    await memory.aput(message(number))


async def _talk(memory: Memory, number: int) -> None:
    await memory.aput(message(number))
    await memory.aget(ASKED)
    await memory.aput(message(number + 1))


async def _growth(directory: Path, pictures: Path, *, quick: bool) -> str:
    """Curves over the length of a session, and over the number of tasks, on SQLite."""
    sizes, tasks = ([10, 40], [1, 4]) if quick else ([10, 50, 200, 500, 1000, 2000], [1, 4, 16, 64])
    by_size = [await _both(directory, "size", None, 1, size, 10, WHOLE, _put) for size in sizes]
    by_tasks = [await _both(directory, "tasks", None, count, 50, 10, WHOLE, _put) for count in tasks]
    draw(
        pictures / "growth-length.svg",
        title="CPU of a put",
        x="active messages in the session",
        y="milliseconds",
        curves=[Curve(name, sizes, [costs[side].cpu_each for costs in by_size]) for side, name in enumerate(_NAMES)],
    )
    draw(
        pictures / "growth-tasks.svg",
        title="Puts per second",
        x="tasks at once, each in a session of 50 messages",
        y="puts per second",
        curves=[Curve(name, tasks, [costs[side].per_second for costs in by_tasks]) for side, name in enumerate(_NAMES)],
    )
    return (
        "Growth on SQLite:\n\n![CPU of a put by the length of the session](growth-length.svg)\n\n"
        "![Puts per second by the number of tasks](growth-tasks.svg)"
    )


_NAMES = ("TieredMemory", "stock Memory")
