"""Connections to SQLite: how they are set, how often their thread is asked, and how they are closed from outside."""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import aiosqlite
from typing_extensions import Self

BUSY_TIMEOUT_SECONDS = 30
BEGIN = "BEGIN IMMEDIATE"
ROLLBACK = "ROLLBACK"


def prepare(connection: Any, _: Any) -> None:
    """Set a new connection of SQLAlchemy's pool.

    Args:
        connection: As SQLAlchemy's `connect` event passes it.
    """
    waiting: list[str] = []
    driver: Any = weakref.ref(connection.driver_connection)  # its cursors shall not keep it
    connection.driver_connection.cursor = lambda: OneTripCursor(driver(), waiting)
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA secure_delete=ON")  # what is forgotten is overwritten in the file as well
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_SECONDS * 1000}")
    cursor.close()


class OneTripCursor:
    """A cursor that asks the connection's thread once a statement, and answers the rest from what it brought.

    SQLAlchemy opens a cursor, executes, fetches and closes: with aiosqlite's own cursor these are four trips, which
    cost more than most statements. A transaction begins on the trip of its first statement, and so holds the lock for
    a shorter time.

    Args:
        connection: Of aiosqlite.
        waiting: What is to be executed before the connection's next statement; shared by its cursors.
    """

    arraysize = 1

    def __init__(self, connection: aiosqlite.Connection, waiting: list[str]) -> None:
        self._connection = connection
        self._waiting = waiting
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None
        self._rows: list[Any] = []

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Self:
        """Execute a statement and fetch all of its rows."""
        if sql == BEGIN:
            self._waiting[:] = [sql]
            return self
        if sql == ROLLBACK:
            self._waiting.clear()
        return await self._ask(sqlite3.Connection.execute, sql, parameters)

    async def executemany(self, sql: str, parameters: Iterable[Sequence[Any]]) -> Self:
        """Execute a statement once for each of these."""
        return await self._ask(sqlite3.Connection.executemany, sql, parameters)

    async def _ask(self, *asked: Any) -> Self:
        # Its own cursor takes the same way to the thread; there is no public one.
        ask: Any = self._connection._execute  # noqa: SLF001
        answer = await ask(_answer, self._connection._conn, self._waiting, *asked)  # noqa: SLF001
        self.description, self.rowcount, self.lastrowid, self._rows = answer
        return self

    async def fetchall(self) -> list[Any]:
        """The rows of the statement."""
        return self._rows

    async def close(self) -> None:
        """Nothing is open: the cursor of SQLite ended with its statement."""

    async def __aenter__(self) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()  # SQLAlchemy before 2.0.44 awaits a cursor


def _answer(
    connection: sqlite3.Connection, waiting: list[str], ask: Any, sql: str, parameters: Any
) -> tuple[Any, int, int | None, Any]:
    if waiting:
        connection.execute(waiting[0])  # while the lock is refused nothing else is executed
        waiting.clear()
    cursor = ask(connection, sql, parameters)
    rows = cursor.fetchall() if cursor.description else []
    return cursor.description, cursor.rowcount, cursor.lastrowid, rows


def stop(drivers: Sequence[Any]) -> None:
    """Close connections whose loop is gone; each does it in its own thread, after what it was asked before.

    Args:
        drivers: Of aiosqlite.
    """
    stops = [driver.stop for driver in drivers if hasattr(driver, "stop")]  # aiosqlite from 0.22
    if stops:
        # In a thread without a loop, as each would report to the loop of its caller.
        helper = threading.Thread(target=lambda: [stop() for stop in stops], daemon=True)
        helper.start()
        helper.join()
