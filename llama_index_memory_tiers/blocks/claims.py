"""The right of one worker to move one cursor: taken, kept alive while it works, given back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from llama_index_memory_tiers.errors import StorageError
from llama_index_memory_tiers.storage import Storage

_SECOND = 1_000_000


class Claim:
    """One attempt at what comes next for one consumer in one session.

    Args:
        storage: Where the cursor is.
        sid: Private row of the session.
        key: Of the consumer.
        seconds: For how long it holds: a dead worker keeps others waiting so long, a living one renews.
    """

    def __init__(self, storage: Storage, sid: int, key: str, *, seconds: float) -> None:
        self._cursors = storage.cursors
        self._now = storage.now
        self._me = storage.ids()
        self._sid = sid
        self._key = key
        self._seconds = seconds

    def _until(self) -> int:
        return self._now() + int(self._seconds * _SECOND)

    async def take(self) -> int | None:
        """Reserve what comes next.

        Returns:
            The position to read from, or `None` when another worker holds the claim.
        """
        claiming = asyncio.ensure_future(
            self._cursors.claim(self._sid, self._key, self._me, now=self._now(), until=self._until())
        )
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # It is committed all the same; left alone it would keep others waiting until it expires.
            await claiming
            await self.release()
            raise

    async def release(self, *, error: str | None = None, counts: bool = True) -> None:
        """Give it back without having moved the cursor.

        Args:
            error: Kind of the failure; `None` when there was nothing to do.
            counts: Whether the failure counts against what comes next; an outage does not.
        """
        await self._cursors.release(self._sid, self._key, self._me, error=error, counts=counts)

    async def fence(self, connection: Any, lo: int, hi: int) -> bool:
        """Move the cursor in a transaction that writes what was absorbed; see `CursorStore.fence`."""
        return await self._cursors.fence(connection, self._sid, self._key, self._me, lo, hi)

    async def advance(self, lo: int, hi: int) -> bool:
        """Move the cursor where nothing else is written; false when another worker has taken over."""
        return await self._cursors.advance(self._sid, self._key, self._me, lo, hi)

    async def park(self, lo: int, hi: int, *, error: str) -> bool:
        """Put a range aside as a dead letter and go on behind it; false when another worker has taken over."""
        return await self._cursors.park(self._sid, self._key, self._me, lo=lo, hi=hi, error=error, now=self._now())

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Renew it while what it is for takes its time."""
        renewing = asyncio.get_running_loop().create_task(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            # Not `await renewing`: that would take a cancellation of this task for the one of that task.
            await asyncio.wait([renewing])

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 3)
            # The next one may succeed; if none does, the fence sees to it.
            with contextlib.suppress(StorageError):
                await self._cursors.renew(self._sid, self._key, self._me, until=self._until())
