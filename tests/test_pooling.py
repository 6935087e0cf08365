"""Connections that belong to nobody: pgbouncer in transaction mode gives each transaction whichever is free."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from doubles import RecordingBlock, absorb_all, assert_in_order, assert_once, said, told, turn
from running import MakeStorage, PostgresServer
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock

PGBOUNCER = shutil.which("pgbouncer")
SERVER_CONNECTIONS = 2


def engine_for(uri: str) -> AsyncEngine:
    """As `docs/scaling.md` tells: pooling is left to pgbouncer, no statement is kept, names are never met again."""
    arguments = {"statement_cache_size": 0, "prepared_statement_name_func": lambda: f"__asyncpg_{uuid4()}__"}
    return create_async_engine(uri, poolclass=NullPool, connect_args=arguments)


@pytest.fixture(scope="module")
def pgbouncer(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a pgbouncer in transaction mode before the server."""
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = str(make_url(postgres_server.uri).query["host"])
    settings = Path(folder) / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\npostgres = host={folder} dbname=postgres user=postgres\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = transaction\ndefault_pool_size = {SERVER_CONNECTIONS}\nmax_client_conn = 200\nserver_login_retry = 1\nclient_login_timeout = 20\n"
    )
    as_owner = ["-u", Path(folder).owner()] if os.geteuid() == 0 else []  # the folder is the server's alone
    log = tmp_path_factory.mktemp("pgbouncer") / "log"
    with log.open("w") as out, subprocess.Popen([PGBOUNCER, *as_owner, settings], stdout=out, stderr=out) as process:
        try:
            for _ in range(500):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.01)
            yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/postgres"
        finally:
            process.terminate()
            settings.unlink()


@pytest.fixture(params=["each transaction on a new connection", "pgbouncer"])
async def pooled(request: pytest.FixtureRequest, make_storage: MakeStorage) -> AsyncIterator[Storage]:
    """A storage none of whose connections lives beyond a transaction, or belongs to anybody."""
    uri = request.getfixturevalue("pgbouncer" if request.param == "pgbouncer" else "postgres_uri")
    engine = engine_for(uri)
    schema = make_storage("postgres").db_schema
    async with Storage(engine=engine, db_schema=schema) as storage:
        yield storage
    await engine.dispose()


async def test_whatever_is_done_needs_nothing_that_outlives_a_transaction(pooled: Storage) -> None:
    """Migrations, puts, deliveries, claims, recall, windows, archives, forgetting, export and import."""
    memory = TieredMemory(
        storage=pooled,
        user_id="ada",
        session_id="chat",
        memory_blocks=[RecordingBlock(), VectorMemoryBlock(embed_model=None)],
        window_messages=6,
        delivery="inline",
    )
    for number in range(6):
        await memory.aput_messages(turn(number))
    await memory.aput(said("user", "the kettle is green"), uid="kettle")
    await absorb_all(memory)
    other = memory.for_session("other", user_id="ada")
    assert "kettle is green" in str(await other.aget("which colour has the kettle?"))
    await memory.aexport(io.BytesIO())
    receipt = await memory.aforget(ids=["kettle"])
    assert receipt.complete
    assert "kettle is green" not in str(await other.aget("which colour has the kettle?"))
    await memory.areset()
    await memory.aclose()


async def test_tasks_of_two_hosts_share_fewer_connections_than_they_are(pooled: Storage) -> None:
    memories = [
        TieredMemory(storage=pooled, user_id="ada", session_id="chat", memory_blocks=[RecordingBlock()])
        for _ in range(2)
    ]

    async def write(memory: TieredMemory, writer: str) -> None:
        for number in range(3):
            await memory.aput(said("user", f"{writer}/{number}"), uid=f"{writer}/{number}")

    await asyncio.gather(
        *(write(memory, f"h{host}t{task}") for host, memory in enumerate(memories) for task in range(8))
    )
    wanted = [f"h{host}t{task}/{number}" for host in range(2) for task in range(8) for number in range(3)]
    contents = [stored.message.content or "" for stored in await memories[0].amessages()]
    assert_once(contents, wanted)
    assert_in_order(contents)
    for memory in memories:
        await absorb_all(memory)
    assert (await told(pooled)).texts == contents
    for memory in memories:
        await memory.aclose()
