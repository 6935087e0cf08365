"""Tables, and the numbered migrations that make them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.elements import TextClause

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.errors import ConfigurationError, ForeignTableError, SchemaVersionError
from llama_index_memory_tiers.storage.database import Database

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}\Z")
# PostgreSQL: one number per purpose; a transaction-level lock, as pgbouncer forbids session locks.
_MIGRATION_LOCK = 7_300_194_422
UNFINISHED = "~unfinished/"
"""Before the name of a model: embeddings of a `reindex` that is not through yet; no search reads them."""
_STOCK_COLUMNS = {"id", "key", "timestamp", "role", "status", "data"}


def checked_name(field: str, name: str) -> str:
    """Refuse a table or schema name that would have to be quoted.

    Args:
        field: The argument's name, for the error.
        name: What was given.

    Returns:
        The same name.

    Raises:
        ConfigurationError: It is no plain identifier of at most 40 characters.
    """
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigurationError(
            f"{field}={name!r} was given.",
            allowed="A name has 1 to 40 letters, digits and underscores and begins with no digit.",
            remedy=f"Choose another {field}.",
        )
    return name


@dataclass(frozen=True)
class Tables:
    """The tables as SQLAlchemy Core sees them; see `migrate` for how they come to be."""

    prefix: str
    metadata: MetaData
    versions: Table
    sessions: Table
    messages: Table
    cursors: Table
    dead: Table
    owners: Table
    records: Table
    sources: Table
    embeddings: Table
    terms: Table
    packs: Table
    forgetting: Table
    forgotten: Table
    visits: Table
    marks: Table


def build_tables(prefix: str, schema: str | None = None) -> Tables:
    """Describe the tables under a prefix.

    Args:
        prefix: Plain identifier put before every table's name.
        schema: Database schema, where the database has such.

    Returns:
        The tables.
    """
    meta = MetaData(schema=schema)

    def table(name: str, *columns: Any) -> Table:
        return Table(f"{prefix}_{name}", meta, *columns)

    def identity(name: str) -> Column[int]:
        return Column(name, BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)

    def key(name: str, kind: Any = Text) -> Column[Any]:
        return Column(name, kind, primary_key=True, autoincrement=False)

    return Tables(
        prefix=prefix,
        metadata=meta,
        versions=table("schema", key("version", Integer), Column("applied_at", BigInteger)),
        sessions=table(
            "sessions", identity("sid"), Column("user_id", Text), Column("session_id", Text),
            Column("head_seq", BigInteger), Column("active_tokens", BigInteger),
            Column("window_rev", BigInteger), Column("last_put_at", BigInteger),
        ),
        messages=table(
            "messages", key("sid", BigInteger), key("seq", BigInteger), Column("uid", Text),
            Column("status", Text), Column("role", Text), Column("tokens", BigInteger), Column("counter", Text),
            Column("created_at", BigInteger), Column("hash", Text), Column("data", Text), Column("meta", Text),
        ),
        cursors=table(
            "cursors", key("sid", BigInteger), key("consumer"), Column("pos", BigInteger), Column("claim", Text),
            Column("claim_until", BigInteger), Column("attempts", Integer), Column("error", Text),
        ),
        dead=table(
            "dead", identity("id"), Column("sid", BigInteger), Column("consumer", Text), Column("lo", BigInteger),
            Column("hi", BigInteger), Column("error", Text), Column("at", BigInteger),
        ),
        owners=table("owners", key("owner"), Column("epoch", BigInteger), Column("rev", BigInteger)),
        records=table(
            "records", identity("id"), Column("uid", Text), Column("owner", Text), Column("rev", BigInteger),
            Column("kind", Text), Column("block", Text), Column("text", Text), Column("data", Text),
            Column("said_at", BigInteger), Column("created_at", BigInteger), Column("expires_at", BigInteger),
            Column("superseded_by", Text), Column("archived_at", BigInteger),
            Column("sid", BigInteger), Column("seq", BigInteger), Column("speaker", Text), Column("tokens", BigInteger),
            Column("parent", Text),
        ),
        sources=table(
            "record_sources", key("record_id", BigInteger), key("sid", BigInteger), key("seq", BigInteger),
        ),
        embeddings=table("embeddings", key("record_id", BigInteger), key("model"), Column("vec", LargeBinary)),
        terms=table("terms", key("record_id", BigInteger), Column("ids", LargeBinary), Column("counts", LargeBinary)),
        packs=table(
            "packs", key("pack"), key("part", Integer), Column("parts", Integer), Column("owner", Text),
            Column("model", Text), Column("epoch", BigInteger), Column("rev", BigInteger), Column("body", LargeBinary),
        ),
        forgetting=table(
            "forgetting", identity("id"), Column("user_id", Text), Column("token", Text), Column("spec", Text),
            Column("done", Text), Column("started_at", BigInteger), Column("finished_at", BigInteger),
            Column("records_until", BigInteger),
        ),
        forgotten=table(
            "forgotten", identity("id"), Column("job", BigInteger), Column("user_id", Text), Column("block", Text),
            Column("what", Text),
        ),
        visits=table("visits", key("record_id", BigInteger), Column("n", BigInteger), Column("last_at", BigInteger)),
        marks=table(
            "index_marks", key("owner"), key("model"), Column("space", Text), Column("epoch", BigInteger),
            Column("rev", BigInteger), Column("busy", Text),
        ),
    )  # fmt: skip


def owner_touch(tables: Tables) -> TextClause:
    """The statement that raises an owner's revision, and its epoch by `raise_epoch`, and makes its row if need be.

    Args:
        tables: The tables.

    Returns:
        A statement that takes `owner` and `raise_epoch` and answers the new epoch and revision.
    """
    owners = ".".join(f'"{part}"' for part in tables.owners.fullname.split("."))
    # The revision comes from this row's lock: taken from a sequence, readers missed changes.
    return text(
        f"INSERT INTO {owners} AS o (owner, epoch, rev) VALUES (:owner, :raise_epoch, 1) "
        "ON CONFLICT (owner) DO UPDATE SET epoch = o.epoch + excluded.epoch, rev = o.rev + 1 "
        "RETURNING epoch, rev"
    )


# Append only: a number is never edited after a release. {t[…]}: table, {i[…]}: index, {id}: identity column,
# {bytes}: binary type.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE {t[sessions]} (sid {id}, user_id TEXT NOT NULL DEFAULT '', session_id TEXT NOT NULL,
           head_seq BIGINT NOT NULL, active_tokens BIGINT NOT NULL, window_rev BIGINT NOT NULL,
           last_put_at BIGINT NOT NULL, UNIQUE (user_id, session_id))""",
        """CREATE TABLE {t[messages]} (sid BIGINT NOT NULL, seq BIGINT NOT NULL, uid TEXT NOT NULL,
           status TEXT NOT NULL, role TEXT NOT NULL, tokens BIGINT NOT NULL, counter TEXT NOT NULL,
           created_at BIGINT NOT NULL, hash TEXT, data TEXT, meta TEXT,
           PRIMARY KEY (sid, seq), UNIQUE (sid, uid))""",
        "CREATE INDEX {i[messages_active]} ON {t[messages]} (sid, seq) WHERE status = 'active'",
        """CREATE TABLE {t[cursors]} (sid BIGINT NOT NULL, consumer TEXT NOT NULL, pos BIGINT NOT NULL, claim TEXT,
           claim_until BIGINT NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, error TEXT,
           PRIMARY KEY (sid, consumer))""",
        """CREATE TABLE {t[dead]} (id {id}, sid BIGINT NOT NULL, consumer TEXT NOT NULL, lo BIGINT NOT NULL,
           hi BIGINT NOT NULL, error TEXT NOT NULL, at BIGINT NOT NULL)""",
        "CREATE TABLE {t[owners]} (owner TEXT PRIMARY KEY, epoch BIGINT NOT NULL, rev BIGINT NOT NULL)",
        """CREATE TABLE {t[records]} (id {id}, uid TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, rev BIGINT NOT NULL,
           kind TEXT NOT NULL, block TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL, said_at BIGINT,
           created_at BIGINT NOT NULL, expires_at BIGINT, superseded_by TEXT, archived_at BIGINT,
           sid BIGINT, seq BIGINT, speaker TEXT NOT NULL DEFAULT '', tokens BIGINT NOT NULL DEFAULT 0)""",
        "CREATE INDEX {i[records_kind]} ON {t[records]} (owner, kind) WHERE superseded_by IS NULL",
        "CREATE INDEX {i[records_rev]} ON {t[records]} (owner, rev)",
        """CREATE TABLE {t[record_sources]} (record_id BIGINT NOT NULL, sid BIGINT NOT NULL, seq BIGINT NOT NULL,
           PRIMARY KEY (record_id, sid, seq))""",
        "CREATE INDEX {i[record_sources_place]} ON {t[record_sources]} (sid, seq)",
        """CREATE TABLE {t[embeddings]} (record_id BIGINT NOT NULL, model TEXT NOT NULL, vec {bytes} NOT NULL,
           PRIMARY KEY (record_id, model))""",
        """CREATE TABLE {t[terms]} (record_id BIGINT PRIMARY KEY, ids {bytes} NOT NULL,
           counts {bytes} NOT NULL)""",
    ),
    (
        """CREATE TABLE {t[packs]} (pack TEXT NOT NULL, part INTEGER NOT NULL, parts INTEGER NOT NULL,
           owner TEXT NOT NULL, model TEXT NOT NULL, epoch BIGINT NOT NULL, rev BIGINT NOT NULL, body {bytes} NOT NULL,
           PRIMARY KEY (pack, part))""",
        "CREATE INDEX {i[packs_owner]} ON {t[packs]} (owner, model)",
    ),
    (
        """CREATE TABLE {t[forgetting]} (id {id}, user_id TEXT NOT NULL, token TEXT NOT NULL UNIQUE, spec TEXT NOT NULL,
           done TEXT NOT NULL, started_at BIGINT NOT NULL, finished_at BIGINT, records_until BIGINT)""",
        """CREATE TABLE {t[forgotten]} (id {id}, job BIGINT NOT NULL, user_id TEXT NOT NULL, block TEXT NOT NULL,
           what TEXT NOT NULL)""",
        # Without it each forgotten session reads all dead letters.
        "CREATE INDEX {i[dead_sid]} ON {t[dead]} (sid)",
    ),
    (
        "CREATE TABLE {t[visits]} (record_id BIGINT PRIMARY KEY, n BIGINT NOT NULL, last_at BIGINT NOT NULL)",
        "ALTER TABLE {t[records]} ADD COLUMN parent TEXT",
        "CREATE INDEX {i[records_parent]} ON {t[records]} (parent) WHERE parent IS NOT NULL",
    ),
    (
        """CREATE TABLE {t[index_marks]} (owner TEXT NOT NULL, model TEXT NOT NULL, space TEXT NOT NULL,
           epoch BIGINT NOT NULL, rev BIGINT NOT NULL, busy TEXT, PRIMARY KEY (owner, model))""",
    ),
)
VERSION = len(_MIGRATIONS)


async def migrate(database: Database, tables: Tables, *, now: Callable[[], int]) -> None:
    """Bring the database to this version: once, whoever comes first, resumable, never backwards.

    Args:
        database: Where.
        tables: The tables' names.
        now: Clock in microseconds since 1970.

    Raises:
        ForeignTableError: A stock chat store's table stands under the wanted name; nothing was written.
        SchemaVersionError: The database belongs to a newer version of this package.
    """

    async def work(connection: AsyncConnection) -> None:
        found = await connection.run_sync(_look, tables)
        if found == VERSION:
            return
        if not database.sqlite:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _MIGRATION_LOCK})
            if tables.metadata.schema:
                await connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{tables.metadata.schema}"'))
            found = await connection.run_sync(_look, tables)
        if found == 0:
            await connection.run_sync(tables.versions.create, checkfirst=True)
        for number in range(found + 1, VERSION + 1):
            for statement in _MIGRATIONS[number - 1]:
                await connection.execute(text(_filled(statement, tables, sqlite=database.sqlite)))
                failpoints.reach("migrate.statement")
            await connection.execute(insert(tables.versions).values(version=number, applied_at=now()))

    await database.write(work, opening=True)
    failpoints.reach("migrate.done")


async def tables_exist(database: Database, tables: Tables) -> bool:
    """Whether the tables are there; makes none."""

    async def work(connection: AsyncConnection) -> bool:
        return await connection.run_sync(_look, tables) > 0

    return await database.read(work, opening=True)


def _look(connection: Any, tables: Tables) -> int:
    schema = tables.metadata.schema
    # SQLite does not tell upper from lower case, PostgreSQL does.
    folded = str.lower if connection.dialect.name == "sqlite" else str
    names = {folded(name) for name in inspect(connection).get_table_names(schema=schema)}
    if folded(tables.prefix) in names and is_stock(connection, tables.prefix, schema):
        _refuse_stock(tables.prefix)
    if folded(tables.versions.name) not in names:
        return 0
    found = max(connection.execute(select(tables.versions.c.version)).scalars(), default=0)
    if found > VERSION:
        raise SchemaVersionError(
            f"The tables {tables.prefix}_* have schema version {found}.",
            allowed=f"This release knows versions up to {VERSION}.",
            remedy="Install the newer llama-index-memory-tiers that wrote them, or choose another table_name.",
        )
    return int(found)


def is_stock(connection: Any, table: str, schema: str | None) -> bool:
    """Whether a table that exists is one of LlamaIndex's `SQLAlchemyChatStore`."""
    return {column["name"] for column in inspect(connection).get_columns(table, schema=schema)} >= _STOCK_COLUMNS


def _refuse_stock(prefix: str) -> None:
    taken_over = f"adopt(stock_table={prefix!r}, user_id='…')"
    raise ForeignTableError(
        f"The database holds a table {prefix!r} of LlamaIndex's SQLAlchemyChatStore.",
        allowed="Nothing is written beside it unasked, so that its history is not taken for lost.",
        remedy="Call Storage(…, table_name='another_name') to start anew, or "
        f"await Storage(…, table_name='another_name').{taken_over} to take its history over.",
    )


class _Quoted(dict[str, str]):
    """Name → quoted name with prefix, as PostgreSQL folds bare names to lower case."""

    def __init__(self, prefix: str, schema: str | None = None) -> None:
        super().__init__()
        self._before = f'"{schema}"."{prefix}_' if schema else f'"{prefix}_'

    def __missing__(self, name: str) -> str:
        return f'{self._before}{name}"'


def _filled(statement: str, tables: Tables, *, sqlite: bool) -> str:
    return statement.format(
        t=_Quoted(tables.prefix, tables.metadata.schema),
        i=_Quoted(tables.prefix),
        id="INTEGER PRIMARY KEY AUTOINCREMENT" if sqlite else "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
        bytes="BLOB" if sqlite else "BYTEA",
    )
