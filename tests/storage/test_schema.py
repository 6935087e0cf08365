"""Tables are made once, whoever comes first; foreign and newer ones are recognised before anything is written."""
# ruff: noqa: S608  # the names in these statements are our own

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from doubles import user
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.storage.chat_store.base_db import MessageStatus
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore
from running import MakeStorage
from sqlalchemy import inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import Storage, TieredChatStore, TieredMemory
from llama_index_memory_tiers.errors import ConfigurationError, ForeignTableError, SchemaVersionError
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.storage import DEFAULT_TABLE_NAME
from llama_index_memory_tiers.storage.schema import VERSION, migrate

VERSIONS = [(number,) for number in range(1, VERSION + 1)]


@pytest.fixture
def schema() -> str:
    return f"s_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def make(make_storage: MakeStorage, storage_kind: str, schema: str) -> Callable[..., Storage]:
    """Storages on one database whose tables a test may spoil."""
    return lambda **arguments: make_storage(storage_kind, **{"db_schema": schema, **arguments})


async def run(storage: Storage, *statements: str) -> list[Any]:
    """Run statements on the storage's database; `{}` stands for its schema."""
    where = f'"{storage.db_schema}".' if storage.db_schema else ""

    async def work(connection: AsyncConnection) -> list[Any]:
        results = [await connection.execute(text(statement.replace("{}", where))) for statement in statements]
        return [tuple(row) for row in results[-1]] if results[-1].returns_rows else []

    return await storage._database.write(work, opening=True)


async def tables(storage: Storage) -> set[str]:
    async def work(connection: AsyncConnection) -> set[str]:
        return await connection.run_sync(lambda sync: set(inspect(sync).get_table_names(schema=storage.db_schema)))

    return await storage._database.write(work, opening=True)


# --- making tables --------------------------------------------------------------------------------------------

CHILD = """
    import asyncio, os, sys
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index_memory_tiers import Storage, TieredChatStore

    async def first_uses(number, address, schema):
        storage = Storage(address, db_schema=schema or None)
        await asyncio.gather(*(storage.log.window("", f"s{n}") for n in range(20)))
        store = TieredChatStore(storage)
        await store.add_message("shared", ChatMessage(role="user", content=str(number)))
        await storage.aclose()

    failed, start = [], os.pipe()
    for place in zip(sys.argv[1::2], sys.argv[2::2]):
        children = []
        for number in range(3):
            pid = os.fork()
            if pid == 0:
                os.close(start[1])
                os.read(start[0], 1)  # all start when the parent closes its end
                asyncio.run(first_uses(number, *place))
                os._exit(0)
            children.append(pid)
        os.close(start[1])
        failed += [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
        start = os.pipe()
    sys.exit(len(failed))
"""


async def test_many_first_uses_in_three_processes_make_the_tables_once(make_storage: MakeStorage, schema: str) -> None:
    storages = [make_storage(kind, db_schema=schema) for kind in ("file", "postgres")]
    places = [(one._address.url.render_as_string(hide_password=False), one.db_schema or "") for one in storages]
    command = [sys.executable, "-c", textwrap.dedent(CHILD), *places[0], *places[1]]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for storage in storages:
        kept = await TieredChatStore(storage).get_messages("shared")
        assert sorted(message.content or "" for message in kept) == ["0", "1", "2"]
        assert await run(storage, f"SELECT version FROM {{}}{DEFAULT_TABLE_NAME}_schema") == VERSIONS


async def test_many_first_uses_on_one_loop_make_the_tables_once(make: Callable[..., Storage]) -> None:
    storages = [make() for _ in range(3)]
    await asyncio.gather(*(storages[n % 3].log.window("", f"s{n}") for n in range(21)))
    assert await run(storages[0], f"SELECT version FROM {{}}{DEFAULT_TABLE_NAME}_schema") == VERSIONS


async def test_migrating_again_changes_nothing(make: Callable[..., Storage]) -> None:
    storage = make()
    store = TieredChatStore(storage)
    await store.add_message("s", user("kept"))
    before = await tables(storage)
    for _ in range(2):
        await migrate(storage._database, storage._tables, now=storage.now)
    assert await tables(storage) == before
    assert await store.get_messages("s") == [user("kept")]


async def test_an_open_storage_asks_for_its_tables_only_once(make: Callable[..., Storage]) -> None:
    storage = await make().aopen()
    before = storage.statements
    await storage.aopen()
    assert storage.statements == before


async def test_tables_are_those_that_sqlalchemy_is_told_of(make: Callable[..., Storage]) -> None:
    storage = await make().aopen()

    async def work(connection: AsyncConnection) -> dict[str, set[str]]:
        def look(sync: Any) -> dict[str, set[str]]:
            found = inspect(sync)
            return {
                name: {column["name"] for column in found.get_columns(name, schema=storage.db_schema)}
                for name in found.get_table_names(schema=storage.db_schema)
            }

        return await connection.run_sync(look)

    declared = {table.name: set(table.columns.keys()) for table in storage._tables.metadata.tables.values()}
    assert await storage._database.read(work) == declared


async def test_tables_of_a_newer_version_are_refused_and_left_alone(make: Callable[..., Storage]) -> None:
    await TieredChatStore(make()).add_message("s", user("from the future"))
    newer = VERSION + 1
    storage = make()
    await run(storage, f"INSERT INTO {{}}{DEFAULT_TABLE_NAME}_schema VALUES ({newer}, 0)")
    for _ in range(2):
        with pytest.raises(SchemaVersionError, match=f"schema version {newer}") as caught:
            await storage.log.window("", "s")
    assert f"up to {VERSION}" in caught.value.allowed
    assert await run(storage, f"SELECT count(*) FROM {{}}{DEFAULT_TABLE_NAME}_messages") == [(1,)]


# --- names ----------------------------------------------------------------------------------------------------

LONGEST = "a" * 40


@pytest.mark.parametrize("name", ["memory_tiers", "Memory", "_x1", "select", LONGEST])
async def test_table_names_are_honoured_as_they_are_written(make: Callable[..., Storage], name: str) -> None:
    storage = make(table_name=name)
    memory = TieredMemory(storage=storage, session_id="s", delivery="inline")
    await memory.aput(user("hello"))
    assert [stored.message for stored in await memory.amessages()] == [user("hello")]
    await memory.aclose()
    found = await tables(storage)
    assert {f"{name}_sessions", f"{name}_messages", f"{name}_records"} <= found
    assert all(table.startswith(name) for table in found)


async def test_storages_of_different_table_names_do_not_meet(make: Callable[..., Storage], storage_kind: str) -> None:
    # SQLite takes "one" and "One" for the same table, so there they are the same storage.
    names = ["one", "one_more", *(["One"] if storage_kind == "postgres" else [])]
    for name in names:
        await TieredChatStore(make(table_name=name)).add_message("s", user(name))
    for name in names:
        assert await TieredChatStore(make(table_name=name)).get_messages("s") == [user(name)]
    if storage_kind == "file":
        assert await TieredChatStore(make(table_name="One")).get_messages("s") == [user("one")]


async def test_a_schema_is_made_and_keeps_its_tables(make_storage: MakeStorage, schema: str) -> None:
    from llama_index_memory_tiers import VectorMemoryBlock  # noqa: PLC0415

    for name in (schema, schema.upper()):
        storage = make_storage("postgres", db_schema=name)
        memory = TieredMemory(
            storage=storage, session_id="s", user_id="ann", memory_blocks=[VectorMemoryBlock(embed_model=None)]
        )
        await memory.aput(user(f"I live in {name}."))
        await memory.aflush()
        assert [message.content for message in await memory.aget_all()] == [f"I live in {name}."]
        found = (await memory.for_session("t").aexplain("Where do I live?")).parts[0].kept
        assert len(found) == 1
        await memory.aclose()
        assert f"{DEFAULT_TABLE_NAME}_sessions" in await tables(storage)


def test_a_schema_is_ignored_where_databases_have_none(tmp_path: Path) -> None:
    assert Storage(tmp_path / "memory.db", db_schema="tenant").db_schema is None


BAD_NAMES = ["", " ", "1st", "a-b", "a b", 'a"b', "a;DROP TABLE x", "tablé", "a.b", "a" * 41, "a\n", "a\0", None, 7]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_bad_table_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="table_name=") as caught:
        Storage(table_name=name)
    assert repr(name) in caught.value.given
    assert "letters, digits and underscores" in caught.value.allowed


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name is not None], ids=repr)
def test_bad_schema_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="db_schema=") as caught:
        Storage("postgresql+asyncpg://localhost/chat", db_schema=name)
    assert repr(name) in caught.value.given


# --- LlamaIndex's own table -----------------------------------------------------------------------------------


@pytest.fixture
async def stock(make: Callable[..., Storage], schema: str) -> AsyncIterator[SQLAlchemyChatStore]:
    """A stock chat store with a history, under the default name, in the database of `make`."""
    address = make()._address.url.render_as_string(hide_password=False)
    store = SQLAlchemyChatStore(table_name=DEFAULT_TABLE_NAME, async_database_uri=address, db_schema=schema)
    await store.add_messages("one", [user(f"one {n}") for n in range(5)])
    await store.archive_oldest_messages("one", 2)
    call = ChatMessage(role="assistant", content="猫", additional_kwargs={"tool_calls": [{"id": "1"}]})
    await store.add_messages("two", [user("two \0 \ud800"), call])
    yield store
    assert store._async_engine is not None
    await store._async_engine.dispose()


async def stock_rows(storage: Storage) -> list[Any]:
    return [repr(row) for row in await run(storage, f"SELECT * FROM {{}}{DEFAULT_TABLE_NAME} ORDER BY id")]


@pytest.mark.usefixtures("stock")
async def test_a_stock_table_is_recognised_before_anything_is_written(make: Callable[..., Storage]) -> None:
    storage = make()
    before = await tables(storage), await stock_rows(storage)
    with pytest.raises(ForeignTableError, match="SQLAlchemyChatStore") as caught:
        await TieredChatStore(storage).add_message("s", user("lost?"))
    assert ".adopt(" in caught.value.remedy
    assert (await tables(storage), await stock_rows(storage)) == before


async def test_adopting_copies_the_history_and_leaves_the_table_as_it_was(
    make: Callable[..., Storage], stock: SQLAlchemyChatStore
) -> None:
    storage = make(table_name="memory_tiers")
    before = await stock_rows(storage)
    assert await storage.adopt() == 7
    ours = TieredChatStore(storage)
    assert sorted(await ours.get_keys()) == ["one", "two"]
    for key in ("one", "two"):
        for status in (MessageStatus.ACTIVE, MessageStatus.ARCHIVED, None):
            assert await ours.get_messages(key, status) == await stock.get_messages(key, status)
    assert await stock_rows(storage) == before


async def test_adopted_messages_have_their_old_times_and_are_counted(
    make: Callable[..., Storage], stock: SQLAlchemyChatStore
) -> None:
    storage = make(table_name="memory_tiers")
    await storage.adopt()
    times = await run(storage, f"SELECT timestamp FROM {{}}{DEFAULT_TABLE_NAME} WHERE key = 'one' ORDER BY id")
    memory = TieredMemory(storage=storage, session_id="one")
    stored = await memory.amessages()
    assert [storage_time.created_at.timestamp() for storage_time in stored] == pytest.approx(
        [nanoseconds / 1e9 for (nanoseconds,) in times], abs=1e-5
    )
    shown = await memory.aexplain("?")
    assert shown.window_tokens == sum(memory._estimate_token_count(message) for message in shown.messages) > 0
    await memory.aclose()


async def test_adopting_again_adds_what_came_since(make: Callable[..., Storage], stock: SQLAlchemyChatStore) -> None:
    storage = make(table_name="memory_tiers")
    await storage.adopt()
    assert await storage.adopt() == 0
    await stock.add_messages("one", [user("one 5"), user("one 6")])
    await stock.archive_oldest_messages("one", 4)
    await stock.add_message("three", user("three"), status=MessageStatus.ARCHIVED)
    assert await storage.adopt() == 3
    ours = TieredChatStore(storage)
    for key in ("one", "two", "three"):
        for status in (MessageStatus.ACTIVE, MessageStatus.ARCHIVED):
            assert await ours.get_messages(key, status) == await stock.get_messages(key, status)


@pytest.mark.usefixtures("stock")
async def test_a_damaged_stock_row_costs_itself_only(
    make: Callable[..., Storage], caplog: pytest.LogCaptureFixture
) -> None:
    storage = make(table_name="memory_tiers")
    bad = json.dumps({"role": "user", "blocks": "private words"})
    await run(storage, f"UPDATE {{}}{DEFAULT_TABLE_NAME} SET data = '{bad}' WHERE id = 2")
    if storage.db_schema is None:
        await run(storage, f"UPDATE {{}}{DEFAULT_TABLE_NAME} SET data = 'private words' WHERE id = 3")
    lost = 1 if storage.db_schema else 2
    assert await storage.adopt() == 7 - lost
    assert len([record for record in caplog.records if "damaged" in record.message]) == lost
    assert "private words" not in caplog.text


@pytest.mark.parametrize("how", ["default", "none", "own"])
async def test_adopting_takes_secrets_out_unless_told_otherwise(
    make: Callable[..., Storage], stock: SQLAlchemyChatStore, how: str
) -> None:
    key = "sk-proj-4f9Kq2LmZx81BvNc7Tr5Wy3HsD6GjP0aQeRuIoXbM"
    await stock.add_message("keys", user(f"my key is {key}"))
    storage = make(table_name="memory_tiers")
    given: dict[str, Any] = {"default": {}, "none": {"redaction": None}, "own": {"redaction": Redactor()}}[how]
    assert await storage.adopt(**given) == 8
    (message,) = await TieredChatStore(storage).get_messages("keys")
    assert (key in (message.content or "")) is (how == "none")
    assert await storage.adopt(**given) == 0


@pytest.mark.usefixtures("stock")
async def test_adopted_sessions_belong_to_the_user_who_is_named(make: Callable[..., Storage]) -> None:
    storage = make(table_name="memory_tiers")
    assert await storage.adopt(user_id="maya") == 7
    assert await storage.adopt(user_id="maya") == 0
    assert await TieredChatStore(storage).get_keys() == []
    async with TieredMemory(storage=storage, session_id="one", user_id="maya") as memory:
        assert [message.content for message in await memory.aget_all()] == [f"one {n}" for n in range(5)]
        assert len(await memory.aget_all(MessageStatus.ARCHIVED)) == 2
    with pytest.raises(ConfigurationError, match="user_id="):
        await storage.adopt(user_id=" ")


async def test_a_storage_cannot_adopt_its_own_name(make: Callable[..., Storage]) -> None:
    storage = make()
    with pytest.raises(ConfigurationError, match="table_name"):
        await storage.adopt()
    with pytest.raises(ConfigurationError, match="stock_table="):
        await make(table_name="other").adopt('x"; DROP TABLE y')


async def test_adopting_where_there_is_no_stock_table_says_which_there_are(make: Callable[..., Storage]) -> None:
    storage = make(table_name="memory_tiers")
    with pytest.raises(ConfigurationError, match=f"stock_table='{DEFAULT_TABLE_NAME}'") as caught:
        await storage.adopt()
    assert caught.value.allowed.endswith("holds none.")
    await run(storage, "CREATE TABLE {}bookmarks (id INTEGER)")
    with pytest.raises(ConfigurationError, match="bookmarks"):
        await storage.adopt("bookmarks")
    assert await TieredChatStore(storage).get_keys() == []


@pytest.mark.usefixtures("stock")
async def test_adopting_a_misspelt_table_names_the_one_that_is_there(make: Callable[..., Storage]) -> None:
    with pytest.raises(ConfigurationError, match="llama_index_memroy") as caught:
        await make(table_name="memory_tiers").adopt("llama_index_memroy")
    assert caught.value.allowed.endswith(f"holds {DEFAULT_TABLE_NAME}.")
