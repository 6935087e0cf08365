"""One background thread with an event loop of its own, for calls from synchronous code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from llama_index_memory_tiers.errors import ConfigurationError

T = TypeVar("T")

_logger = logging.getLogger(__name__)
_LAST_SECONDS = 10.0  # for transactions that had begun


class Portal:
    """Runs coroutines to their end for callers without a loop, or with one that is busy (Jupyter).

    Background work that they start goes on in the thread, so that a script's deliveries need no loop of its own.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str = "memory-tiers") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for it.

        Args:
            work: The coroutine.

        Returns:
            Its result.

        Raises:
            ConfigurationError: Called from the thread itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigurationError(
                "A synchronous memory method was called from inside a memory block.",
                allowed="Blocks run on an event loop and use the methods that begin with 'a'.",
                remedy="Await the async method, for example aget() instead of get().",
            )
        return self._submitted(work).result()

    async def here(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread for a caller on any loop, which goes on meanwhile.

        Args:
            work: The coroutine; what it began it must finish even when it is cancelled.

        Returns:
            Its result.
        """
        if self._loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(self._submitted(work))

    def _submitted(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        context = contextvars.copy_context()
        with self._lock:  # so that a loop that has stopped is given nothing more
            if self._loop is None or self._thread is None or not self._thread.is_alive():  # as after a fork
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(_within(context, work), self._loop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run a loop until a task stops it by raising what no loop survives; then nobody is left waiting for it."""
        try:
            loop.run_forever()
        except BaseException as error:  # noqa: BLE001  # whoever awaits that task is told by the task
            _logger.critical("the thread of synchronous calls stopped (%s)", type(error).__name__)
        with self._lock:
            if self._loop is loop:
                self._loop = None
        last = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < last:
            with contextlib.suppress(BaseException):  # those that await the task that stopped it raise the same
                loop.run_until_complete(asyncio.sleep(0))
                tasks = asyncio.all_tasks(loop)
                if not tasks:
                    break
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(tasks, timeout=1))
        loop.close()


async def _within(context: contextvars.Context, work: Coroutine[Any, Any, T]) -> T:
    """Carry the caller's context variables along: tracing, instrumentation tags."""
    return await context.run(asyncio.ensure_future, work)


portal = Portal("memory-tiers")
"""For synchronous callers, and what their calls begin in the background."""
writer = Portal("memory-tiers-writer")
"""For transactions alone: nothing in it waits for a model or for a caller."""
