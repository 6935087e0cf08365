"""Small helpers to time coroutines."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable
from statistics import median

from llama_index.core.llms import ChatMessage


async def timed(work: Callable[[], Awaitable[object]], times: int) -> tuple[float, float]:
    """Run a coroutine function several times.

    Args:
        work: What to run.
        times: How often.

    Returns:
        Median wall time and mean CPU time of one run, in milliseconds.
    """
    walls = []
    gc.collect()  # what was measured before leaves nothing to pay for
    cpu = time.process_time()
    for _ in range(times):
        start = time.perf_counter()
        await work()
        walls.append(time.perf_counter() - start)
    return median(walls) * 1e3, (time.process_time() - cpu) / times * 1e3


def message(number: int) -> ChatMessage:
    """A chat message of about 30 tokens."""
    role = "user" if number % 2 == 0 else "assistant"
    words = "we talked about the garden, the dog and the plans for the long weekend by the lake"
    return ChatMessage(role=role, content=f"Message {number}: {words}, place {number * 7919 % 1000}.")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]]
    return "\n".join(lines)
