"""Transactions retry, finish once begun, and commit as one; engines belong to loops; errors name things."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sqlite3
import ssl
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from running import MakeStorage
from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from llama_index_memory_tiers import Storage
from llama_index_memory_tiers.errors import (
    ConfigurationError,
    MemoryTiersError,
    MissingExtraError,
    StorageClosedError,
    StorageError,
    StorageUnavailableError,
)
from llama_index_memory_tiers.storage import Entry, sqlite
from llama_index_memory_tiers.storage import database as database_module

SECRET = "hunter2-Zq9"


def entry(uid: str, *, tokens: int = 1) -> Entry:
    message = '{"role":"user","additional_kwargs":{},"blocks":[{"block_type":"text","text":"' + uid + '"}]}'
    return Entry(uid, "user", tokens, "words", 1, message)


async def uids(storage: Storage, session_id: str = "s") -> list[str]:
    session = await storage.log.session("", session_id)
    assert session is not None
    found, _ = await storage.log.read(session.sid, session_id)
    return [stored.id for stored in found]


async def put(storage: Storage, uid: str, session_id: str = "s") -> None:
    await storage.log.append("", session_id, [entry(uid)], now=storage.now())


async def is_consistent(storage: Storage, session_id: str = "s") -> bool:
    """Sequence numbers tile 1 to head, and the window's size is the sum of its messages."""
    session = await storage.log.session("", session_id)
    assert session is not None
    found, _ = await storage.log.read(session.sid, session_id)
    window = await storage.log.window("", session_id)
    tiles = [stored.seq for stored in found] == list(range(1, session.head_seq + 1))
    return tiles and session.active_tokens == sum(stored.tokens for stored in window.messages)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "LONGEST_PAUSE_SECONDS", 0.001)


# --- retries --------------------------------------------------------------------------------------------------


def fault(words: str, *, sqlstate: str | None = None, invalidated: bool = False) -> OperationalError:
    original = sqlite3.OperationalError(words)
    if sqlstate is not None:
        original.sqlstate = sqlstate  # type: ignore[attr-defined]
    return OperationalError("SELECT ?", {"p": SECRET}, original, connection_invalidated=invalidated)


PASSING = [
    fault("database is locked"),
    fault("deadlock detected", sqlstate="40P01"),
    fault("could not serialize", sqlstate="40001"),
    fault("lock not available", sqlstate="55P03"),
    fault("terminating connection", sqlstate="57P01"),
    fault("connection failure", sqlstate="08006"),
    fault("gone", invalidated=True),
    ConnectionResetError("reset"),
    TimeoutError("late"),
]


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("error", PASSING, ids=str)
async def test_passing_faults_are_outlived_and_the_whole_transaction_runs_again(
    make_storage: MakeStorage, error: Exception
) -> None:
    storage = await make_storage("file").aopen()
    tries = 0

    async def work(connection: AsyncConnection) -> str:
        nonlocal tries
        tries += 1
        name = storage._tables.owners.fullname
        await connection.execute(text(f"INSERT INTO {name} VALUES ('o', 0, {tries})"))  # noqa: S608
        if tries < 3:
            raise error
        return "done"

    assert await storage._database.write(work) == "done"
    assert tries == 3
    assert await storage._database.read(lambda c: _scalar(c, storage, "rev")) == 3


async def _scalar(connection: AsyncConnection, storage: Storage, column: str) -> Any:
    query = f"SELECT {column} FROM {storage._tables.owners.fullname}"  # noqa: S608
    return (await connection.execute(text(query))).scalar_one_or_none()


AWAY = [FileNotFoundError("no socket"), socket.gaierror("no name"), OSError(errno.ENETUNREACH, "no route")]


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("error", AWAY, ids=str)
async def test_a_server_that_is_away_is_waited_for(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    storage = await make_storage("postgres").aopen()
    real, refused = storage._database._engine, iter((error, error))

    async def engine() -> AsyncEngine:
        for away in refused:
            raise away
        return await real()

    monkeypatch.setattr(storage._database, "_engine", engine)
    assert (await storage.log.append("", "s", [entry("1")], now=1)).stored == 1


@pytest.mark.usefixtures("quick_retries")
async def test_a_server_that_refuses_us_is_not_asked_again(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = await make_storage("postgres").aopen()
    asked = 0

    async def engine() -> AsyncEngine:
        nonlocal asked
        asked += 1
        raise ssl.SSLError("certificate verify failed")

    monkeypatch.setattr(storage._database, "_engine", engine)
    with pytest.raises(StorageError):
        await storage.log.session("", "s")
    assert asked == 1


@pytest.mark.usefixtures("quick_retries")
async def test_a_fault_that_stays_is_reported_after_ten_tries_without_a_trace(storage: Storage) -> None:
    await storage.aopen()
    tries = 0

    async def work(connection: AsyncConnection) -> None:
        nonlocal tries
        tries += 1
        await connection.execute(text(f"INSERT INTO {storage._tables.owners.fullname} VALUES ('o', 0, 1)"))  # noqa: S608
        raise fault("database is locked")

    with pytest.raises(StorageUnavailableError, match=r"did not answer \(database is locked\) in 10 tries") as caught:
        await storage._database.write(work)
    assert tries == 10
    assert SECRET not in str(caught.value)
    assert await storage._database.read(lambda c: _scalar(c, storage, "rev")) is None


@pytest.mark.usefixtures("quick_retries")
async def test_a_file_that_stays_locked_is_not_waited_for_ten_times(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await storage.aopen()
    now, tries = 0.0, 0

    async def work(_: AsyncConnection) -> None:
        nonlocal now, tries
        now, tries = now + 30, tries + 1  # as long as SQLite itself waits
        raise fault("database is locked")

    monkeypatch.setattr("llama_index_memory_tiers.storage.database.monotonic", lambda: now)
    with pytest.raises(StorageUnavailableError, match=r"is locked\) in 3 tries, 90 s") as caught:
        await storage._database.write(work)
    assert tries == 3
    assert ("Close what has the file open" in str(caught.value)) == storage._database.sqlite
    assert "waiting for the database (database is locked)" in caplog.text


@pytest.mark.parametrize("error", [fault("no such column: x"), fault("disk full", sqlstate="53100")], ids=str)
async def test_other_faults_are_reported_at_once_without_the_parameters(
    make_storage: MakeStorage, error: DBAPIError
) -> None:
    storage = await make_storage("file").aopen()
    tries = 0

    async def work(_: AsyncConnection) -> None:
        nonlocal tries
        tries += 1
        raise error

    with pytest.raises(StorageError) as caught:
        await storage._database.write(work)
    assert tries == 1
    assert SECRET not in "".join(_chain(caught.value))


def _chain(error: BaseException | None) -> list[str]:
    return [] if error is None else [repr(error), str(error), *_chain(error.__cause__)]


async def test_each_statement_goes_to_the_thread_of_sqlite_once(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = await make_storage("file").aopen()
    await put(storage, "a")
    trips, real = [], aiosqlite.Connection._execute

    async def counted(self: Any, *args: Any) -> Any:
        trips.append(args)
        return await real(self, *args)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(aiosqlite.Connection, "_execute", counted)
    await storage.log.window("", "s")
    assert len(trips) == 1
    trips.clear()
    before = storage._database.statements
    await put(storage, "b")
    assert len(trips) == storage._database.statements - before - 1  # BEGIN goes along with the first


async def test_where_a_transaction_could_not_begin_no_later_statement_of_it_stands_alone(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_SECONDS", 0.05)
    storage = await make_storage("file").aopen()
    other = sqlite3.connect(tmp_path / "memory.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")

    async def stubborn(connection: AsyncConnection) -> None:
        with contextlib.suppress(OperationalError):  # the lock is refused
            await connection.execute(text("SELECT 1"))
        other.execute("COMMIT")
        await connection.execute(text(f"INSERT INTO {storage._tables.owners.fullname} VALUES ('o', 0, 1)"))  # noqa: S608
        raise ValueError("all of it goes back")

    with pytest.raises(ValueError, match="all of it"):
        await storage._database.write(stubborn)
    assert await storage._database.read(lambda c: _scalar(c, storage, "rev")) is None
    other.execute("BEGIN IMMEDIATE")

    async def idle(_: AsyncConnection) -> None:
        raise ValueError("before any statement")

    with pytest.raises(ValueError, match="before any"):
        await storage._database.write(idle)  # without waiting for the lock
    other.execute("COMMIT")
    other.close()
    await put(storage, "a")
    assert await uids(storage) == ["a"]


async def test_a_statement_says_how_many_rows_it_changed_and_what_it_returned(storage: Storage) -> None:
    await storage.aopen()
    owners = storage._tables.owners
    named = [{"owner": name, "epoch": 0, "rev": 0} for name in ("u:a", "u:b", "u:c")]

    async def work(connection: AsyncConnection) -> list[Any]:
        await connection.execute(insert(owners), named)
        changed = await connection.execute(update(owners).where(owners.c.owner != "u:b").values(rev=7))
        gone = await connection.execute(delete(owners).where(owners.c.rev == 7).returning(owners.c.owner))
        none = await connection.execute(delete(owners).where(owners.c.rev == 7))
        left = await connection.execute(select(owners.c.owner))
        return [changed.rowcount, sorted(gone.scalars()), none.rowcount, left.scalar_one()]

    assert await storage._database.write(work) == [2, ["u:a", "u:c"], 0, "u:b"]


async def test_an_error_of_the_work_itself_rolls_back_and_comes_through(storage: Storage) -> None:
    await storage.aopen()

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(text(f"INSERT INTO {storage._tables.owners.fullname} VALUES ('o', 0, 1)"))  # noqa: S608
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await storage._database.write(work)
    assert await storage._database.read(lambda c: _scalar(c, storage, "rev")) is None
    await put(storage, "next")


async def test_a_duplicate_is_the_callers_to_judge(storage: Storage) -> None:
    await storage.aopen()

    async def work(connection: AsyncConnection) -> None:
        for _ in range(2):
            await connection.execute(text(f"INSERT INTO {storage._tables.owners.fullname} VALUES ('o', 0, 1)"))  # noqa: S608

    with pytest.raises(IntegrityError):
        await storage._database.write(work)


async def test_a_lost_connection_costs_no_message_and_doubles_none(make_storage: MakeStorage) -> None:
    storage = await make_storage("postgres").aopen()

    async def kill(connection: AsyncConnection) -> None:
        await connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                 " AND pid <> pg_backend_pid() AND application_name = 'victim'")
        )  # fmt: skip

    async def name(connection: AsyncConnection) -> None:
        await connection.execute(text("SET application_name = 'victim'"))

    killer = make_storage("postgres")
    for number in range(6):
        await storage._database.read(name)
        await killer._database.read(kill)
        await put(storage, f"m{number}")
    assert await uids(storage) == [f"m{number}" for number in range(6)]
    assert await is_consistent(storage)


# --- cancellation and closing ---------------------------------------------------------------------------------


async def test_puts_cancelled_in_mid_flight_leave_the_store_whole(storage: Storage) -> None:
    await put(storage, "first")
    tasks = []
    for number in range(200):
        tasks.append(asyncio.create_task(put(storage, f"m{number}")))
        if number % 3 == 0:
            await asyncio.sleep(0.0003 * (number % 7))
        if number % 2:
            tasks[-1].cancel()
            tasks[number // 2].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(outcome, asyncio.CancelledError) for outcome in done)
    await put(storage, "last")
    kept = await uids(storage)
    assert kept[0] == "first"
    assert {f"m{number}" for number, outcome in enumerate(done) if outcome is None} <= set(kept)
    assert len(kept) == len(set(kept))
    assert await is_consistent(storage)


async def test_a_cancelled_read_leaves_the_pool_whole(storage: Storage) -> None:
    await put(storage, "m")
    for number in range(40):
        task = asyncio.create_task(uids(storage))
        await asyncio.sleep(0.0002 * (number % 5))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await uids(storage) == ["m"]


async def test_a_read_opens_no_transaction_and_leaves_writes_theirs(make_storage: MakeStorage) -> None:
    storage = await make_storage("postgres").aopen()

    async def inside(connection: AsyncConnection) -> bool:
        await connection.execute(text("SELECT 1"))
        driver = (await connection.get_raw_connection()).driver_connection
        assert driver is not None
        return bool(driver.is_in_transaction())

    assert not await storage._database.read(inside)
    assert await storage._database.write(inside)
    assert not await storage._database.read(inside)


async def test_closing_waits_for_what_is_running(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    await put(storage, "first")
    tasks = [asyncio.create_task(put(storage, f"m{number}")) for number in range(10)]
    await asyncio.sleep(0)
    await storage.aclose()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, StorageClosedError) for outcome in outcomes)
    again = make_storage(storage_kind)
    stored = {f"m{number}" for number, outcome in enumerate(outcomes) if outcome is None}
    assert set(await uids(again)) == {"first", *stored}


async def test_a_closed_storage_says_so(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    await put(storage, "m")
    await storage.aclose()
    await storage.aclose()
    assert storage.closed
    with pytest.raises(StorageClosedError, match="closed"):
        await put(storage, "n")
    with pytest.raises(StorageClosedError, match="or a new Storage"):
        await storage.log.session("", "s")


async def test_closing_before_the_first_use_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "memory.db"
    storage = Storage(path)
    await storage.aclose()
    assert not path.exists()
    with pytest.raises(StorageClosedError):
        await storage.aopen()


async def test_a_private_storage_leaves_nothing_behind() -> None:
    storage = Storage()
    await put(storage, "m")
    folder = Path(storage._address.url.database or "").parent
    assert folder.is_dir()
    await storage.aclose()
    assert not folder.exists()


# --- loops and threads ----------------------------------------------------------------------------------------


def test_one_storage_serves_one_loop_after_another(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    for number in range(3):
        asyncio.run(put(storage, f"m{number}"))
        # The loop that ended took its connections along; the thread that writes keeps its own.
        assert all(loop.is_running() for loop in storage._database._engines)
    assert asyncio.run(uids(storage)) == ["m0", "m1", "m2"]
    asyncio.run(storage.aclose())


def test_one_storage_serves_many_threads_at_once(make_storage: MakeStorage, storage_kind: str) -> None:
    storage = make_storage(storage_kind)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        async def puts() -> None:
            for number in range(10):
                await put(storage, f"{thread}-{number}")

        try:
            asyncio.run(puts())
        except BaseException as error:  # noqa: BLE001  # shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []

    async def check() -> None:
        kept = await uids(storage)
        assert sorted(kept) == sorted(f"{thread}-{number}" for thread in range(4) for number in range(10))
        for thread in range(4):
            assert [uid for uid in kept if uid[0] == str(thread)] == [f"{thread}-{number}" for number in range(10)]
        assert await is_consistent(storage)
        await storage.aclose()

    asyncio.run(check())


# --- the user's own engine ------------------------------------------------------------------------------------


@pytest.fixture
async def engine(storage_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    if storage_kind == "postgres":
        made = create_async_engine(request.getfixturevalue("postgres_uri"))
    else:
        made = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'theirs.db'}")
    yield made
    await made.dispose()


async def _theirs(engine: AsyncEngine, *statements: str) -> list[Any]:
    async with engine.begin() as connection:
        results = [await connection.execute(text(statement)) for statement in statements]
        return list(results[-1].scalars()) if results[-1].returns_rows else []


def _settings(kind: str) -> list[str]:
    if kind == "postgres":
        return ["SHOW transaction_isolation", "SHOW search_path", "SHOW lock_timeout"]
    return ["PRAGMA foreign_keys", "PRAGMA busy_timeout", "PRAGMA synchronous", "PRAGMA temp_store"]


async def test_a_users_engine_is_shared_and_left_as_it_was(engine: AsyncEngine, storage_kind: str) -> None:
    before = [await _theirs(engine, statement) for statement in _settings(storage_kind)]
    pool = engine.sync_engine.pool
    options = dict(engine.sync_engine.get_execution_options())
    await _theirs(engine, "DROP TABLE IF EXISTS mine", "CREATE TABLE mine (x INTEGER)", "INSERT INTO mine VALUES (7)")
    async with Storage(engine=engine, table_name="ours_beside_mine") as storage:
        await put(storage, "m0")
        await asyncio.gather(*(put(storage, f"m{number}") for number in range(1, 8)))
        assert len(await uids(storage)) == 8
        assert await _theirs(engine, "SELECT x FROM mine") == [7]
    assert engine.sync_engine.pool is pool
    assert dict(engine.sync_engine.get_execution_options()) == options
    assert [await _theirs(engine, statement) for statement in _settings(storage_kind)] == before
    async with engine.connect() as connection:
        await connection.execute(text("INSERT INTO mine VALUES (8)"))
        await connection.rollback()  # their transactions are still transactions
    assert await _theirs(engine, "SELECT x FROM mine") == [7]


async def test_no_read_passes_an_opening_that_another_loop_has_not_finished(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier process left to be forgotten must be gone before anything is read, whoever opens."""
    begun, may_go_on, finished = threading.Event(), threading.Event(), []

    async def finish_slowly() -> None:
        begun.set()
        await asyncio.to_thread(may_go_on.wait, 30)
        await storage.log.session("", "s")  # opening reads on its own account
        finished.append(True)

    monkeypatch.setattr(storage._database, "after_open", finish_slowly)
    writing = asyncio.create_task(put(storage, "a"))  # a write opens in a thread of its own
    await asyncio.to_thread(begun.wait, 30)
    reading = asyncio.create_task(storage.log.session("", "s"))
    await asyncio.wait({reading}, timeout=0.05)
    assert not reading.done()
    may_go_on.set()
    await asyncio.gather(writing, reading)
    assert finished


async def test_an_opening_that_failed_is_tried_again_by_the_next_use(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [StorageError("not yet", allowed="later", remedy="again")]
    finish = storage._database.after_open
    assert finish is not None

    async def finish_late() -> None:
        if failures:
            raise failures.pop()
        await finish()

    monkeypatch.setattr(storage._database, "after_open", finish_late)
    with pytest.raises(StorageError, match="not yet"):
        await put(storage, "a")
    await put(storage, "a")
    assert await uids(storage) == ["a"]


async def test_a_users_engine_may_have_a_transaction_open_beside_ours(engine: AsyncEngine, storage_kind: str) -> None:
    await _theirs(engine, "DROP TABLE IF EXISTS beside", "CREATE TABLE beside (x INTEGER)")
    async with Storage(engine=engine, table_name="ours_beside_theirs") as storage:
        await put(storage, "before")
        async with engine.connect() as connection:
            await connection.execute(text("SELECT count(*) FROM beside"))
            await put(storage, "meanwhile")
            await connection.execute(text("INSERT INTO beside VALUES (1)"))
            await connection.rollback()
        await put(storage, "after")
        assert await uids(storage) == ["before", "meanwhile", "after"]
    assert await _theirs(engine, "SELECT count(*) FROM beside") == [0]


async def test_a_users_engine_that_belongs_to_a_loop_is_refused_on_another(
    engine: AsyncEngine, storage_kind: str
) -> None:
    storage = Storage(engine=engine, table_name="ours_of_one_loop")
    await put(storage, "here")
    if storage_kind == "postgres":
        with pytest.raises(ConfigurationError, match="event loop") as caught:
            await asyncio.to_thread(asyncio.run, put(storage, "there"))
        assert "address" in caught.value.remedy
        assert await uids(storage) == ["here"]
    else:  # aiosqlite's connections belong to no loop
        await asyncio.to_thread(asyncio.run, put(storage, "there"))
        assert await uids(storage) == ["here", "there"]
    await storage.aclose()


def test_two_threads_may_leave_one_dead_loop(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "memory.db")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(storage.log.session("", "s"))
    loop.close()
    storage._database._leave(loop)
    storage._database._leave(loop)  # the other thread had listed it, too
    assert loop not in storage._database._engines
    asyncio.run(storage.aclose())


def test_an_in_memory_engine_is_refused() -> None:
    for uri in ("sqlite+aiosqlite:///:memory:", "sqlite+aiosqlite://"):
        engine = create_async_engine(uri)
        with pytest.raises(ConfigurationError, match="one connection for all") as caught:
            Storage(engine=engine)
        assert "storage=None" in caught.value.remedy


def test_an_engine_must_be_an_async_engine() -> None:
    with pytest.raises(ConfigurationError, match="engine=str"):
        Storage(engine="sqlite://")  # type: ignore[arg-type]


# --- addresses and what errors say ----------------------------------------------------------------------------

BAD = {
    f"postgresql://ann:{SECRET}@db.example/chat": ("postgresql+asyncpg", "llama-index-memory-tiers[postgres]"),
    f"postgresql+psycopg2://ann:{SECRET}@db.example/chat": ("asyncpg",),
    f"postgres://ann:{SECRET}@db.example/chat": ("postgresql+asyncpg",),
    f"mysql+aiomysql://ann:{SECRET}@db.example/chat": ("SQLite and PostgreSQL",),
    "sqlite:///memory.db": ("sqlite+aiosqlite",),
    f"://ann:{SECRET}@db.example": ("cannot be read",),
    f"postgresql+asyncpg://ann:{SECRET}@db.example:port/chat": ("cannot be read",),
    f"postgresql+asyncpg://ann:at@{SECRET}:colon@db.example/chat": ("cannot be read",),
    f"postgresql+asyncpg://ann:at@{SECRET}@db.example/chat": ("cannot be read",),
}


@pytest.mark.parametrize("uri", BAD)
def test_a_wrong_address_is_refused_by_name_and_without_its_password(uri: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Storage(uri)
    shown = "".join(_chain(caught.value))
    assert all(words in shown for words in BAD[uri])
    assert SECRET not in shown


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'llama-index-memory-tiers\[postgres\]'") as caught:
        Storage(f"postgresql+asyncpg://ann:{SECRET}@db.example/chat")
    assert SECRET not in "".join(_chain(caught.value))


def test_passwords_in_the_query_of_a_uri_are_not_shown_either() -> None:
    storage = Storage(f"postgresql+asyncpg:///chat?host=db.example&password={SECRET}")
    assert SECRET not in repr(storage) + storage.address
    assert "db.example" in storage.address


@pytest.mark.parametrize("given", ["no/such/folder/memory.db", "", "   ", "."])
def test_a_path_that_cannot_be_a_database_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        Storage(given)
    assert repr(given) in caught.value.given
    assert list(tmp_path.iterdir()) == []


def test_no_password_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(f"postgresql+asyncpg://ann:{SECRET}@db.example/chat")
    shown = [repr(storage), storage.address, repr(storage._database), repr(storage._address)]
    assert all(SECRET not in text for text in shown)
    assert "ann:***@db.example" in storage.address


@pytest.mark.usefixtures("quick_retries")
async def test_an_unreachable_server_is_reported_without_its_password() -> None:
    storage = Storage(f"postgresql+asyncpg://ann:{SECRET}@localhost:9/chat")
    with pytest.raises(StorageError) as caught:
        await storage.aopen()
    assert SECRET not in "".join(_chain(caught.value))
    await storage.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_a_wrong_database_is_reported_without_its_password(postgres_uri: str) -> None:
    from sqlalchemy.engine import make_url  # noqa: PLC0415

    wrong = make_url(postgres_uri).set(database="no_such_database", password=SECRET)
    storage = Storage(wrong.render_as_string(hide_password=False))
    with pytest.raises(StorageError, match="no_such_database") as caught:
        await storage.aopen()
    assert SECRET not in "".join(_chain(caught.value))
    await storage.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_a_file_that_is_no_database_is_reported_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes " * 100)
    storage = Storage(path)
    with pytest.raises(StorageError, match="not a database"):
        await storage.aopen()
    await storage.aclose()
    assert path.read_text().startswith("these are my notes")


def test_paths_of_all_kinds_name_the_same_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = str(tmp_path / "a b.db")
    for given in ("a b.db", "./a b.db", tmp_path / "a b.db", "~/a b.db", f"sqlite+aiosqlite:///{wanted}"):
        assert Storage(given)._address.url.database == wanted


def test_every_error_here_has_three_parts() -> None:
    for uri in BAD:
        with pytest.raises(MemoryTiersError) as caught:
            Storage(uri)
        assert all((caught.value.given, caught.value.allowed, caught.value.remedy))
