"""Packed owner indexes: what a cold start reads instead of thousands of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import and_, bindparam, delete, func, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.errors import StorageError
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.schema import Tables, owner_touch

_logger = logging.getLogger(__name__)

# One part per transaction: a writer of 4 MiB holds SQLite's lock for about 20 ms.
PART_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Pack:
    """An owner's index as of a revision.

    Args:
        epoch: The owner's epoch; of another one a pack is worthless.
        rev: Everything up to this revision is in it, nothing after.
        body: From `OwnerIndex.packed`.
    """

    epoch: int
    rev: int
    body: bytes


class PackStore:
    """Statements over packs: a projection of records that may be missing, old or damaged at any time.

    Args:
        database: Where.
        tables: The tables.
        ids: Makes a name for each pack.
    """

    def __init__(self, database: Database, tables: Tables, *, ids: Callable[[], str]) -> None:
        self._database = database
        self._p = p = tables.packs
        self._o = tables.owners
        self._ids = ids
        mine = and_(p.c.owner == bindparam("owner"), p.c.model == bindparam("model"))
        whole = (
            select(p.c.pack)
            .where(mine)
            .group_by(p.c.pack, p.c.rev, p.c.parts)
            .having(func.count() == p.c.parts)
            .order_by(p.c.rev.desc())
            .limit(1)
        )
        self._newest = (
            select(p.c.epoch, p.c.rev, p.c.body).where(p.c.pack == whole.scalar_subquery()).order_by(p.c.part)
        )

    async def read(self, owner: str, model: str) -> Pack | None:
        """The newest whole pack.

        Args:
            owner: Whose.
            model: Name of the embedding model, or ''.

        Returns:
            The pack, or `None`.
        """

        async def work(connection: AsyncConnection) -> list[Any]:
            return list((await connection.execute(self._newest, {"owner": owner, "model": model})).all())

        rows = await self._database.read(work)
        return Pack(rows[0].epoch, rows[0].rev, b"".join(row.body for row in rows)) if rows else None

    async def write(self, owner: str, model: str, pack: Pack) -> bool:
        """Keep a pack and drop the older ones.

        Args:
            owner: Whose.
            model: Name of the embedding model, or ''.
            pack: What.

        Returns:
            Whether it is kept: not when the owner was forgotten meanwhile, and not when the database refuses, as
            with one that is read-only.
        """
        name, body = self._ids(), pack.body
        starts = range(0, len(body), PART_BYTES)
        about = {"pack": name, "parts": len(starts), "owner": owner, "model": model}
        about_time = {"epoch": pack.epoch, "rev": pack.rev}
        try:
            for part, start in enumerate(starts):
                row = {**about, **about_time, "part": part, "body": body[start : start + PART_BYTES]}
                if not await self._database.write(partial(self._put, row=row)):
                    return False
        except StorageError as error:
            _logger.warning("pack not kept", extra={"error": type(error).__name__})
            return False
        return True

    async def _put(self, connection: AsyncConnection, row: dict[str, Any]) -> bool:
        """Write a part if the owner still has that epoch; with the last one the older packs go."""
        p, o = self._p, self._o
        # Locked, so that a deletion comes either before, and is seen, or after, and takes this part along.
        epoch = (
            await connection.execute(select(o.c.epoch).where(o.c.owner == row["owner"]).with_for_update())
        ).scalar()
        if epoch != row["epoch"]:
            return False
        await connection.execute(insert(p).values(row))
        if row["part"] == row["parts"] - 1:
            mine = and_(p.c.owner == row["owner"], p.c.model == row["model"], p.c.pack != row["pack"])
            await connection.execute(delete(p).where(mine, or_(p.c.rev <= row["rev"], p.c.epoch != epoch)))
        return True


async def raise_epoch(connection: AsyncConnection, tables: Tables, owner: str) -> int:
    """Void what is prepared and remembered of an owner; packs go along, as they hold words and vectors.

    Args:
        connection: In a transaction; the owner's row is locked from here on.
        tables: The tables.
        owner: Whose.

    Returns:
        The new revision.
    """
    row = (await connection.execute(owner_touch(tables), {"owner": owner, "raise_epoch": 1})).one()
    await connection.execute(delete(tables.packs).where(tables.packs.c.owner == owner))
    return int(row.rev)
