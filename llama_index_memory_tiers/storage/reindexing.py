"""Embedding every record again with another model: page by page beside the old vectors, then one switch per owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from sqlalchemy import (
    ColumnElement,
    String,
    and_,
    bindparam,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.embeddings import embed_texts, has_direction
from llama_index_memory_tiers.errors import ConfigurationError, EmbeddingError
from llama_index_memory_tiers.records import StoredMessage
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.index import encode_vector
from llama_index_memory_tiers.storage.owner_keys import session_keys, user_key
from llama_index_memory_tiers.storage.packs import raise_epoch
from llama_index_memory_tiers.storage.parts import SUM
from llama_index_memory_tiers.storage.record_rows import PAGE, is_page
from llama_index_memory_tiers.storage.records import RecordStore
from llama_index_memory_tiers.storage.rows import GONE
from llama_index_memory_tiers.storage.schema import UNFINISHED, Tables

_PAGE_RECORDS = 64  # what a crash costs at most, in embeddings
_PAGE_OWNERS = 200
_PROBE = "dimensions"

ReindexProgress = Callable[[int, int], None]
"""Gets the records done and the records in all."""


@dataclass(frozen=True, slots=True)
class ReindexReport:
    """What `reindex` did.

    Args:
        model: Name of the embedding model.
        dimensions: Size of its embeddings.
        embedded: Records that were embedded by this call.
        skipped: Records without a text, or whose embedding is all zero or not finite: words find them.
        owners: How many owners were switched to the new embeddings.
    """

    model: str
    dimensions: int
    embedded: int = 0
    skipped: int = 0
    owners: int = 0


@dataclass(slots=True)
class _Run:
    """One call.

    Args:
        model: Makes the embeddings.
        name: Its name.
        values: What the statements take.
        blocks: Keys of the blocks whose records are meant, `None` for all.
        again: Also what has an embedding of this model already.
        progress: See `ReindexProgress`.
        total: Records that are to be embedded.
    """

    model: BaseEmbedding
    name: str
    values: Mapping[str, Any]
    blocks: frozenset[str] | None
    again: bool
    progress: ReindexProgress | None
    total: int = 0
    embedded: int = 0
    owners: int = 0
    skipped: set[int] = field(default_factory=set)

    def tell(self) -> None:
        """Tell how far it is."""
        if self.progress is not None:
            done = self.embedded + len(self.skipped)
            self.progress(done, max(done, self.total))


class _NotYetError(Exception):
    """Something was written while the last page was embedded."""


class Reindexer:
    """Statements that bring stored embeddings from one model to another.

    New vectors stand under a name of their own until an owner has them all; a second call after a crash embeds only
    what is missing. Old vectors are read until the switch, which raises the owner's epoch, so that every process
    drops what it holds.

    Args:
        database: Where.
        tables: The tables.
        records: Its cached indexes go.
        now: Clock in microseconds since 1970.
    """

    def __init__(self, database: Database, tables: Tables, records: RecordStore, *, now: Callable[[], int]) -> None:
        self._database = database
        self._t = tables
        self._records = records
        self._now = now

    async def run(
        self,
        model: BaseEmbedding,
        *,
        user_id: str | None = None,
        session_id: str | None = None,
        blocks: Collection[str] | None = None,
        again: bool = False,
        progress: ReindexProgress | None = None,
    ) -> ReindexReport:
        """See `Storage.reindex`."""
        _check_model(model)
        (probe,) = await embed_texts(model, [_PROBE])
        if not has_direction(probe):
            raise EmbeddingError(
                f"embed_model={model.model_name!r} embeds the word {_PROBE!r} as {len(probe)} zeros or as no numbers.",
                allowed="An embedding is one row of finite numbers that are not all zero.",
                remedy="Check the embedding model; nothing was changed.",
            )
        new = {"model": model.model_name, "unfinished": UNFINISHED + model.model_name, "bytes": 2 * len(probe)}
        run = _Run(model, model.model_name, new, None if blocks is None else frozenset(blocks), again, progress)
        run.total = await self._count(run, user_id, session_id)
        run.tell()
        after = ""
        while owners := await self._owners(run, user_id, session_id, after):
            for owner in owners:
                await self._owner(run, owner)
            after = owners[-1]
        return ReindexReport(run.name, len(probe), run.embedded, len(run.skipped), run.owners)

    # -- what is to be done ----------------------------------------------------------------------------------

    def _has(self, *what: ColumnElement[bool]) -> ColumnElement[bool]:
        e = self._t.embeddings
        return exists().where(e.c.record_id == self._t.records.c.id, *what)

    def _missing(self, run: _Run) -> ColumnElement[bool]:
        """Records that are searched for and have no new embedding yet; expired ones never come back."""
        r, e, t = self._t.records, self._t.embeddings, self._t.terms
        names: list[Any] = [bindparam("unfinished")] if run.again else [bindparam("unfinished"), bindparam("model")]
        done = self._has(e.c.model.in_(names), func.length(e.c.vec) == bindparam("bytes"))
        searched = or_(exists().where(t.c.record_id == r.c.id), self._has(), is_page(r))
        return and_(self._meant(run), searched, ~done, or_(r.c.expires_at.is_(None), r.c.expires_at > self._now()))

    def _meant(self, run: _Run) -> ColumnElement[bool]:
        r = self._t.records
        return r.c.id.is_not(None) if run.blocks is None else r.c.block.in_(sorted(run.blocks))

    def _whose(self, user_id: str | None, session_id: str | None) -> Any:
        """Owners that are meant, as a statement of their keys; `None` for all."""
        s = self._t.sessions
        if user_id is None and session_id is None:
            return None
        sessions = select(session_keys(s.c.sid).label("owner"))
        sessions = sessions.where(s.c.user_id == (user_id or ""))
        if session_id is not None:
            return sessions.where(s.c.session_id == session_id)
        return sessions.union_all(select(cast(literal(user_key(user_id or "")), String)))

    async def _owners(self, run: _Run, user_id: str | None, session_id: str | None, after: str) -> list[str]:
        """Owners of whom something is left to do."""
        r, e, o = self._t.records, self._t.embeddings, self._t.owners
        other = and_(self._meant(run), self._has(e.c.model != bindparam("model")))
        # What is half done is switched too: a crash may have come between the last page and the switch.
        work = exists().where(r.c.owner == o.c.owner, or_(self._missing(run), other))
        query = select(o.c.owner).where(o.c.owner > after, work).order_by(o.c.owner).limit(_PAGE_OWNERS)
        whose = self._whose(user_id, session_id)
        if whose is not None:
            query = query.where(o.c.owner.in_(whose))
        return [row.owner for row in await self._read(query, run.values)]

    async def _count(self, run: _Run, user_id: str | None, session_id: str | None) -> int:
        r = self._t.records
        query = select(func.count()).select_from(r).where(self._missing(run))
        whose = self._whose(user_id, session_id)
        if whose is not None:
            query = query.where(r.c.owner.in_(whose))
        return int((await self._read(query, run.values))[0][0])

    async def _read(self, query: Any, values: Mapping[str, Any]) -> Sequence[Any]:
        async def work(connection: AsyncConnection) -> Sequence[Any]:
            return (await connection.execute(query, dict(values))).all()

        return await self._database.read(work)

    # -- one owner -------------------------------------------------------------------------------------------

    async def _owner(self, run: _Run, owner: str) -> None:
        while True:
            await self._embed_missing(run, owner)
            failpoints.reach("reindex.switching")
            try:
                await self._database.write(lambda connection: self._switch(connection, run, owner))
            except _NotYetError:
                continue
            break
        self._records.drop_cached({owner})
        run.owners += 1
        failpoints.reach("reindex.switched")

    async def _embed_missing(self, run: _Run, owner: str) -> None:
        r, m = self._t.records, self._t.messages
        said = and_(r.c.kind == "message", m.c.sid == r.c.sid, m.c.seq == r.c.seq, m.c.status != GONE)
        query = (
            select(r.c.id, r.c.uid, r.c.kind, r.c.rev, r.c.text, r.c.data, m.c.data.label("message"), m.c.meta)
            .select_from(r.outerjoin(m, said))
            .where(r.c.owner == owner, r.c.id > bindparam("after"), self._missing(run))
            .order_by(r.c.id)
            .limit(_PAGE_RECORDS)
        )
        after = 0
        while rows := await self._read(query, {**run.values, "after": after}):
            after = rows[-1].id
            await self._embed(run, owner, [row for row in rows if row.id not in run.skipped])

    async def _embed(self, run: _Run, owner: str, rows: Sequence[Any]) -> None:
        pages = [row.uid for row in rows if row.kind == PAGE]
        said = await self._records.parts.messages_behind(owner, pages, live=False)
        texts = {row.id: text for row in rows if (text := _text_of(row, said.get(row.uid, ()))).strip()}
        vectors = await embed_texts(run.model, list(texts.values())) if texts else []
        made = {number: encode_vector(v) for number, v in zip(texts, vectors, strict=True) if has_direction(v)}
        sizes = {len(vector) for vector in made.values()} - {run.values["bytes"]}
        if sizes:
            raise EmbeddingError(
                f"embed_model={run.name!r} gave {run.values['bytes'] // 2} dimensions first, now {min(sizes) // 2}.",
                allowed="One model gives embeddings of one size.",
                remedy="Check the model; the old embeddings are still in use. Call reindex again to go on.",
            )
        run.skipped.update(row.id for row in rows if row.id not in made)
        revisions = {row.id: row.rev for row in rows if row.id in made}
        if revisions:
            run.embedded += await self._database.write(
                lambda connection: self._keep(connection, run, owner, made, revisions)
            )
        run.tell()
        failpoints.reach("reindex.page")

    async def _keep(
        self,
        connection: AsyncConnection,
        run: _Run,
        owner: str,
        made: Mapping[int, bytes],
        revisions: Mapping[int, int],
    ) -> int:
        """Write what is still so: a record that was changed or forgotten meanwhile would get a vector of old text."""
        r, e, o = self._t.records, self._t.embeddings, self._t.owners
        await connection.execute(select(o.c.rev).where(o.c.owner == owner).with_for_update())
        query = select(r.c.id, r.c.rev).where(r.c.id.in_(list(revisions)), r.c.owner == owner)
        same = [row.id for row in await connection.execute(query) if row.rev == revisions[row.id]]
        name = run.values["unfinished"]
        if same:
            await connection.execute(delete(e).where(e.c.model == name, e.c.record_id.in_(same)))
            await connection.execute(
                insert(e), [{"record_id": number, "model": name, "vec": made[number]} for number in same]
            )
        return len(same)

    async def _switch(self, connection: AsyncConnection, run: _Run, owner: str) -> None:
        """Let the new embeddings take the place of the old ones."""
        r, e = self._t.records, self._t.embeddings
        await raise_epoch(connection, self._t, owner)
        query = select(r.c.id).where(r.c.owner == owner, self._missing(run))
        left = {row.id for row in await connection.execute(query, dict(run.values))}
        if left - run.skipped:
            raise _NotYetError
        mine = e.c.record_id.in_(select(r.c.id).where(r.c.owner == owner, self._meant(run)))
        new, unfinished = run.name, run.values["unfinished"]
        made = select(e.c.record_id).where(mine, e.c.model == unfinished)
        again = await connection.execute(delete(e).where(mine, e.c.model == new, e.c.record_id.in_(made)))
        if again.rowcount:
            await self._void_sums(connection, run, owner)
        await connection.execute(update(e).where(mine, e.c.model == unfinished).values(model=new))
        wrong_size = func.length(e.c.vec) != run.values["bytes"]
        await connection.execute(delete(e).where(mine, or_(e.c.model != new, wrong_size)))
        marks = self._t.marks  # an index outside is told all of this owner again
        await connection.execute(update(marks).where(marks.c.owner == owner).values(rev=0))

    async def _void_sums(self, connection: AsyncConnection, run: _Run, owner: str) -> None:
        """Drop sums of embeddings whose model has the same name as before, so that nothing else tells them apart."""
        r = self._t.records
        page = r.alias("page")
        parents = select(page.c.parent).where(page.c.owner == owner, is_page(page))
        query = select(r.c.id, r.c.data).where(r.c.owner == owner, r.c.uid.in_(parents), self._meant(run))
        stored = {row.id: codec.read_json(row.data) for row in await connection.execute(query)}
        changed = [{"row": number, "new": codec.to_json({**data, SUM: None})} for number, data in stored.items()]
        if changed:
            await connection.execute(update(r).where(r.c.id == bindparam("row")).values(data=bindparam("new")), changed)


def _text_of(row: Any, messages: Sequence[StoredMessage]) -> str:
    """What the blocks embed: of a message who says it too, of a page what was said, of an episode its task."""
    if row.kind == PAGE and not row.text:
        return codec.embedded_text(codec.told(messages))
    if row.message is None:
        task = codec.read_json(row.data).get("task")
        return codec.embedded_text(task if isinstance(task, str) else row.text)
    try:
        message = codec.decode_message(row.message)
        speaker = codec.decode_meta(row.meta).sent_from
    except Exception:  # noqa: BLE001  # a damaged row, which the log reports
        return ""
    return codec.embedded_message((message.content or "").strip(), message.role, speaker)


def _check_model(model: Any) -> None:
    if not isinstance(model, BaseEmbedding) or not model.model_name:
        raise ConfigurationError(
            f"embed_model={model!r:.100} was given.",
            allowed="It is a LlamaIndex embedding model with a model_name, by which its vectors are told apart.",
            remedy="Pass such a model; nothing was changed.",
        )
