"""Forgetting: a job that is written down first, goes through the log and the records, and looks again."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.records import Forgotten
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.erasing import Eraser, Rewind
from llama_index_memory_tiers.storage.keeper import IndexKeeper
from llama_index_memory_tiers.storage.log import MessageLog
from llama_index_memory_tiers.storage.meant import Meant
from llama_index_memory_tiers.storage.outlook import Outlook, foresee
from llama_index_memory_tiers.storage.owner_keys import owner_keys
from llama_index_memory_tiers.storage.records import RecordStore
from llama_index_memory_tiers.storage.rows import GONE, chunks
from llama_index_memory_tiers.storage.schema import Tables
from llama_index_memory_tiers.storage.selection import Selection

_logger = logging.getLogger(__name__)

STORES = (
    "messages", "records", "sources", "embeddings", "terms", "visits", "packs", "dead letters", "cursors moved back",
    "caches", "write-ahead log",
)  # fmt: skip
"""What is read again after the deletes."""
POINTS = "index points"
"""The same, where there is an index outside the database."""
_KEPT_MICROSECONDS = 86_400_000_000  # a finished job's counts wait so long for the call that began it


@dataclass(slots=True)
class Run:
    """What one run of a job met.

    Args:
        job: Its number.
        selection: What it forgets.
        records: Rows of records that it deleted.
        sids: Sessions in which it found something.
        owners: Whose records changed.
        moved_back: Whether a block has to read something again.
    """

    job: int
    selection: Selection
    records: set[int] = field(default_factory=set)
    sids: set[int] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    moved_back: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job did and what a second reading found.

    Args:
        removed: Rows that are gone, by store.
        left: Rows that are there all the same, by store; what could not be read again is missing.
        moved_back: Whether a block has to read something again.
    """

    removed: Mapping[str, int]
    left: Mapping[str, int]
    moved_back: bool


class ForgettingStore:
    """Runs jobs of forgetting; each transaction leaves a state from which the same job can go on.

    Args:
        database: Where.
        tables: The tables.
        log: Its cached windows go.
        records: Its cached indexes go.
        now: Clock in microseconds since 1970.
    """

    def __init__(
        self, database: Database, tables: Tables, log: MessageLog, records: RecordStore, *, now: Callable[[], int]
    ) -> None:
        self._database = database
        self._t = tables
        self._j = tables.forgetting
        self._log = log
        self._records = records
        self._eraser = Eraser(tables)
        self._meant = Meant(database, tables)
        self._now = now
        self.index: IndexKeeper | None = None
        self.waiting = False  # blocks are to be told of what an earlier process forgot

    async def foresee(self, selection: Selection) -> Outlook:
        """Count what `begin` and `run` would take now; nothing is changed."""
        return await foresee(self._database, self._meant, self._eraser, selection)

    async def begin(self, selection: Selection) -> Run:
        """Write down what is to be forgotten, with how far each session reaches now.

        Args:
            selection: What.

        Returns:
            The job, for `run`.
        """
        token = uuid.uuid4().hex  # a lost reply hides that the job is there already

        async def work(connection: AsyncConnection) -> Run:
            known = select(self._j.c.id, self._j.c.spec).where(self._j.c.token == token)
            if (row := (await connection.execute(known)).first()) is not None:
                return Run(row.id, Selection.from_json(row.spec))
            whole = replace(selection, heads=await self._meant.sessions(connection, selection))
            made = await connection.execute(
                insert(self._j)
                .values(user_id=whole.user_id, token=token, spec=whole.to_json(), done="{}", started_at=self._now())
                .returning(self._j.c.id)
            )
            return Run(int(made.scalar_one()), whole)

        run = await self._database.write(work)
        failpoints.reach("forget.noted")
        return run

    async def run(self, run: Run) -> Outcome:
        """Do a job, or what an interrupted run of it has left, and look again.

        Args:
            run: From `begin`, or read again.

        Returns:
            What is gone, and what a second reading found.
        """
        row = await self._job(run.job)
        for sid in run.selection.heads:
            await self._forget_messages(run, sid)
            failpoints.reach("forget.messages")
        known = None if row is None else row.records_until
        until = known if known is not None else await self._note_records(run)
        for query in self._meant.record_queries(run.selection):
            await self._forget_records(run, query, until)
        failpoints.reach("forget.records")
        self._drop_caches(run)
        left = await self._look_again(run, until)
        failpoints.reach("forget.verified")
        done = await self._finish(run.job)
        if self.index is not None:
            done[POINTS], points = await self.index.forget(run.owners)
            left |= {} if points is None else {POINTS: points}
        elif await self._has_points(run.owners):
            done[POINTS] = 0  # and unknown how many are left: whoever has the index deletes them
        left |= {"write-ahead log": 0} if await self._database.empty_write_ahead_log() else {}
        return Outcome(done, left, moved_back=run.moved_back)

    async def resume(self) -> None:
        """Finish what was left undone; part of opening the storage, and of every later call."""
        j, f = self._j, self._t.forgotten

        async def work(connection: AsyncConnection) -> tuple[list[Any], bool]:
            jobs = (await connection.execute(select(j.c.id, j.c.finished_at, j.c.spec).order_by(j.c.id))).all()
            return list(jobs), (await connection.execute(select(f.c.id).limit(1))).first() is not None

        jobs, self.waiting = await self._database.read(work)
        for number, finished_at, spec in jobs:
            if finished_at is None:
                _logger.info("interrupted forgetting goes on", extra={"job": number})
                await self.run(Run(number, Selection.from_json(spec)))
            elif finished_at < self._now() - _KEPT_MICROSECONDS:
                await self.close(number)
        if any(finished_at is None for _, finished_at, _ in jobs):
            self.waiting = (await self._database.read(work))[1]

    async def close(self, job: int) -> None:
        """Remove a finished job, as its counts have been read."""

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(delete(self._j).where(self._j.c.id == job, self._j.c.finished_at.is_not(None)))

        await self._database.write(work)

    # -- jobs ------------------------------------------------------------------------------------------------

    async def _job(self, job: int) -> Any:
        async def work(connection: AsyncConnection) -> Any:
            return (await connection.execute(select(self._j).where(self._j.c.id == job))).first()

        return await self._database.read(work)

    async def _going_on(self, connection: AsyncConnection, job: int) -> dict[str, int] | None:
        """What a job has done so far, its row locked; `None` when another process has finished it."""
        query = select(self._j.c.done).where(self._j.c.id == job, self._j.c.finished_at.is_(None)).with_for_update()
        found = (await connection.execute(query)).scalar()
        return None if found is None else json.loads(found)

    async def _add(
        self, connection: AsyncConnection, job: int, done: dict[str, int], more: Iterable[tuple[str, int]]
    ) -> None:
        for store, count in more:
            done[store] = done.get(store, 0) + count
        await connection.execute(update(self._j).where(self._j.c.id == job).values(done=codec.to_json(done)))

    async def _note_records(self, run: Run) -> int:
        """Up to which record a job reaches: what is written from now on was made from what is left."""
        r = self._t.records

        async def work(connection: AsyncConnection) -> int:
            found = int((await connection.execute(select(func.coalesce(func.max(r.c.id), 0)))).scalar_one())
            await connection.execute(update(self._j).where(self._j.c.id == run.job).values(records_until=found))
            return found

        return await self._database.write(work)

    async def _finish(self, job: int) -> dict[str, int]:
        """Keep the counts, and no word of what was asked for."""

        async def work(connection: AsyncConnection) -> dict[str, int]:
            await self._overwriting(connection)
            values = {"finished_at": func.coalesce(self._j.c.finished_at, self._now()), "spec": "{}"}
            statement = update(self._j).where(self._j.c.id == job).values(values).returning(self._j.c.done)
            found = (await connection.execute(statement)).scalar()
            return {} if found is None else dict(json.loads(found))

        return await self._database.write(work)

    # -- messages --------------------------------------------------------------------------------------------

    async def _forget_messages(self, run: Run, sid: int) -> None:
        async for page in self._meant.messages(run.selection, sid):
            if page:
                await self._forget_page(run, sid, page)

    async def _forget_page(self, run: Run, sid: int, page: Sequence[Any]) -> None:
        seqs = [row.seq for row in page]
        eraser, s = self._eraser, self._t.sessions

        async def work(connection: AsyncConnection) -> None:
            done = await self._going_on(connection, run.job)
            if done is None:
                return
            await self._overwriting(connection)
            lock = select(s.c.sid).where(s.c.sid == sid).with_for_update(key_share=True)
            await connection.execute(lock)
            rows = await eraser.derived(connection, sid, seqs)
            rewinds: list[Rewind] = []
            if run.selection.derived == "rederive":
                places = frozenset((sid, seq) for seq in seqs)
                rewinds = await eraser.rewinds(connection, rows.values(), places)
                for rewind in rewinds:
                    rows |= rewind.records
            rows |= await eraser.parts_of(connection, rows.values())
            owners = {row.owner for row in rows.values()} | owner_keys(run.selection.user_id, [sid])
            revisions = await eraser.touch(connection, owners)
            await eraser.void_claims(connection, sid)
            moved = sum([await eraser.move_back(connection, rewind) for rewind in rewinds])
            # Before the tombstones, which take what is left of the records, uncounted.
            counts = await eraser.delete(connection, rows.values(), revisions)
            counts |= {"messages": await self._log.tombstone(connection, sid, seqs), "cursors moved back": moved}
            failpoints.reach("forget.tombstoned")
            counts["dead letters"] = await eraser.dead_letters(connection, sid)
            messages = tuple((sid, row.seq, row.uid) for row in page)
            await self._note_forgotten(connection, run, rows.values(), messages)
            await self._add(connection, run.job, done, counts.items())
            run.records.update(rows)
            run.owners |= owners
            run.moved_back |= bool(moved)

        await self._database.write(work)
        run.sids.add(sid)

    # -- records ---------------------------------------------------------------------------------------------

    async def _forget_records(self, run: Run, query: Any, until: int) -> None:
        async for page in self._meant.records(run.selection, query, until):
            if not page:
                continue

            async def work(connection: AsyncConnection, page: Sequence[Any] = page) -> None:
                done = await self._going_on(connection, run.job)
                if done is None:
                    return
                await self._overwriting(connection)
                parts = await self._eraser.parts_of(connection, page)
                rows = list(({row.id: row for row in page} | parts).values())
                owners = {row.owner for row in rows}
                counts = await self._eraser.delete(connection, rows, await self._eraser.touch(connection, owners))
                await self._note_forgotten(connection, run, rows, ())
                await self._add(connection, run.job, done, counts.items())
                run.records.update(row.id for row in rows)
                run.owners |= owners

            await self._database.write(work)

    # -- what blocks hold elsewhere --------------------------------------------------------------------------

    async def _note_forgotten(
        self,
        connection: AsyncConnection,
        run: Run,
        records: Collection[Any],
        messages: tuple[tuple[int, int, str], ...],
    ) -> None:
        for block in run.selection.external:
            mine = [row.uid for row in records if row.block == block]
            if mine or messages:
                forgotten = Forgotten(tuple(mine), messages)
                await self._eraser.note(connection, block, run.selection.user_id, forgotten, job=run.job)

    async def note_gone(
        self, block: str, user_id: str, sid: int, messages: Mapping[int, str]
    ) -> tuple[int, Forgotten] | None:
        """Note those of a session's messages that were deleted while a block wrote about them elsewhere.

        Args:
            block: Key of the block.
            user_id: The person, or '' for none.
            sid: Private row of the session.
            messages: Sequence number → public id. Those that are still there are left out: the block reads them again.

        Returns:
            Number and content of the note, `None` when all are there.
        """
        m = self._t.messages

        async def gone(connection: AsyncConnection) -> Forgotten:
            seqs: list[int] = []
            for part in chunks(list(messages)):
                query = select(m.c.seq).where(m.c.sid == sid, m.c.seq.in_(part), m.c.status == GONE)
                seqs += (await connection.execute(query)).scalars()
            return Forgotten((), tuple((sid, seq, messages[seq]) for seq in seqs))

        return await self._note_found(block, user_id, gone)

    async def note_missing(self, block: str, user_id: str, ids: Sequence[str]) -> tuple[int, Forgotten] | None:
        """Note those of a block's records that it wrote about elsewhere and that never came to be here.

        Args:
            block: Key of the block.
            user_id: The person, or '' for none.
            ids: Of records.

        Returns:
            Number and content of the note, `None` when all are there.
        """
        r = self._t.records

        async def missing(connection: AsyncConnection) -> Forgotten:
            known: set[str] = set()
            for part in chunks(ids):
                known.update((await connection.execute(select(r.c.uid).where(r.c.uid.in_(part)))).scalars())
            return Forgotten(tuple(one for one in ids if one not in known), ())

        return await self._note_found(block, user_id, missing)

    async def _note_found(
        self, block: str, user_id: str, find: Callable[[AsyncConnection], Awaitable[Forgotten]]
    ) -> tuple[int, Forgotten] | None:
        async def work(connection: AsyncConnection) -> tuple[int, Forgotten] | None:
            forgotten = await find(connection)
            if not forgotten.records and not forgotten.messages:
                return None
            return await self._eraser.note(connection, block, user_id, forgotten), forgotten

        written = await self._database.write(work)
        self._log.noted += written is not None
        return written

    @property
    def noted(self) -> int:
        """How often notes for blocks may have been written outside of jobs, since this process began."""
        return self._log.noted

    async def to_tell(self, block: str, user_id: str | None = None) -> list[tuple[int, Forgotten]]:
        """What a block has not yet been told of: number and content of each note.

        Args:
            block: Key of the block.
            user_id: Only about this person.
        """
        f = self._t.forgotten
        query = select(f.c.id, f.c.what).where(f.c.block == block).order_by(f.c.id)
        if user_id is not None:
            query = query.where(f.c.user_id == user_id)
        found = []
        for number, what in await self._read(query):
            fields = json.loads(what)
            messages = tuple((sid, seq, uid) for sid, seq, uid in fields["messages"])
            found.append((number, Forgotten(tuple(fields["records"]), messages)))
        return found

    async def told(self, numbers: Sequence[int]) -> None:
        """Cross out what a block has been told of."""
        f = self._t.forgotten

        async def work(connection: AsyncConnection) -> None:
            for part in chunks(numbers):
                await connection.execute(delete(f).where(f.c.id.in_(part)))

        await self._database.write(work)

    # -- looking again ---------------------------------------------------------------------------------------

    def _drop_caches(self, run: Run) -> None:
        self._log.drop_cached(run.selection.user_id, run.selection.session_id)
        self._records.drop_cached(run.owners)

    async def _look_again(self, run: Run, until: int) -> dict[str, int]:
        """Read every store as if nothing had been done."""
        selection = run.selection

        async def work(connection: AsyncConnection) -> dict[str, int]:
            left = await self._eraser.left_of(connection, sorted(run.records))
            left["packs"] = await self._eraser.packs_left(connection, run.owners)
            left |= {"messages": 0, "dead letters": 0}
            for sid in sorted(run.sids):
                for store, count in (await self._eraser.left_in(connection, sid)).items():
                    left[store] += count
            return left

        left = await self._database.read(work)
        for sid in selection.heads:
            async for page in self._meant.messages(selection, sid):
                left["messages"] += len(page)
        for query in self._meant.record_queries(selection):
            async for page in self._meant.records(selection, query, until):
                left["records"] += len(page)
        cached = self._log.cached(selection.user_id, selection.session_id) + self._records.cached(run.owners)
        # A reader of this moment may hold a window again; it was read after the deletes, which `messages` has proven.
        return left | {"caches": 0 if left["messages"] == 0 else cached}

    async def _has_points(self, owners: Iterable[str]) -> bool:
        """Whether an index outside the database, which this process does not have, was told of these owners."""
        k = self._t.marks
        parts = chunks(sorted(owners))
        return any([await self._read(select(k.c.owner).where(k.c.owner.in_(part)).limit(1)) for part in parts])

    async def _overwriting(self, connection: AsyncConnection) -> None:
        """Have SQLite overwrite what it deletes, on a connection of the user's engine as well."""
        if self._database.sqlite:
            await connection.exec_driver_sql("PRAGMA secure_delete=ON")

    async def _read(self, query: Any) -> Sequence[Any]:
        async def work(connection: AsyncConnection) -> Sequence[Any]:
            return (await connection.execute(query)).all()

        return await self._database.read(work)
