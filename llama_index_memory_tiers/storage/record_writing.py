"""What a merge decided, as rows: records, what they come from, and what they are found by."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.moments import to_microseconds
from llama_index_memory_tiers.records import (
    Changes,
    NewRecord,
    Place,
)
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.index import (
    encode_terms,
    encode_vector,
)
from llama_index_memory_tiers.storage.owner_keys import agent_key
from llama_index_memory_tiers.storage.parts import SHARED
from llama_index_memory_tiers.storage.record_rows import owned, places_of
from llama_index_memory_tiers.storage.rows import chunks
from llama_index_memory_tiers.storage.schema import Tables


class RecordWriter:
    """Statements that are part of a transaction which has locked the owner's row.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self._r = tables.records

    async def sources(self, connection: AsyncConnection, ids: Sequence[int]) -> dict[int, tuple[Place, ...]]:
        """Where records come from, by their rows."""
        return await places_of(connection, self._t.sources, ids)

    async def write(
        self, connection: AsyncConnection, owner: str, block: str, rev: int, changes: Changes, *, now: int
    ) -> None:
        """Write what changed.

        Args:
            connection: In the transaction.
            owner: Whose; records of others are left alone.
            block: Key of the block that new records belong to.
            rev: The owner's new revision.
            changes: What `merge` returned.
            now: Clock, microseconds since 1970.
        """
        r = self._r
        if changes.add:  # first, as what is new may be superseded or put aside at once
            await self._add(connection, owner, block, rev, changes.add, now)
        for old, new in changes.supersede.items():
            await connection.execute(
                update(r).where(r.c.uid == old, r.c.owner == owner).values(superseded_by=new, rev=rev)
            )
        for ids, archived_at in ((changes.archive, now), (changes.restore, None)):
            for part in chunks(ids):
                await connection.execute(
                    update(r).where(r.c.uid.in_(part), owned(r, owner)).values(archived_at=archived_at, rev=rev)
                )
        for record in changes.revise:
            await self._revise(connection, owner, record, rev)
        for uid, amendment in changes.amend.items():
            amended = {
                "data": codec.to_json(dict(amendment.data)),
                "expires_at": _microseconds(amendment.expires_at),
                "rev": rev,
            }
            await connection.execute(update(r).where(r.c.uid == uid, r.c.owner == owner).values(amended))
        grants = [
            _row_of(_grant(uid), agent_key(agent), block, rev, now)
            for agent, ids in changes.share.items()
            for uid in ids
        ]
        if grants:
            await connection.execute(insert(r), grants)

    async def _revise(self, connection: AsyncConnection, owner: str, record: NewRecord, rev: int) -> None:
        r, t = self._r, self._t
        values = _contents(record) | {"kind": record.kind, "rev": rev}
        revised = update(r).where(r.c.uid == record.id, r.c.owner == owner).values(values).returning(r.c.id)
        number = (await connection.execute(revised)).scalar()
        if number is None:
            return  # forgotten meanwhile
        known = (await self.sources(connection, [number])).get(number, ())
        for table in (t.embeddings, t.terms):
            await connection.execute(delete(table).where(table.c.record_id == number))
        await self._project(connection, [(number, record)], skip=frozenset(known))

    async def _add(
        self,
        connection: AsyncConnection,
        owner: str,
        block: str,
        rev: int,
        records: Sequence[NewRecord],
        now: int,
    ) -> None:
        await connection.execute(insert(self._r), [_row_of(record, owner, block, rev, now) for record in records])
        found = await connection.execute(
            select(self._r.c.uid, self._r.c.id).where(self._r.c.owner == owner, self._r.c.rev == rev)
        )
        ids = {row.uid: row.id for row in found}
        await self._project(connection, [(ids[record.id], record) for record in records])

    async def _project(
        self,
        connection: AsyncConnection,
        records: Sequence[tuple[int, NewRecord]],
        skip: frozenset[Place] = frozenset(),
    ) -> None:
        """Write what records come from and what they are found by."""
        t = self._t
        sources = [
            {"record_id": number, "sid": sid, "seq": seq}
            for number, record in records
            for sid, seq in dict.fromkeys(record.sources)
            if (sid, seq) not in skip
        ]
        vectors = [
            {"record_id": number, "model": record.model, "vec": encode_vector(record.vector)}
            for number, record in records
            if record.vector is not None
        ]
        terms = []
        for number, record in records:
            if record.terms:
                hashes, counts = encode_terms(record.terms)
                terms.append({"record_id": number, "ids": hashes, "counts": counts})
        for table, rows in ((t.sources, sources), (t.embeddings, vectors), (t.terms, terms)):
            if rows:
                await connection.execute(insert(table), rows)


def _grant(uid: str) -> NewRecord:
    """What lets an agent tell a record: a part of it without a word, so that it is forgotten with it."""
    return NewRecord(str(uuid.uuid5(uuid.NAMESPACE_OID, f"{uid}/shared")), SHARED, parent=uid)


def _row_of(record: NewRecord, owner: str, block: str, rev: int, now: int) -> dict[str, Any]:
    place: Place | tuple[None, None] = record.sources[0] if record.kind == "message" else (None, None)
    return _contents(record) | {
        "uid": record.id,
        "owner": owner,
        "rev": rev,
        "kind": record.kind,
        "block": block,
        "created_at": now,
        "sid": place[0],
        "seq": place[1],
    }


def _contents(record: NewRecord) -> dict[str, Any]:
    return {
        "text": codec.storable(record.text),
        "data": codec.to_json(dict(record.data)),
        "said_at": _microseconds(record.said_at),
        "expires_at": _microseconds(record.expires_at),
        "speaker": codec.storable(record.speaker),
        "tokens": record.tokens,
        "parent": record.parent,
    }


def _microseconds(time: datetime | None) -> int | None:
    return None if time is None else to_microseconds(time)
