"""Databases of every earlier version open, keep what they hold, and go on.

`fixtures/schema_v<number>_<database>.sql` are dumps that the release with that schema wrote; `schema_v<number>.jsonl`
is what they hold: an export of the user `ada`. A release with a new schema version adds its own and edits none.
"""

from __future__ import annotations

import asyncio
import io
import signal
import sqlite3
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest
from doubles import RecordingBlock, absorb_all, refuse_content, rows, said, turn

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock, failpoints
from llama_index_memory_tiers.storage.schema import VERSION
from llama_index_memory_tiers.testing import HashEmbedding

FIXTURES = Path(__file__).parent.parent / "fixtures"
RELEASED = [1]
VERSIONS = sorted(int(path.stem.removeprefix("schema_v")) for path in FIXTURES.glob("schema_v*.jsonl"))

OldStorage = Callable[[int], Awaitable[Storage]]


@pytest.fixture
def old_storage(make_storage: Callable[..., Storage], storage_kind: str, tmp_path: Path) -> OldStorage:
    """What opens a database of an old version: a function of the version, whose storage has not been used yet."""
    schema = f"v_{uuid.uuid4().hex[:12]}"

    async def make(version: int) -> Storage:
        if storage_kind == "file":
            dump = (FIXTURES / f"schema_v{version}_sqlite.sql").read_text("utf-8")
            await asyncio.to_thread(restore, tmp_path / "memory.db", dump)
            return make_storage("file")
        storage = make_storage("postgres", db_schema=schema)
        address = storage._address.url.set(drivername="postgresql").render_as_string(hide_password=False)
        connection = await asyncpg.connect(address)
        try:
            await connection.execute(f'CREATE SCHEMA "{schema}"; SET search_path TO "{schema}"')
            await connection.execute((FIXTURES / f"schema_v{version}_postgres.sql").read_text("utf-8"))
        finally:
            await connection.close()
        return storage

    return make


def restore(path: Path, dump: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(dump)
    connection.close()


def memory_of(storage: Storage) -> TieredMemory:
    blocks = [
        VectorMemoryBlock(embed_model=HashEmbedding()),
        RecordingBlock(),
        RecordingBlock(name="Fragile", on_prepare=refuse_content("unlesbar")),
    ]
    return TieredMemory(
        storage=storage, user_id="ada", session_id="chat", delivery="inline", window_messages=4, memory_blocks=blocks
    )


async def exported(storage: Storage) -> bytes:
    stream = io.BytesIO()
    await memory_of(storage).aexport(stream)
    return stream.getvalue()


async def versions(storage: Storage) -> list[int]:
    return [row.version for row in await rows(storage, "SELECT version FROM {t}_schema ORDER BY version")]


def test_there_is_a_fixture_of_every_released_version() -> None:
    assert RELEASED == VERSIONS
    assert max(RELEASED) < VERSION


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_old_database_opens_with_everything_in_it(old_storage: OldStorage, version: int) -> None:
    storage = await old_storage(version)
    assert await exported(storage) == (FIXTURES / f"schema_v{version}.jsonl").read_bytes()
    assert await versions(storage) == list(range(1, VERSION + 1))


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_old_database_goes_on(old_storage: OldStorage, version: int) -> None:
    memory = memory_of(await old_storage(version))
    question = "what is the cat 汤姆 called?"
    assert "汤姆" in repr(await memory.aget(question))
    assert len(await memory.adead_letters()) == 1
    await memory.aput_messages(turn(99))
    await absorb_all(memory)
    assert [one.text for one in await memory.amessages()][-2:] == ["question 99", "answer 99"]
    cat = next(one for one in await memory.amessages() if "汤姆" in one.text)
    assert (await memory.aforget(ids=[cat.id])).complete
    assert "汤姆" not in repr(await memory.aget("what is the cat called?"))


CHILD = """
    import asyncio, os, sys
    from llama_index_memory_tiers import Storage

    async def first_use(address, schema):
        storage = Storage(address, db_schema=schema or None)
        await storage.log.window("ada", "chat")
        await storage.aclose()

    children, start = [], os.pipe()
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            os.close(start[1])
            os.read(start[0], 1)  # all start when the parent closes its end
            asyncio.run(first_use(*sys.argv[1:]))
            os._exit(0)
        children.append(pid)
    os.close(start[1])
    sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


@pytest.mark.parametrize("version", VERSIONS)
async def test_three_processes_upgrade_once(old_storage: OldStorage, version: int) -> None:
    storage = await old_storage(version)
    place = storage._address.url.render_as_string(hide_password=False), storage.db_schema or ""
    command = [sys.executable, "-c", textwrap.dedent(CHILD), *place]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert await exported(storage) == (FIXTURES / f"schema_v{version}.jsonl").read_bytes()
    assert await versions(storage) == list(range(1, VERSION + 1))


DYING = """
    import asyncio, os, signal, sys
    from llama_index_memory_tiers import Storage, failpoints

    left = int(sys.argv[3])

    def die(name):
        global left
        if name == "migrate.statement":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    async def first_use(address, schema):
        await Storage(address, db_schema=schema or None).aopen()

    with failpoints.armed(die):
        asyncio.run(first_use(*sys.argv[1:3]))
"""


async def test_an_upgrade_that_was_killed_between_two_statements_is_done_by_the_next(old_storage: OldStorage) -> None:
    storage = await old_storage(1)
    place = storage._address.url.render_as_string(hide_password=False), storage.db_schema or ""
    for statement in ("1", "3"):
        command = [sys.executable, "-c", textwrap.dedent(DYING), *place, statement]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert await exported(storage) == (FIXTURES / "schema_v1.jsonl").read_bytes()
    assert await versions(storage) == list(range(1, VERSION + 1))


async def test_an_upgrade_that_fails_in_the_middle_leaves_the_old_version(old_storage: OldStorage) -> None:
    storage = await old_storage(1)

    def fail(name: str) -> None:
        if name == "migrate.statement":
            raise MemoryError

    with failpoints.armed(fail), pytest.raises(MemoryError):
        await storage.aopen()
    await memory_of(storage).aput(said("user", "goes on"))
    assert await versions(storage) == list(range(1, VERSION + 1))
