"""Storage: opens the database and closes it; everything that is kept is kept here."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Collection
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.base.embeddings.base import BaseEmbedding
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import Self

from llama_index_memory_tiers.checks import check_whole, checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.moments import to_microseconds
from llama_index_memory_tiers.portal import portal
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.redaction import Redactor, checked_redaction
from llama_index_memory_tiers.storage.addresses import Address, holds_table, resolve_address, shown_url
from llama_index_memory_tiers.storage.adoption import adopt_stock_table
from llama_index_memory_tiers.storage.catch_up import OwnerIndexes
from llama_index_memory_tiers.storage.cursors import Cursor, CursorStore, DeadLetter
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.exporting import Exporter
from llama_index_memory_tiers.storage.forgetting import ForgettingStore
from llama_index_memory_tiers.storage.importing import Importer
from llama_index_memory_tiers.storage.index import Hit, IndexCache, IndexQuery
from llama_index_memory_tiers.storage.index.seam import VectorIndex
from llama_index_memory_tiers.storage.keeper import IndexKeeper, SyncProgress
from llama_index_memory_tiers.storage.log import MessageLog
from llama_index_memory_tiers.storage.marks import IndexState, MarkStore
from llama_index_memory_tiers.storage.outside import OutsideSearch
from llama_index_memory_tiers.storage.owner_keys import owner_key
from llama_index_memory_tiers.storage.owners import OwnerReader
from llama_index_memory_tiers.storage.packs import PackStore
from llama_index_memory_tiers.storage.parts import SUM, Visits
from llama_index_memory_tiers.storage.record_rows import PAGE
from llama_index_memory_tiers.storage.records import RecalledMessage, RecordStore
from llama_index_memory_tiers.storage.reindexing import Reindexer, ReindexProgress, ReindexReport
from llama_index_memory_tiers.storage.rows import Entry, PutResult, Session, Window
from llama_index_memory_tiers.storage.schema import build_tables, checked_name, migrate, tables_exist
from llama_index_memory_tiers.storage.survey import Survey
from llama_index_memory_tiers.storage.transfer import Progress, Target, TransferReport, reading, writing

if TYPE_CHECKING:
    from qdrant_client import AsyncQdrantClient

__all__ = [
    "PAGE",
    "SUM",
    "Cursor",
    "DeadLetter",
    "Entry",
    "Hit",
    "IndexQuery",
    "IndexState",
    "OwnerReader",
    "PutResult",
    "RecalledMessage",
    "ReindexProgress",
    "ReindexReport",
    "Session",
    "Storage",
    "SyncProgress",
    "VectorIndex",
    "Visits",
    "Window",
    "owner_key",
]

DEFAULT_TABLE_NAME = "llama_index_memory"
DEFAULT_INDEX_BYTES = 256 * 2**20


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(timezone.utc)


def new_id() -> str:
    """A public id: a random uuid as text."""
    return str(uuid.uuid4())


class Storage:
    """A database of memories, shared by all memories of a process; whoever opens it closes it.

    Nothing is opened before the first use. Any number of event loops, threads, processes and hosts may use the
    same database at once.

    Args:
        address: A file path, or a URI such as `postgresql+asyncpg://user@host/database`. `None` means a private
            temporary directory that is removed on close.
        engine: Your own SQLAlchemy `AsyncEngine` instead; it is shared, never closed. One for PostgreSQL is used from
            the event loop that it belongs to alone: synchronous methods and other loops need `address` instead.
        table_name: Prefix of all tables.
        db_schema: Database schema for them; PostgreSQL only.
        pool_size: Connections per event loop.
        index_bytes: Bound for the owner indexes kept in RAM, in bytes; default 256 MiB.
        vectors: An `AsyncQdrantClient` of a server or cluster, for owners with hundreds of thousands of memories: it
            proposes records, the database decides. It is used from the event loop that it belongs to and never closed.
            Without it, or while it does not answer, each owner's rows are searched in memory.
        clock: Returns the time, aware; for tests.
        ids: Makes public ids; for tests.

    Raises:
        ConfigurationError: Names the argument, its value and the way out.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        engine: AsyncEngine | None = None,
        table_name: str = DEFAULT_TABLE_NAME,
        db_schema: str | None = None,
        pool_size: int = 5,
        index_bytes: int = DEFAULT_INDEX_BYTES,
        vectors: AsyncQdrantClient | VectorIndex | None = None,
        clock: Callable[[], datetime] = utc_now,
        ids: Callable[[], str] = new_id,
    ) -> None:
        if engine is not None and address is not None:
            raise ConfigurationError(
                "address and engine were both given.",
                allowed="They exclude each other: each says which database.",
                remedy="Pass one of them.",
            )
        check_whole("pool_size", pool_size, least=1)
        check_whole("index_bytes", index_bytes, least=0)
        for name, function in (("clock", clock), ("ids", ids)):
            if not callable(function):
                raise ConfigurationError(
                    f"{name}={function!r:.100} was given.",
                    allowed=f"{name} is a function without arguments.",
                    remedy="Pass such a function, or leave it out.",
                )
        index = None if vectors is None else _index_of(vectors)
        self.table_name = checked_name("table_name", table_name)
        schema = None if db_schema is None else checked_name("db_schema", db_schema)
        self._address = _address_of(engine) if engine is not None else resolve_address(address)
        self.db_schema = None if self._address.url.get_backend_name() == "sqlite" else schema
        self.clock = clock
        self.ids = ids
        self._tables = build_tables(self.table_name, self.db_schema)
        self._database = Database(self._address, engine=engine, pool_size=pool_size)
        self._database.on_open = self._migrate
        self.log = MessageLog(self._database, self._tables)
        self.cursors = CursorStore(self._database, self._tables)
        packs = PackStore(self._database, self._tables, ids=new_id)
        indexes = OwnerIndexes(self._database, self._tables, IndexCache(index_bytes), packs)
        self.records = RecordStore(self._database, self._tables, indexes, now=self.now)
        self.forgetting = ForgettingStore(self._database, self._tables, self.log, self.records, now=self.now)
        self._database.after_open = self.forgetting.resume
        self.survey = Survey(self._database, self._tables)
        self._reindexer = Reindexer(self._database, self._tables, self.records, now=self.now)
        self._keeper = None if index is None else self._keep_in_step(index)
        self._exporter = Exporter(self._database, self._tables)
        self._importer = Importer(self._database, self._tables)

    def _keep_in_step(self, index: VectorIndex) -> IndexKeeper:
        marks = MarkStore(self._database, self._tables)
        keeper = IndexKeeper(index, marks, prefix=self.table_name)
        self.records.finder.outside = OutsideSearch(keeper)
        self.forgetting.index = keeper
        return keeper

    def now(self) -> int:
        """The clock in microseconds since 1970."""
        return to_microseconds(self.clock())

    @property
    def private(self) -> bool:
        """Whether the database is a temporary one that is removed on close."""
        return self._address.private is not None

    @property
    def address(self) -> str:
        """Where the database is, without any password."""
        return shown_url(self._address.url)

    @property
    def file(self) -> Path | None:
        """The database's file, there or not; `None` for a server."""
        url = self._address.url
        return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None

    @property
    def statements(self) -> int:
        """How many SQL statements were sent; for tests and benchmarks."""
        return self._database.statements

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called."""
        return self._database.closed

    async def _migrate(self) -> None:
        await migrate(self._database, self._tables, now=self.now)

    async def amade(self) -> bool:
        """Whether there are tables under `table_name` already; looks without making them, nor a file.

        Raises:
            ForeignTableError: A stock chat store's table stands under `table_name`.
            SchemaVersionError: The tables belong to a newer version.
            StorageUnavailableError: The database cannot be reached.
        """
        if self.file is not None and not self.file.exists():
            return False
        if self.file is not None and not await asyncio.to_thread(holds_table, self.file, self.table_name):
            return False  # somebody else's, perhaps, which the first connection of ours would put into WAL mode
        return await tables_exist(self._database, self._tables)

    async def aopen(self) -> Self:
        """Make the tables now instead of at the first use.

        Returns:
            This storage.

        Raises:
            ForeignTableError: A stock chat store's table stands under `table_name`.
            SchemaVersionError: The tables belong to a newer version.
            StorageUnavailableError: The database cannot be reached.
        """
        await self._database.warm()
        return self

    @checked
    async def adopt(
        self,
        stock_table: str = DEFAULT_TABLE_NAME,
        *,
        user_id: str | None = None,
        redaction: Redactor | Literal["default"] | None = "default",
    ) -> int:
        """Take over the history of LlamaIndex's `SQLAlchemyChatStore`, archive included; its table is left as it is.

        Args:
            stock_table: Name of its table. It may not be this storage's own `table_name`.
            user_id: The person whose sessions these become; `None` leaves them without a user.
            redaction: Takes secrets out of what is stored; `None` switches it off.

        Returns:
            How many messages were new. Repeating the call adds what came since.

        Raises:
            ConfigurationError: Names the argument, its value and the way out.
        """
        redactor = checked_redaction(redaction)
        if stock_table == self.table_name:
            raise ConfigurationError(
                f"stock_table={stock_table!r} is also this storage's table_name.",
                allowed="The stock table is read, ours are written: they have different names.",
                remedy="Create this Storage with another table_name, such as 'memory_tiers'.",
            )
        return await adopt_stock_table(
            self._database,
            self.log,
            checked_name("stock_table", stock_table),
            self.db_schema,
            user_id=Scope("any", user_id).user_id or "",
            redactor=redactor,
            now=self.now(),
        )

    @checked
    async def export_to(
        self, target: Target, user_id: str, session_id: str | None, progress: Progress | None = None
    ) -> TransferReport:
        """Write one person's or one session's rows to a file; see `TieredMemory.aexport`."""
        with writing(target) as file:
            counts = await self._exporter.export(file, user_id, session_id, progress)
        return TransferReport(counts["session"], counts["message"], counts["record"])

    @checked
    async def import_from(
        self,
        source: Target,
        user_id: str,
        session_id: str | None,
        progress: Progress | None = None,
        *,
        redaction: Redactor | Literal["default"] | None = "default",
    ) -> TransferReport:
        """Take in what `export_to` wrote; see `TieredMemory.aimport`."""
        redactor = checked_redaction(redaction)
        with reading(source) as file:
            return await self._importer.load(file, user_id, session_id, progress, redactor)

    @checked
    async def reindex(
        self,
        embed_model: BaseEmbedding,
        *,
        user_id: str | None = None,
        session_id: str | None = None,
        blocks: Collection[str] | None = None,
        again: bool = False,
        progress: ReindexProgress | None = None,
    ) -> ReindexReport:
        """Embed every record again with another model, as after a change of `embed_model=`.

        Recall goes on all along: with the old model by words and meaning, with the new one by words until all records
        of an owner are embedded; then that owner is switched in one transaction and the old vectors are deleted.
        After a crash or an outage a second call embeds what is missing.

        Args:
            embed_model: A LlamaIndex embedding model; `model_name` tells its vectors from others.
            user_id: Only what is known about this person; default everybody.
            session_id: Only what was learnt in this session of `user_id`, or of nobody when that is left out.
            blocks: Keys of the blocks whose records are meant; default all, needed when blocks have different models.
            again: Embed also what has a vector of this model already, as when its weights changed.
            progress: Gets the records done and the records in all.

        Returns:
            What was done.

        Raises:
            ConfigurationError: `embed_model` is no embedding model; nothing was changed.
            EmbeddingError: The model gives no usable vectors, or vectors of changing size.
        """
        return await self._reindexer.run(
            embed_model, user_id=user_id, session_id=session_id, blocks=blocks, again=again, progress=progress
        )

    async def index_state(self) -> IndexState:
        """How the index outside the database stands: what it has yet to be told, and the kind of its last failure."""
        return IndexState() if self._keeper is None else await self._keeper.state()

    @checked
    async def sync_index(self, progress: SyncProgress | None = None, *, again: bool = False) -> IndexState:
        """Tell the index outside the database everything that it has not been told, as when it is new.

        Otherwise this happens owner by owner, after each change and at each question.

        Args:
            progress: Gets the owners done and the owners in all.
            again: Everything, told before or not, as when somebody has emptied the server.

        Returns:
            How it stands then. What its client raises is raised here; a second call goes on.
        """
        return IndexState() if self._keeper is None else await self._keeper.sync(progress, again=again)

    async def leave_index(self) -> None:
        """Note that no index outside the database holds anything any more, when you have deleted its collections.

        Until then, receipts of `aforget` from a storage without `vectors=` say that points may be left.
        """
        await MarkStore(self._database, self._tables).clear()

    async def aclose(self) -> None:
        """Wait for running transactions and close what this object opened. Calling it twice is harmless."""
        await self.records.indexes.settle()
        if self._keeper is not None:
            await self._keeper.settle()
        await self._database.aclose()

    def close(self) -> None:
        """See `aclose`; for scripts."""
        portal.run(self.aclose())

    async def __aenter__(self) -> Self:
        return await self.aopen()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"Storage({self.address!r}, table_name={self.table_name!r})"


def _index_of(vectors: Any) -> VectorIndex:
    if isinstance(vectors, VectorIndex):
        return vectors
    from qdrant_client import AsyncQdrantClient  # noqa: PLC0415  # takes half a second to import

    from llama_index_memory_tiers.storage.index.qdrant import QdrantIndex  # noqa: PLC0415  # as above

    if isinstance(vectors, AsyncQdrantClient):
        return QdrantIndex(vectors)
    raise ConfigurationError(
        f"vectors={type(vectors).__name__} was given.",
        allowed="It is a qdrant_client.AsyncQdrantClient, or an object with the methods of VectorIndex.",
        remedy="Pass AsyncQdrantClient(url=…); other vector stores go into VectorMemoryBlock(vector_store=…).",
    )


def _address_of(engine: Any) -> Address:
    if not isinstance(engine, AsyncEngine):
        raise ConfigurationError(
            f"engine={type(engine).__name__} was given.",
            allowed="It is a sqlalchemy.ext.asyncio.AsyncEngine.",
            remedy="Make it with create_async_engine(…).",
        )
    url = engine.url
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigurationError(
            f"An engine for {shown_url(url)!r} was given.",
            allowed="An in-memory database has one connection for all, so that our COMMIT would end your transaction.",
            remedy="Pass an engine for a file, or no engine: storage=None is a private temporary database.",
        )
    return Address(url)
