"""Small helpers to time coroutines."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from statistics import median
from typing import NamedTuple

from llama_index.core.llms import ChatMessage

Work = Callable[[], Awaitable[object]]
Begin = Callable[[], Awaitable[Work]]


class Cost(NamedTuple):
    """What one run costs.

    Args:
        wall: Median milliseconds by the clock.
        cpu: Mean milliseconds of processor time.
    """

    wall: float
    cpu: float


async def in_turn(works: Mapping[str, Work], times: int, rounds: int) -> dict[str, list[Cost]]:
    """Time several works in turn, so that a machine that is slow for a while is slow for all of them.

    Args:
        works: What to run, by name.
        times: Runs of each in each round.
        rounds: Rounds.

    Returns:
        Costs by name, one per round.
    """

    async def ready(work: Work) -> Work:
        return work

    return await in_fresh_turns({name: partial(ready, work) for name, work in works.items()}, times, rounds)


async def in_fresh_turns(begins: Mapping[str, Begin], times: int, rounds: int) -> dict[str, list[Cost]]:
    """Time several works in turn, each made anew for each round before the clock starts.

    Args:
        begins: What makes the work of a round, by name.
        times: Runs of each in each round.
        rounds: Rounds.

    Returns:
        Costs by name, one per round.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in begins}
    for _ in range(rounds):
        for name, begin in begins.items():
            costs[name].append(await timed(await begin(), times))
    return costs


def usual(costs: list[Cost]) -> Cost:
    """The median of the rounds."""
    return Cost(median(cost.wall for cost in costs), median(cost.cpu for cost in costs))


def ratio(dear: list[Cost], cheap: list[Cost]) -> Cost:
    """How many times the one costs the other: the median of what each round says."""
    pairs = list(zip(dear, cheap, strict=True))
    return Cost(
        median(one.wall / other.wall for one, other in pairs), median(one.cpu / other.cpu for one, other in pairs)
    )


async def timed(work: Work, times: int) -> Cost:
    """Run a coroutine function several times.

    Args:
        work: What to run.
        times: How often.

    Returns:
        The cost of one run.
    """
    walls = []
    gc.collect()  # what was measured before leaves nothing to pay for
    cpu = time.process_time()
    for _ in range(times):
        start = time.perf_counter()
        await work()
        walls.append(time.perf_counter() - start)
    return Cost(median(walls) * 1e3, (time.process_time() - cpu) / times * 1e3)


def message(number: int) -> ChatMessage:
    """A chat message of about 30 tokens."""
    role = "user" if number % 2 == 0 else "assistant"
    words = "we talked about the garden, the dog and the plans for the long weekend by the lake"
    return ChatMessage(role=role, content=f"Message {number}: {words}, place {number * 7919 % 1000}.")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]]
    return "\n".join(lines)
