"""Engines, one per event loop, and transactions that retry, finish once begun, and commit as one."""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import ContextVar
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.errors import (
    ConfigurationError,
    StorageClosedError,
    StorageError,
    StorageUnavailableError,
)
from llama_index_memory_tiers.portal import writer
from llama_index_memory_tiers.storage import sqlite
from llama_index_memory_tiers.storage.addresses import Address
from llama_index_memory_tiers.storage.faults import as_storage_error, passing

_logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]

CHECKPOINT_MILLISECONDS = 2000  # a reader is waited for so long before its pages stay
MAX_TRIES = 10
LONGEST_WAIT_SECONDS = 60.0  # SQLite alone waits for half of it before it says that the file is locked
_TOLD_AFTER_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 1.0
# What opening itself reads and writes, on whatever loop, does not wait for the opening.
_being_opened: ContextVar[Database | None] = ContextVar("_being_opened", default=None)


class _Unstoppable(asyncio.Task[T]):
    """A task that a closing loop waits for instead of cancelling.

    A statement cancelled half way leaves aiosqlite's connection with the write lock (reproduced); a transaction
    lasts milliseconds and its retries are bounded, so it is better to let it end.
    """

    def cancel(self, msg: Any | None = None) -> bool:  # noqa: ARG002
        return False


class Database:
    """Runs work on connections: one engine per event loop, whole transactions, retries on passing faults.

    Args:
        address: Where the database is.
        engine: The user's own engine instead; it is shared, never closed, and left as it is. Other than SQLite's it
            serves one loop.
        pool_size: Connections per loop that are kept open.
    """

    def __init__(self, address: Address, *, engine: AsyncEngine | None = None, pool_size: int = 5) -> None:
        self.address = address
        self.dialect = address.url.get_backend_name()
        self.sqlite = self.dialect == "sqlite"
        self._given = engine
        self._pool_size = pool_size
        # Not weak: connections that vanish with their loop could not be closed any more.
        self._engines: dict[asyncio.AbstractEventLoop, AsyncEngine] = {}
        self._drivers: dict[asyncio.AbstractEventLoop, weakref.WeakSet[Any]] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._opening: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._running: set[asyncio.Task[Any]] = set()
        self._opened = False
        self.on_open: Callable[[], Awaitable[None]] | None = None
        self.after_open: Callable[[], Awaitable[None]] | None = None
        self.closed = False
        self.statements = 0

    async def read(self, work: Work[T], *, opening: bool = False) -> T:
        """Run reading work on a borrowed connection.

        Args:
            work: Gets the connection; a read of several statements sees each at its own time.
            opening: Look before anything is made: `on_open` does not run.

        Returns:
            What the work returned.

        Raises:
            StorageUnavailableError: The database did not answer after all retries.
        """
        if not opening:
            await self._open()
        return await self._finish(self._retrying(self._reading, work))

    async def write(self, work: Work[T], *, opening: bool = False) -> T:
        """Run work as one transaction; on passing faults roll back and run the whole again.

        Once begun it runs to its end even when the caller is cancelled.

        Args:
            work: Gets the connection; must be repeatable with fresh reads.
            opening: The work belongs to `on_open` itself.

        Returns:
            What the work returned in the try that was committed.

        Raises:
            StorageUnavailableError: The database did not answer after all retries.
        """
        if self._given is not None:
            return await self._write(work, opening=opening)
        # In the thread: a loop that its caller blocks, as a synchronous call in a notebook does, would hold the
        # database's lock in the middle of a transaction.
        return await writer.here(self._write(work, opening=opening))

    async def _write(self, work: Work[T], *, opening: bool) -> T:
        if not opening:
            await self._open()
        return await self._finish(self._retrying(self._writing, work))

    async def warm(self) -> None:
        """Run `on_open` and open a connection on this loop, so that the first read need not."""
        await self._open()
        if asyncio.get_running_loop() in self._engines:
            return

        async def work(connection: AsyncConnection) -> None:
            await connection.exec_driver_sql("SELECT 1")

        await self.read(work)

    async def empty_write_ahead_log(self) -> bool:
        """Empty what SQLite keeps beside the file, in which old pages stand; false when a reader is in the way."""
        if not self.sqlite:
            return True

        async def work(connection: AsyncConnection) -> bool:
            waited = (await connection.exec_driver_sql("PRAGMA busy_timeout")).scalar_one()
            await connection.exec_driver_sql(f"PRAGMA busy_timeout={CHECKPOINT_MILLISECONDS}")
            try:
                row = (await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")).one()
            finally:
                await connection.exec_driver_sql(f"PRAGMA busy_timeout={waited}")
            return not row[0]

        try:
            return await self.read(work)
        except StorageError:
            return False

    async def _open(self) -> None:
        """Run `on_open` and `after_open` before the first work; a loop does so once, and for its first uses alone."""
        if self._opened or self.on_open is None or _being_opened.get() is self:
            return
        async with self._opening.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if not self._opened:
                await self._open_now(self.on_open)

    async def _open_now(self, on_open: Callable[[], Awaitable[None]]) -> None:
        mine = _being_opened.set(self)
        try:
            await on_open()
            if self.after_open is not None:
                await self.after_open()
        finally:
            _being_opened.reset(mine)
        self._opened = True

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        if self.closed:
            work.close()
            raise _closed()
        task: asyncio.Task[T] = _Unstoppable(work, loop=asyncio.get_running_loop())
        self._running.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that was cancelled is not there to read it

    async def _retrying(self, once: Callable[[Work[T]], Awaitable[T]], work: Work[T]) -> T:
        last: BaseException | None = None
        began, tries = monotonic(), 0
        for attempt in range(MAX_TRIES):
            waited = monotonic() - began
            if waited > LONGEST_WAIT_SECONDS:
                break
            if attempt:
                ceiling = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)
                await asyncio.sleep(random.uniform(0, ceiling))  # noqa: S311  # jitter, not a secret
            try:
                return await once(work)
            except IntegrityError:
                raise  # the caller knows what a duplicate means
            except (DBAPIError, OSError) as error:
                if not passing(error, server=not self.sqlite):
                    raise as_storage_error(error) from getattr(error, "orig", None)
                last = getattr(error, "orig", None) or error
                tries += 1
                if monotonic() - began > _TOLD_AFTER_SECONDS:
                    _logger.warning("waiting for the database (%s)", _what(last))
        raise StorageUnavailableError(
            f"{self.address.place} did not answer ({_what(last)}) in {tries} tries, {monotonic() - began:.0f} s.",
            allowed="It must be reachable and not locked by others for long.",
            remedy="Close what has the file open for writing, such as a database browser; then repeat the call: a put "
            "is safe to repeat with the same uid."
            if self.sqlite
            else "Check that it runs there, then repeat the call: a put is safe to repeat with the same uid.",
        ) from last

    async def _reading(self, work: Work[T]) -> T:
        async with (await self._engine()).connect() as connection:
            if not self.sqlite:
                # BEGIN and ROLLBACK would each be a round trip, and READ COMMITTED gives a read nothing for them.
                await connection.execution_options(isolation_level="AUTOCOMMIT")
            return await work(connection)

    async def _writing(self, work: Work[T]) -> T:
        if not self.sqlite:
            async with (await self._engine()).begin() as connection:
                failpoints.reach("transaction.begun")
                result = await work(connection)
            failpoints.reach("transaction.committed")
            return result
        # One writer of this loop at a time, held only from BEGIN to COMMIT: 166 → 329 puts/s, and no waiter
        # comes near the busy timeout.
        engine = await self._engine()
        async with self._lock(), engine.connect() as connection:
            await connection.exec_driver_sql(sqlite.BEGIN)
            try:
                failpoints.reach("transaction.begun")
                result = await work(connection)
                await connection.exec_driver_sql("COMMIT")
            except BaseException:
                # exec_driver_sql: with AUTOCOMMIT SQLAlchemy's own rollback may be a no-op
                await _quietly(connection.exec_driver_sql(sqlite.ROLLBACK))
                raise
        failpoints.reach("transaction.committed")
        return result

    def _lock(self) -> asyncio.Lock:
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    async def _engine(self) -> AsyncEngine:
        loop = asyncio.get_running_loop()
        engine = self._engines.get(loop)
        if engine is None:
            if self.closed:
                raise _closed()  # a retry of what another loop's aclose cut off
            self._drop_dead_loops()
            engine = self._engines[loop] = self._adopt() if self._given is not None else self._create()
            event.listen(engine.sync_engine, "before_cursor_execute", self._count)
            if loop in self._drivers:
                # A loop that ends finalises its generators after its tasks, while connections can still be closed.
                self._keepers[loop] = keeper = self._kept(loop, engine)
                await anext(keeper)
        return engine

    async def _kept(self, loop: asyncio.AbstractEventLoop, engine: AsyncEngine) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if self._engines.get(loop) is engine:
                del self._engines[loop], self._drivers[loop]
            self._keepers.pop(loop, None)
            await engine.dispose()

    def _count(self, *_: Any) -> None:
        self.statements += 1

    def _adopt(self) -> AsyncEngine:
        assert self._given is not None  # noqa: S101  # for the type checker
        if self._engines and not self.sqlite:
            # A sibling made from its address would lack the user's connect_args, such as certificates.
            raise ConfigurationError(
                "A storage with engine= was used from a second event loop.",
                allowed="The connections of an asyncpg engine belong to the event loop that opened them.",
                remedy="Use it from that loop alone, without synchronous methods; or pass address= instead of engine=.",
            )
        return self._given.execution_options(isolation_level="AUTOCOMMIT" if self.sqlite else "READ COMMITTED")

    def _create(self) -> AsyncEngine:
        options: dict[str, Any] = {"hide_parameters": True, "pool_size": self._pool_size, "max_overflow": 0}
        if self.sqlite:
            options |= {"isolation_level": "AUTOCOMMIT", "connect_args": {"timeout": sqlite.BUSY_TIMEOUT_SECONDS}}
            options["skip_autocommit_rollback"] = True  # a trip to the connection's thread less per operation
        engine = create_async_engine(self.address.url, **options)
        drivers = self._drivers[asyncio.get_running_loop()] = weakref.WeakSet()
        if self.sqlite:
            event.listen(engine.sync_engine, "connect", sqlite.prepare)
            event.listen(engine.sync_engine, "connect", lambda connection, _: drivers.add(connection.driver_connection))
        return engine

    def _drop_dead_loops(self) -> None:
        for loop in list(self._engines):
            if loop.is_closed():
                self._leave(loop)

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close from outside what another loop opened: its connections cannot be awaited here."""
        engine, drivers = self._engines.pop(loop, None), self._drivers.pop(loop, None)
        self._keepers.pop(loop, None)
        if engine is None or drivers is None:
            return  # another thread was faster, or it is the user's own engine
        if not loop.is_closed():
            # It may be in the middle of a statement, and a stopped connection never answers.
            loop.call_soon_threadsafe(lambda: _Unstoppable(self._dispose(loop, engine), loop=loop))
            return
        engine.sync_engine.dispose(close=False)
        sqlite.stop(list(drivers))

    async def _dispose(self, loop: asyncio.AbstractEventLoop, engine: AsyncEngine) -> None:
        await self._settle(loop)
        await engine.dispose()

    async def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        mine = [task for task in list(self._running) if task.get_loop() is loop]
        await asyncio.gather(*mine, return_exceptions=True)

    async def _close_here(self) -> None:
        here = asyncio.get_running_loop()
        await self._settle(here)
        keeper = self._keepers.pop(here, None)
        if keeper is not None:
            await keeper.aclose()
        self._engines.pop(here, None)

    async def aclose(self) -> None:
        """Wait for running transactions of this loop and close what this object opened, on other loops as well."""
        self.closed = True
        await writer.here(self._close_here())
        await self._close_here()
        for loop in list(self._engines):
            self._leave(loop)
        if self.address.private is not None:
            self.address.private.cleanup()


def _what(error: BaseException | None) -> str:
    """A fault in a word: its kind, and that the file is locked, which the kind does not say."""
    return "database is locked" if "is locked" in str(error) else type(error).__name__


def _closed() -> StorageClosedError:
    return StorageClosedError(
        "This storage is closed.",
        allowed="A storage is used between its creation and aclose().",
        remedy="Make a new TieredMemory, or a new Storage, with the same address.",
    )


async def _quietly(undo: Awaitable[Any]) -> None:
    try:
        await undo
    except (DBAPIError, OSError):
        return
