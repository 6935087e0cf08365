"""Made: what blocks made of an owner's records, kept until the records change, or brought up to date with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.records import Record
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.parts import PartReader
from llama_index_memory_tiers.storage.schema import Tables

# Things that are kept; one owner has one or two for each block.
_MOST = 32

Key = tuple[str, str, str]
"""Owner, block, and what it is."""
Take = Callable[[Any, Sequence[Record]], Awaitable[Any]]
"""The value so far or `None`, and the records that have changed since, live or not → a new value; pure."""


@dataclass(frozen=True, slots=True)
class _State:
    """How far an owner's records are."""

    epoch: int
    rev: int


_Known = tuple[_State | None, Any]
"""How far the records were, and what was made of them."""


class Made:
    """Keeps what was made for the owners last asked about; a value is never changed, so threads and loops may share it.

    Args:
        database: Where.
        tables: The tables.
        parts: Reads records.
    """

    def __init__(self, database: Database, tables: Tables, parts: PartReader) -> None:
        self._database = database
        self._o = tables.owners
        self._parts = parts
        self._kept: OrderedDict[Key, _Known] = OrderedDict()

    def drop(self, owners: Collection[str]) -> None:
        """Let go of what was made for these owners."""
        for key in [key for key in list(self._kept) if key[0] in owners]:
            self._kept.pop(key, None)

    def count(self, owners: Collection[str]) -> int:
        """How many things are kept of these owners."""
        return sum(key[0] in owners for key in list(self._kept))

    async def remembered(self, key: Key, make: Callable[[], Awaitable[Any]]) -> Any:
        """See `OwnerReader.remembered`."""
        return await self._current(key, lambda _known, _state: make())

    async def followed(self, key: Key, kinds: Sequence[str], take: Take) -> Any:
        """See `OwnerReader.followed`."""

        async def renew(known: _Known | None, state: _State | None) -> Any:
            if known is None or known[0] is None or state is None or known[0].epoch != state.epoch:
                return await take(None, await self._parts.of_kinds(key[0], key[1], kinds))
            return await take(known[1], await self._parts.changed(key[0], key[1], kinds, known[0].rev))

        return await self._current(key, renew)

    async def _current(self, key: Key, renew: Callable[[_Known | None, _State | None], Awaitable[Any]]) -> Any:
        """What is kept if the records are as they were, else what is made of it and of how they are."""
        # Before what is read, so that a change in between is seen the next time.
        state = await self._state(key[0])
        known = self._kept.get(key)
        if known is not None and known[0] == state:
            return self._keep(key, state, known[1])
        return self._keep(key, state, await renew(known, state))

    def _keep(self, key: Key, state: _State | None, value: Any) -> Any:
        self._kept.pop(key, None)  # not moved: another thread may have let it go
        self._kept[key] = (state, value)
        while len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return value

    async def _state(self, owner: str) -> _State | None:
        async def work(connection: AsyncConnection) -> _State | None:
            query = select(self._o.c.epoch, self._o.c.rev).where(self._o.c.owner == owner)
            row = (await connection.execute(query)).first()
            return None if row is None else _State(row.epoch, row.rev)

        return await self._database.read(work)
