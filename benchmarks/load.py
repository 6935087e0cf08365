"""Many sessions at once: puts, mixed load and flushes next to stock, and how each grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as endless
from pathlib import Path

from llama_index.core.memory import Memory

from benchmarks.pictures import Curve, draw
from benchmarks.sides import Side, pair
from benchmarks.timing import message, table

WHOLE = {"token_limit": 10**9}
"""Nothing leaves the window."""
SMALL = {"token_limit": 4000, "token_flush_size": 600}
"""About 90 messages fit; about 20 leave at once."""
_NUMBERS = endless()
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, on both sides alike.

    Args:
        task: What each session does again and again.
        tasks: How many sessions, all at once.
        size: Messages in each of them before.
        times: How often.
        limits: Of the window.
        vectors: Whether there is a block of vectors.
    """

    task: Task
    tasks: int
    size: int
    times: int
    limits: Mapping[str, int]
    vectors: bool = True


async def report(directory: Path, *, quick: bool, postgres: str | None, pictures: Path) -> str:
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
    bases = {"SQLite": None, "PostgreSQL": postgres} if postgres else {"SQLite": None}
    many = Plan(_put, tasks, size, puts, WHOLE)
    alone = replace(many, vectors=False)
    mixed = Plan(_talk, tasks, size, puts, SMALL)
    flushed = Plan(_put, 1, 0, 20 * puts, SMALL)
    rows: dict[str, list[list[str]]] = {"many": [], "mixed": [], "flushed": []}
    for base, uri in bases.items():
        rows["many"].append(_row(f"{base}, window alone", await _both(directory, uri, alone)))
        rows["many"].append(_row(f"{base}, with vectors", await _both(directory, uri, many)))
        rows["mixed"].append(_row(base, await _both(directory, uri, mixed)))
        rows["flushed"].append(_row(base, await _both(directory, uri, flushed)))
    parts = [
        "## Load",
        _COMPARED,
        f"Puts of {tasks} tasks, each in its own session of {size} active messages:",
        table(_HEADS, rows["many"]),
        f"The same tasks in small windows, {3 * puts} calls each: put a question, get a context, put an answer:",
        table(_HEADS, rows["mixed"]),
        f"{20 * puts} puts into one small window, with the flushes that they cause:",
        table(_HEADS, rows["flushed"]),
        await _growth(directory, pictures, quick=quick),
    ]
    return "\n\n".join(parts)


_HEADS = ["", "TieredMemory, calls/s", "stock, calls/s", "ours / stock", "CPU ms each", "stock", "until absorbed"]
_COMPARED = (
    "Stock is `Memory` over one `SQLAlchemyChatStore` engine with `VectorMemoryBlock` on Qdrant's local mode in a "
    "folder. Both sides have 5 connections, the same messages and the same local embedding model, and run one after "
    "the other. Databases are as each side opens them: on SQLite ours writes ahead (WAL, synchronous=FULL), stock has "
    "SQLite's defaults (a rollback journal, synchronous=FULL). What differs by design: ours embeds every complete turn "
    "in the background, stock only what is flushed, within the put; a context of ours is filled up to its budget with "
    "the best single messages, one of stock holds the 2 best flushed batches. CPU is that of the whole process until "
    "nothing is left to do, so it holds the absorbing; a PostgreSQL server's own is in neither. The last column is the "
    "time until everything was absorbed, as a multiple of the time until the calls had returned."
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


async def _both(directory: Path, uri: str | None, plan: Plan) -> list[Cost]:
    name = f"load-{next(_NUMBERS)}"
    return [await _run(side, name, plan) for side in pair(directory, name, uri, vectors=plan.vectors)]


async def _run(side: Side, name: str, plan: Plan) -> Cost:
    """Fill the sessions, then let all tasks run at once."""
    await side.open()
    memories = [side.memory(f"{name}-{number}", **plan.limits) for number in range(plan.tasks)]
    for memory in memories:
        if plan.size:  # stock fails on an empty list
            await memory.aput_messages([message(number) for number in range(plan.size)])
        await memory.aget()
    await side.settle()
    before, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_times(memory, plan) for memory in memories))
    wall = time.perf_counter() - before
    await side.settle()
    calls = plan.tasks * plan.times * (3 if plan.task is _talk else 1)
    cost = Cost(calls, wall, time.process_time() - cpu, time.perf_counter() - before)
    await side.close()
    return cost


async def _times(memory: Memory, plan: Plan) -> None:
    for number in range(plan.times):
        await plan.task(memory, plan.size + 2 * number)


async def _put(memory: Memory, number: int) -> None:
    await memory.aput(message(number))


async def _talk(memory: Memory, number: int) -> None:
    await memory.aput(message(number))
    await memory.aget(ASKED)
    await memory.aput(message(number + 1))


async def _growth(directory: Path, pictures: Path, *, quick: bool) -> str:
    """Curves over the length of a session, and over the number of tasks, on SQLite."""
    sizes, tasks = ([10, 40], [1, 4]) if quick else ([10, 50, 200, 500, 1000, 2000], [1, 4, 16, 64])
    by_size = [await _both(directory, None, Plan(_put, 1, size, 10, WHOLE)) for size in sizes]
    by_tasks = [await _both(directory, None, Plan(_put, count, 50, 10, WHOLE)) for count in tasks]
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
