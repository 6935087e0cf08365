"""The statements of a transaction that forgets: records with all they are found by, and cursors moved back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import and_, delete, exists, func, insert, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.records import Forgotten, Place
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.packs import raise_epoch
from llama_index_memory_tiers.storage.rows import GONE, chunks
from llama_index_memory_tiers.storage.schema import Tables


@dataclass(slots=True)
class Rewind:
    """What a block has to read again.

    Args:
        owner: Whose records.
        block: Key of the block.
        positions: Private row of a session → where its cursor goes back to.
        records: Rows that go as well, as what is read again makes them again.
    """

    owner: str
    block: str
    positions: dict[int, int] = field(default_factory=dict)
    records: dict[int, Any] = field(default_factory=dict)


class Eraser:
    """Deletes rows on a connection in a transaction; knows nothing of what was asked for.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self._r = r = tables.records
        self._projections = {
            "sources": tables.sources,
            "embeddings": tables.embeddings,
            "terms": tables.terms,
            "visits": tables.visits,
        }
        self.columns = (r.c.id, r.c.uid, r.c.owner, r.c.block, r.c.superseded_by)

    async def derived(
        self, connection: AsyncConnection, sid: int, seqs: Sequence[int], *, kinds: Sequence[str] = ()
    ) -> dict[int, Any]:
        """Records that came from any of these messages, by row; of every owner, of all kinds or only some."""
        s = self._t.sources
        found: dict[int, Any] = {}
        for part in chunks(seqs):
            query = (
                select(*self.columns).distinct().join(s, s.c.record_id == self._r.c.id)
                .where(s.c.sid == sid, s.c.seq.in_(part), self._r.c.kind.in_(kinds) if kinds else true())
            )  # fmt: skip
            found |= {row.id: row for row in await connection.execute(query)}
        return found

    async def parts_of(self, connection: AsyncConnection, rows: Iterable[Any]) -> dict[int, Any]:
        """Records that are parts of these, such as the pages of a segment, by row: nothing would find them alone."""
        found: dict[int, Any] = {}
        for part in chunks([row.uid for row in rows]):
            query = select(*self.columns).where(self._r.c.parent.in_(part))
            found |= {row.id: row for row in await connection.execute(query)}
        return found

    async def touch(self, connection: AsyncConnection, owners: Iterable[str]) -> dict[str, int]:
        """Raise the epoch of owners in the one order that all transactions lock them in; their packs go.

        Returns:
            The new revision of each.
        """
        return {owner: await raise_epoch(connection, self._t, owner) for owner in sorted(set(owners))}

    async def void_claims(self, connection: AsyncConnection, sid: int) -> None:
        """Take every worker's claim on a session away: what it prepares now cannot be merged."""
        c = self._t.cursors
        await connection.execute(update(c).where(c.c.sid == sid).values(claim=None, claim_until=0))

    async def delete(
        self, connection: AsyncConnection, rows: Collection[Any], revisions: dict[str, int]
    ) -> dict[str, int]:
        """Delete records with all that belongs to them; what one of them had replaced is current again.

        Args:
            connection: In a transaction.
            rows: Records, with `columns`.
            revisions: The new revision of each owner.

        Returns:
            How many rows of each kind there were.
        """
        done = dict.fromkeys(("records", *self._projections), 0)
        replaced = {row.uid: row.superseded_by for row in rows}
        for part in chunks(list(rows)):
            await self._relink(connection, part, replaced, revisions)
            ids = [row.id for row in part]
            for name, table in self._projections.items():
                gone = await connection.execute(delete(table).where(table.c.record_id.in_(ids)))
                done[name] += gone.rowcount
            done["records"] += (await connection.execute(delete(self._r).where(self._r.c.id.in_(ids)))).rowcount
        return done

    async def _relink(
        self,
        connection: AsyncConnection,
        rows: Sequence[Any],
        replaced: dict[str, str | None],
        revisions: dict[str, int],
    ) -> None:
        r = self._r
        query = select(r.c.superseded_by).distinct().where(r.c.superseded_by.in_([row.uid for row in rows]))
        pointed_at = set((await connection.execute(query)).scalars())
        for row in rows:
            if row.uid not in pointed_at:
                continue
            seen, heir = {row.uid}, row.superseded_by
            while heir in replaced and heir not in seen:  # it goes as well
                seen.add(heir)
                heir = replaced[heir]
            await connection.execute(
                update(r)
                .where(r.c.superseded_by == row.uid, r.c.owner == row.owner)
                .values(superseded_by=None if heir in seen else heir, rev=revisions[row.owner])
            )

    async def note(
        self, connection: AsyncConnection, block: str, user_id: str, forgotten: Forgotten, *, job: int = 0
    ) -> int:
        """Write down what a block is to delete elsewhere.

        Args:
            connection: In the transaction that deletes it here.
            block: Key of the block.
            user_id: The person, or '' for none.
            forgotten: Which records and messages.
            job: Number of the job of forgetting; 0 for none.

        Returns:
            Number of the note.
        """
        f = self._t.forgotten
        what = codec.to_json({"records": forgotten.records, "messages": forgotten.messages})
        statement = insert(f).values(job=job, user_id=user_id, block=block, what=what).returning(f.c.id)
        return int((await connection.execute(statement)).scalar_one())

    async def dead_letters(self, connection: AsyncConnection, sid: int) -> int:
        """Delete letters that hold nothing any more."""
        gone = await connection.execute(delete(self._t.dead).where(self._empty(sid)))
        return gone.rowcount

    async def empty_letters(self, connection: AsyncConnection, sid: int) -> int:
        """How many letters hold nothing any more."""
        query = select(func.count()).select_from(self._t.dead).where(self._empty(sid))
        return int((await connection.execute(query)).scalar_one())

    def _empty(self, sid: int) -> Any:
        d, m = self._t.dead, self._t.messages
        left = exists().where(m.c.sid == sid, m.c.seq > d.c.lo, m.c.seq <= d.c.hi, m.c.status != GONE)
        return and_(d.c.sid == sid, ~left)

    # -- reading again ---------------------------------------------------------------------------------------

    async def rewinds(
        self, connection: AsyncConnection, dropped: Collection[Any], forgotten: frozenset[Place]
    ) -> list[Rewind]:
        """Where blocks have to go back to, so that what is left of the sources of dropped records is read again.

        Args:
            connection: In a transaction.
            dropped: Records that came from forgotten messages.
            forgotten: Messages that are about to become tombstones.

        Returns:
            One entry per owner and block that lost a record with a source that is left. Other records that came
            from behind the new positions go too, or they would be made twice.
        """
        found = []
        for owner, block in sorted({(row.owner, row.block) for row in dropped}):
            rewind = Rewind(owner, block, records={r.id: r for r in dropped if (r.owner, r.block) == (owner, block)})
            new = list(rewind.records)
            while new:
                lower = self._lowered(rewind, await self._places(connection, new) - forgotten)
                rewind.positions |= await self._before_letters(connection, rewind, lower)
                behind = [await self._behind(connection, rewind, sid) for sid in lower]
                new = [row.id for rows in behind for row in rows if row.id not in rewind.records]
                rewind.records |= {row.id: row for rows in behind for row in rows}
            if rewind.positions:
                found.append(rewind)
        return found

    @staticmethod
    def _lowered(rewind: Rewind, places: Collection[Place]) -> dict[int, int]:
        """Sessions in which a source lies before the position that is known so far."""
        lower: dict[int, int] = {}
        for sid, seq in places:
            if seq - 1 < min(lower.get(sid, seq), rewind.positions.get(sid, seq)):
                lower[sid] = seq - 1
        return lower

    async def _places(self, connection: AsyncConnection, records: Sequence[int]) -> set[Place]:
        """Messages that records came from and that still say something."""
        s, m = self._t.sources, self._t.messages
        found: set[Place] = set()
        for part in chunks(records):
            query = (
                select(s.c.sid, s.c.seq)
                .join(m, and_(m.c.sid == s.c.sid, m.c.seq == s.c.seq))
                .where(s.c.record_id.in_(part), m.c.status != GONE)
            )
            found |= {(row.sid, row.seq) for row in await connection.execute(query)}
        return found

    async def _before_letters(
        self, connection: AsyncConnection, rewind: Rewind, positions: dict[int, int]
    ) -> dict[int, int]:
        """Positions in front of dead letters that would be read again; the letters go."""
        d = self._t.dead
        before = dict(positions)
        for sid, position in positions.items():
            mine = and_(d.c.sid == sid, d.c.consumer == rewind.block, d.c.hi > position)
            first = (await connection.execute(select(func.min(d.c.lo)).where(mine))).scalar()
            before[sid] = position if first is None else min(position, int(first))
            await connection.execute(delete(d).where(mine))
        return before

    async def _behind(self, connection: AsyncConnection, rewind: Rewind, sid: int) -> Sequence[Any]:
        s, r = self._t.sources, self._r
        query = (
            select(*self.columns)
            .distinct()
            .join(s, s.c.record_id == r.c.id)
            .where(s.c.sid == sid, s.c.seq > rewind.positions[sid], r.c.owner == rewind.owner)
            .where(r.c.block == rewind.block)
        )
        return (await connection.execute(query)).all()

    async def move_back(self, connection: AsyncConnection, rewind: Rewind) -> int:
        """Move a block's cursors back; one that stands further in front stays."""
        c = self._t.cursors
        moved = 0
        for sid, position in sorted(rewind.positions.items()):
            statement = (
                update(c)
                .where(c.c.sid == sid, c.c.consumer == rewind.block, c.c.pos > position)
                .values(pos=position, claim=None, claim_until=0, attempts=0, error=None)
            )
            moved += (await connection.execute(statement)).rowcount
        return moved

    # -- looking again ---------------------------------------------------------------------------------------

    async def left_of(self, connection: AsyncConnection, ids: Sequence[int]) -> dict[str, int]:
        """How many rows of deleted records are there all the same, by kind."""
        left = dict.fromkeys(("records", *self._projections), 0)
        for part in chunks(ids):
            for name, table in self._projections.items():
                query = select(func.count()).select_from(table).where(table.c.record_id.in_(part))
                left[name] += (await connection.execute(query)).scalar_one()
            query = select(func.count()).select_from(self._r).where(self._r.c.id.in_(part))
            left["records"] += (await connection.execute(query)).scalar_one()
        return left

    async def packs_left(self, connection: AsyncConnection, owners: Iterable[str]) -> int:
        """How many packs there are that were made before their owner was forgotten."""
        p, o = self._t.packs, self._t.owners
        left = 0
        for part in chunks(sorted(owners)):
            query = (
                select(func.count()).select_from(p.join(o, o.c.owner == p.c.owner))
                .where(p.c.owner.in_(part), p.c.epoch != o.c.epoch)
            )  # fmt: skip
            left += (await connection.execute(query)).scalar_one()
        return left

    async def left_in(self, connection: AsyncConnection, sid: int) -> dict[str, int]:
        """Tombstones of a session that hold text all the same, and its dead letters without content."""
        m = self._t.messages
        told = or_(m.c.data.is_not(None), m.c.meta.is_not(None), m.c.hash.is_not(None))
        texts = select(func.count()).select_from(m).where(m.c.sid == sid, m.c.status == GONE, told)
        return {
            "messages": (await connection.execute(texts)).scalar_one(),
            "dead letters": await self.empty_letters(connection, sid),
        }
