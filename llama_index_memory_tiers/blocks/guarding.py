"""How code of others is awaited: within its time, and so that whatever it raises is an error like others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from llama_index_memory_tiers.errors import ExtractionError

T = TypeVar("T")


async def contained(work: Awaitable[T]) -> T:
    """Await a block's code; what would end the event loop, such as `SystemExit`, is raised as an error instead.

    A task that raises `SystemExit` stops the loop it runs on, and with it everybody else's work.

    Args:
        work: What to await.

    Returns:
        Its result.

    Raises:
        ExtractionError: It raised what is neither an error, nor a cancellation, nor a user's Ctrl-C.
    """
    try:
        return await work
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ExtractionError(
            f"A block raised {type(error).__name__}.",
            allowed="A block raises exceptions, and does not end the process it runs in.",
            remedy="Look for what raises it in the block, or in the library that it calls.",
        ) from error


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Await a block's code for so long; code that swallows its cancellation is left behind, not waited for.

    Args:
        seconds: For how long.
        work: What to await; see `contained`.

    Returns:
        Its result.

    Raises:
        TimeoutError: Of `asyncio`: it took longer.
    """
    task = asyncio.ensure_future(contained(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _leave(task)
        raise
    if not done:
        _leave(task)
        raise asyncio.TimeoutError
    return task.result()


def _leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else reads it
