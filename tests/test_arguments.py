"""Bad arguments: refused before anything is stored, with what was given, what is allowed and the way out."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from doubles import unclear_parts
from llama_index.core.base.llms.types import BaseContentBlock, ChatMessage
from llama_index.core.memory import StaticMemoryBlock as CoreStaticMemoryBlock
from llama_index.core.memory.memory import InsertMethod
from llama_index.core.settings import Settings
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore
from sqlalchemy.ext.asyncio import create_async_engine

import llama_index_memory_tiers
from llama_index_memory_tiers import (
    StaticMemoryBlock,
    Storage,
    TieredChatStore,
    TieredMemory,
    VectorMemoryBlock,
    errors,
)
from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.blocks.facts.block import FactExtractionMemoryBlock
from llama_index_memory_tiers.errors import (
    BudgetError,
    ConfigurationError,
    InvalidMessageError,
    MemoryTiersError,
    MissingExtraError,
    StorageClosedError,
)

NAN, INFINITE = float("nan"), float("inf")
HELLO = ChatMessage(role="user", content="hello")

PACKAGE = Path(inspect.getfile(llama_index_memory_tiers)).parent


def assert_teaches(error: MemoryTiersError, *words: str) -> None:
    """The three parts are there, are sentences, and name what was given."""
    assert unclear_parts(error) == []
    for word in words:
        assert word in error.given, f"{word!r} is not in {error.given!r}"


@pytest.fixture
async def memory() -> AsyncIterator[TieredMemory]:
    memory = TieredMemory(session_id="chat")
    yield memory
    await memory.aclose()


# --- the memory -----------------------------------------------------------------------------------------------

BAD_IDS = ["", " ", "\t\n", "\u3000", 5, b"chat", True, "a\0b", "\0", "\ud800", "a\udfffb", ["a"]]
BAD_COUNTS = [-1, True, False, 2.0, 2.5, NAN, "9", [], b"1"]
BAD_SHARES = [-0.1, 1.1, 5, NAN, INFINITE, -INFINITE, True, "0.7", [], None]


@pytest.mark.parametrize("name", ["session_id", "user_id", "agent_id"])
@pytest.mark.parametrize("value", BAD_IDS)
def test_an_id_that_is_blank_or_no_text_or_cannot_be_stored_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(**{"session_id": "chat", name: value})
    assert_teaches(caught.value, f"{name}={value!r}")


@pytest.mark.parametrize(
    "name",
    [
        "token_limit",
        "reserve_tokens",
        "token_flush_size",
        "window_messages",
        "image_token_size_estimate",
        "audio_token_size_estimate",
        "video_token_size_estimate",
        "document_token_size_estimate",
    ],
)
@pytest.mark.parametrize("value", BAD_COUNTS)
def test_a_count_that_is_no_whole_number_in_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory.from_defaults(**{name: value})
    assert_teaches(caught.value, f"{name}={value!r}")


@pytest.mark.parametrize("name", ["token_limit", "token_flush_size", "window_messages"])
def test_zero_is_refused_where_nothing_would_work(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(**{name: 0})
    assert_teaches(caught.value, f"{name}=0")


@pytest.mark.parametrize("value", BAD_SHARES)
def test_a_ratio_outside_zero_to_one_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(chat_history_token_ratio=value)
    assert_teaches(caught.value, f"chat_history_token_ratio={value!r}")


@pytest.mark.parametrize("value", [0, -1, NAN, INFINITE, True, "30", None])
def test_a_claim_that_never_ends_or_never_lasts_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(claim_seconds=value)
    assert_teaches(caught.value, f"claim_seconds={value!r}")


@pytest.mark.parametrize("name", ["overflow", "delivery", "recall_position", "insert_method"])
@pytest.mark.parametrize("value", ["", "sometimes", 1, None, []])
def test_a_choice_that_does_not_exist_is_refused_and_the_real_ones_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(**{name: value})
    assert_teaches(caught.value, f"{name}={value!r}")
    assert caught.value.allowed.count("'") == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokenizer_fn": 3}, ["tokenizer_fn=3"]),
        ({"memory_blocks_template": "{{ memory_blocks }}"}, ["memory_blocks_template='{{"]),
        ({"redaction": "all"}, ["redaction='all'"]),
        ({"redaction": True}, ["redaction=True"]),
        ({"chat_store": {}}, ["chat_store={}"]),
        ({"sql_store": object}, ["chat_store=<class"]),
        ({"storage": 5, "session_id": "s"}, ["storage=5"]),
        ({"storage": "", "session_id": "s"}, ["storage=''"]),
        ({"storage": b"memory.db", "session_id": "s"}, ["storage=b'memory.db'"]),
        ({"storage": "a\0.db", "session_id": "s"}, ["storage='a\\x00.db'"]),
        ({"storage": "/no/such/folder/memory.db", "session_id": "s"}, ["storage='/no/such"]),
        ({"storage": "/", "session_id": "s"}, ["storage='/'"]),
        ({"storage": "mysql+aiomysql://host/db", "session_id": "s"}, ["mysql+aiomysql://host/db"]),
        ({"storage": "://", "session_id": "s"}, ["database URI"]),
        ({"async_engine": "sqlite://", "session_id": "s"}, ["engine=str"]),
        ({"table_name": "a b"}, ["table_name='a b'"]),
        ({"table_name": "x" * 41}, ["table_name='xxx"]),
        ({"table_name": 5}, ["table_name=5"]),
        ({"table_name": "messages; DROP TABLE x"}, ["table_name='messages; DROP"]),
        ({"db_schema": 'a"b'}, ["db_schema='a\"b'"]),
        ({"token_limt": 5, "window": 3}, ["token_limt", "window"]),
        ({"reserve_tokens": 500, "token_limit": 500}, ["reserve_tokens=500", "token_limit=500"]),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_by_name(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(**arguments)
    assert_teaches(caught.value, *words)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([VectorMemoryBlock], ["memory_blocks", "VectorMemoryBlock"]),
        (["facts"], ["memory_blocks", "'facts'"]),
        ("facts", ["memory_blocks='facts'"]),
        (5, ["memory_blocks=5"]),
        ({"a": 1}, ["memory_blocks={'a': 1}"]),
    ],
)
def test_what_is_no_list_of_blocks_is_refused(blocks: Any, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(memory_blocks=blocks)
    assert_teaches(caught.value, *words)


def test_a_single_block_outside_a_list_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(memory_blocks=VectorMemoryBlock())  # type: ignore[arg-type]
    assert_teaches(caught.value, "memory_blocks=VectorMemoryBlock(")


def test_two_blocks_of_one_name_are_refused_and_the_name_is_said() -> None:
    twins = [VectorMemoryBlock(name="notes"), StaticMemoryBlock(name="notes", static_content="x")]
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(memory_blocks=twins)
    assert_teaches(caught.value, "memory_blocks", "'notes'")


@pytest.mark.parametrize("block", [StaticMemoryBlock, CoreStaticMemoryBlock])
async def test_static_content_that_can_never_fit_is_refused_at_construction(block: type[CoreStaticMemoryBlock]) -> None:
    rules = block(name="rules", static_content="never " * 200)
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(memory_blocks=[rules], token_limit=250, reserve_tokens=60)
    assert_teaches(caught.value, "rules", "static_content", "201 tokens")
    assert "190" in caught.value.allowed
    rules.priority = 1  # now it may be cut
    async with TieredMemory(memory_blocks=[rules], token_limit=250, reserve_tokens=60) as memory:
        assert memory.memory_blocks == [rules]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("storage", "async_database_uri"),
        ("storage", "async_engine"),
        ("storage", "chat_store"),
        ("chat_store", "async_database_uri"),
        ("chat_store", "async_engine"),
        ("chat_store", "table_name"),
        ("chat_store", "db_schema"),
        ("async_engine", "async_database_uri"),
        ("open_storage", "async_database_uri"),
        ("open_storage", "async_engine"),
        ("open_storage", "table_name"),
        ("open_storage", "db_schema"),
        ("open_storage", "chat_store"),
    ],
)
async def test_arguments_that_exclude_each_other_are_refused_and_both_are_named(
    tmp_path: Path, first: str, second: str
) -> None:
    path = tmp_path / "memory.db"
    uri = f"sqlite+aiosqlite:///{path}"
    engine = create_async_engine(uri)
    values = {
        "storage": path,
        "open_storage": Storage(path),
        "async_database_uri": uri,
        "async_engine": engine,
        "chat_store": SQLAlchemyChatStore("stock"),
        "table_name": "mine",
        "db_schema": "mine",
    }
    given = {name.removeprefix("open_"): values[name] for name in (first, second)}
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(session_id="chat", **given)
    assert_teaches(caught.value, *given)
    assert not path.exists()
    await engine.dispose()


def test_a_durable_storage_without_any_id_is_refused_and_no_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "memory.db"
    for place in ({"storage": path}, {"async_database_uri": f"sqlite+aiosqlite:///{path}"}, {"storage": Storage(path)}):
        with pytest.raises(ConfigurationError) as caught:
            TieredMemory(**place)
        assert_teaches(caught.value, str(path), "user_id", "session_id")
    assert not path.exists()


@pytest.mark.parametrize(
    ("uri", "driver"),
    [
        ("postgresql://logan:hunter2@db.example/app", "asyncpg"),
        ("postgresql+psycopg://logan:hunter2@db.example/app", "asyncpg"),
        ("postgres+asyncpg://logan:hunter2@db.example/app", ""),
        ("sqlite:///memory.db", "aiosqlite"),
    ],
)
def test_a_uri_without_its_async_driver_names_the_driver_and_the_extra_but_no_password(uri: str, driver: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(async_database_uri=uri, session_id="chat")
    assert_teaches(caught.value, uri.partition("://")[0])
    assert "hunter2" not in str(caught.value)
    assert driver in caught.value.remedy
    assert ("[postgres]" in caught.value.remedy) is (driver == "asyncpg")


def test_a_driver_that_is_not_installed_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "asyncpg":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "asyncpg", raising=False)
    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(MissingExtraError) as caught:
        TieredMemory(storage="postgresql+asyncpg://a:hunter2@db.example/app", session_id="chat")
    assert_teaches(caught.value, "asyncpg", "db.example")
    assert "pip install 'llama-index-memory-tiers[postgres]'" in caught.value.remedy
    assert "hunter2" not in str(caught.value)


async def test_a_chat_store_of_another_user_is_refused_and_both_are_named() -> None:
    store = TieredChatStore(user_id="alice")
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(chat_store=store, user_id="bob", session_id="chat")
    assert_teaches(caught.value, "'alice'", "'bob'")
    await store.aclose()


@pytest.mark.parametrize("value", BAD_IDS)
def test_a_memory_for_another_session_checks_its_ids_as_well(memory: TieredMemory, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        memory.for_session(value)
    assert_teaches(caught.value, f"session_id={value!r}")
    with pytest.raises(ConfigurationError) as caught:
        memory.for_session("chat", user_id=value)
    assert_teaches(caught.value, f"user_id={value!r}")


@pytest.mark.parametrize("handle", [{}, {"version": 99}, 5, None, []])
def test_a_handle_that_this_release_cannot_read_is_refused(handle: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory.from_handle(handle)
    assert_teaches(caught.value, "handle of version")


def test_the_handle_of_a_private_or_password_protected_storage_asks_for_the_storage(memory: TieredMemory) -> None:
    handle = memory.to_handle()
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory.from_handle(handle)
    assert_teaches(caught.value, "private", "storage=")
    durable = TieredMemory(storage="postgresql+asyncpg://a:hunter2@db.example/app", session_id="chat")
    assert "hunter2" not in repr(durable.to_handle())
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory.from_handle(durable.to_handle())
    assert_teaches(caught.value, "db.example", "storage=")


# --- messages -------------------------------------------------------------------------------------------------


class Hologram(BaseContentBlock):
    """A content block that LlamaIndex may have tomorrow."""

    block_type: Literal["hologram"] = "hologram"
    secret: str = "plans for Tuesday"


def of_tomorrow() -> ChatMessage:
    message = ChatMessage(role="user", content="plans for Tuesday")
    message.blocks.append(Hologram())  # type: ignore[arg-type]
    return message


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"created_at": "yesterday"}, ["created_at='yesterday'"]),
        ({"created_at": 1_700_000_000}, ["created_at=1700000000"]),
        ({"sent_from": 5}, ["sent_from=5"]),
        ({"cause_by": ["tool"]}, ["cause_by=['tool']"]),
        ({"send_to": 5}, ["send_to=5"]),
        ({"send_to": ["bob", 5]}, ["send_to=['bob', 5]"]),
        ({"send_to": {"bob": 1}}, ["send_to={'bob': 1}"]),
        ({"uid": 5}, ["uid=5"]),
        ({"uid": ""}, ["uid=''"]),
        ({"uid": " "}, ["uid=' '"]),
        ({"uid": "a\0b"}, ["uid='a\\x00b'"]),
        ({"uid": "\ud800"}, ["uid="]),
    ],
)
async def test_wrong_words_about_a_message_are_refused_and_nothing_is_stored(
    memory: TieredMemory, about: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        await memory.aput(HELLO, **about)
    assert_teaches(caught.value, *words)
    assert await memory.amessages() == []


@pytest.mark.parametrize("uids", [[], ["a"], ["a", "b", "c"], "ab", 5, {"a": 1, "b": 2}])
async def test_uids_that_are_not_one_per_message_are_refused_and_nothing_is_stored(
    memory: TieredMemory, uids: Any
) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        await memory.aput_messages([HELLO, HELLO], uids=uids)
    assert_teaches(caught.value, f"uids={uids!r}")
    assert "2 messages" in caught.value.allowed
    assert await memory.amessages() == []


@pytest.mark.parametrize("message", ["plans for Tuesday", None, 5, {"role": "user", "content": "plans for Tuesday"}])
async def test_what_is_no_message_is_refused_without_repeating_its_text(memory: TieredMemory, message: Any) -> None:
    for attempt in (lambda: memory.aput(message), lambda: memory.aput_messages([HELLO, message])):
        with pytest.raises(InvalidMessageError) as caught:
            await attempt()
        assert_teaches(caught.value, "message=", type(message).__name__)
        assert "Tuesday" not in str(caught.value)
    with pytest.raises(InvalidMessageError):
        await memory.aset([HELLO, message])
    assert await memory.amessages() == []


@pytest.mark.parametrize("messages", [HELLO, None, 5, "ab", {HELLO.content}])
async def test_what_is_no_list_of_messages_is_refused(memory: TieredMemory, messages: Any) -> None:
    for attempt in (memory.aput_messages, memory.aset):
        with pytest.raises(InvalidMessageError) as caught:
            await attempt(messages)
        assert_teaches(caught.value, "messages=", type(messages).__name__)
    assert await memory.amessages() == []


async def test_a_content_block_of_an_unknown_type_is_refused_by_its_type_and_nothing_is_stored(
    memory: TieredMemory,
) -> None:
    for attempt in (lambda: memory.aput(of_tomorrow()), lambda: memory.aput_messages([HELLO, of_tomorrow()])):
        with pytest.raises(InvalidMessageError) as caught:
            await attempt()
        assert_teaches(caught.value, "Hologram")
        assert "Tuesday" not in str(caught.value)
    assert await memory.amessages() == []


async def test_a_message_that_json_cannot_hold_is_refused_without_repeating_its_text(memory: TieredMemory) -> None:
    message = ChatMessage(role="user", content="plans for Tuesday", additional_kwargs={"raw": object()})
    with pytest.raises(InvalidMessageError) as caught:
        await memory.aput_messages([HELLO, message])
    assert_teaches(caught.value, "user", "TextBlock")
    assert "Tuesday" not in str(caught.value)
    assert await memory.amessages() == []


# --- asking ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input": 5}, ["input=5"]),
        ({"input": ["hello"]}, ["input=['hello']"]),
        ({"messages": "hello"}, ["messages", "str"]),
        ({"messages": HELLO}, ["messages", "ChatMessage"]),
        ({"messages": ["hello"]}, ["messages", "list"]),
        ({"initial_token_count": -1}, ["initial_token_count=-1"]),
        ({"initial_token_count": "9"}, ["initial_token_count='9'"]),
        ({"initial_token_count": True}, ["initial_token_count=True"]),
        ({"initial_token_count": NAN}, ["initial_token_count=nan"]),
    ],
)
async def test_a_question_of_the_wrong_kind_is_refused(
    memory: TieredMemory, arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await memory.aget(**arguments)
    assert_teaches(caught.value, *words)


@pytest.mark.parametrize("status", ["active", "gone", 1, True])
async def test_a_status_that_is_no_message_status_is_refused(memory: TieredMemory, status: Any) -> None:
    store = TieredChatStore(memory.storage)
    await memory.aput(HELLO)
    for attempt in (
        memory.amessages(status),
        memory.aget_all(status),
        memory.areset(status),
        store.get_messages("chat", status),
        store.count_messages("chat", status),
        store.delete_messages("chat", status),
    ):
        with pytest.raises(ConfigurationError) as caught:
            await attempt
        assert_teaches(caught.value, f"status={status!r}")
    assert len(await memory.amessages()) == 1


async def test_overflow_raise_says_what_does_not_fit_without_its_text() -> None:
    async with TieredMemory(session_id="chat", token_limit=20, overflow="raise") as memory:
        await memory.aput(ChatMessage(role="user", content="plans for Tuesday " * 20))
        with pytest.raises(BudgetError) as caught:
            await memory.aget()
    assert_teaches(caught.value, "tokens")
    assert "20 tokens" in caught.value.allowed
    assert "Tuesday" not in str(caught.value)


async def test_a_closed_memory_says_so() -> None:
    memory = TieredMemory(session_id="chat")
    await memory.aput(HELLO)
    await memory.aclose()
    with pytest.raises(StorageClosedError) as caught:
        await memory.aput(HELLO)
    assert_teaches(caught.value, "closed")


# --- blocks, storage and store --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": " "}, ["name=' '"]),
        ({"name": 5}, ["name=5"]),
        ({"name": "a\0b"}, ["name='a\\x00b'"]),
        ({"name": "\ud800"}, ["name="]),
        ({"priority": -1}, ["priority=-1"]),
        ({"priority": True}, ["priority=True"]),
        ({"priority": 1.5}, ["priority=1.5"]),
        ({"similarity_top_k": 0}, ["similarity_top_k=0"]),
        ({"similarity_top_k": True}, ["similarity_top_k=True"]),
        ({"similarity_top_k": NAN}, ["similarity_top_k=nan"]),
        ({"retrieval_context_window": 0}, ["retrieval_context_window=0"]),
        ({"absorb_every": 0}, ["absorb_every=0"]),
        ({"absorb_on": {"sometimes"}}, ["absorb_on", "'sometimes'"]),
        ({"idle_seconds": 0}, ["idle_seconds=0"]),
        ({"idle_seconds": NAN}, ["idle_seconds=nan"]),
        ({"idle_seconds": True}, ["idle_seconds=True"]),
        ({"timeout_seconds": -1}, ["timeout_seconds=-1"]),
        ({"batch_tokens": 0}, ["batch_tokens=0"]),
        ({"scope": "everybody"}, ["scope='everybody'"]),
        ({"storage": "memory.db"}, ["storage='memory.db'"]),
        ({"embed_model": "text-embedding"}, ["embed_model='text-embedding'"]),
        ({"similarity_topk": 3}, ["similarity_topk"]),
    ],
)
def test_a_block_refuses_a_bad_argument_by_name(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        VectorMemoryBlock(**arguments)
    assert_teaches(caught.value, "VectorMemoryBlock", *words)


def test_a_block_that_lacks_an_argument_names_it() -> None:
    class Journal(TieredMemoryBlock):
        folder: str

    with pytest.raises(ConfigurationError) as caught:
        Journal(name="journal")
    assert_teaches(caught.value, "Journal", "folder")


def test_facts_without_any_model_say_so_and_ask_no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    with pytest.raises(ConfigurationError) as caught:
        FactExtractionMemoryBlock()
    assert_teaches(caught.value, "llm", "Settings.llm")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pool_size": 0}, ["pool_size=0"]),
        ({"pool_size": True}, ["pool_size=True"]),
        ({"pool_size": 1.5}, ["pool_size=1.5"]),
        ({"index_bytes": -1}, ["index_bytes=-1"]),
        ({"index_bytes": NAN}, ["index_bytes=nan"]),
        ({"clock": 5}, ["clock=5"]),
        ({"ids": "uuid"}, ["ids='uuid'"]),
        ({"table_name": ""}, ["table_name=''"]),
        ({"table_name": "1a"}, ["table_name='1a'"]),
        ({"db_schema": "a.b"}, ["db_schema='a.b'"]),
        ({"address": 5}, ["storage=5"]),
        ({"engine": 5}, ["engine=int"]),
        ({"engine": 5, "address": "memory.db"}, ["engine", "address"]),
    ],
)
def test_a_storage_refuses_a_bad_argument_by_name(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Storage(**arguments)
    assert_teaches(caught.value, *words)


async def test_an_engine_in_memory_is_refused_because_it_has_one_connection_for_all() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(ConfigurationError) as caught:
        Storage(engine=engine)
    assert_teaches(caught.value, "sqlite+aiosqlite://")
    await engine.dispose()


async def test_a_storage_does_not_adopt_its_own_tables(tmp_path: Path) -> None:
    async with Storage(tmp_path / "memory.db", table_name="mine") as storage:
        with pytest.raises(ConfigurationError) as caught:
            await storage.adopt("mine")
        assert_teaches(caught.value, "stock_table='mine'")
        with pytest.raises(ConfigurationError) as caught:
            await storage.adopt("a b")
        assert_teaches(caught.value, "stock_table='a b'")


@pytest.mark.parametrize("value", [value for value in BAD_IDS if value is not True])
async def test_a_chat_store_checks_its_user_and_its_keys(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TieredChatStore(user_id=value)
    assert_teaches(caught.value, f"user_id={value!r}")
    store = TieredChatStore()
    for attempt in (
        store.get_messages(value),
        store.count_messages(value),
        store.add_message(value, HELLO),
        store.add_messages(value, []),
        store.set_messages(value, [HELLO]),
        store.delete_message(value, 1),
        store.delete_messages(value),
        store.delete_oldest_messages(value, 1),
        store.archive_oldest_messages(value, 1),
    ):
        with pytest.raises(ConfigurationError) as caught:
            await attempt
        assert_teaches(caught.value, f"{'session_id' if isinstance(value, str) else 'key'}={value!r}")
    assert await store.get_keys() == []
    await store.aclose()


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", None])
async def test_a_chat_store_refuses_a_number_of_messages_that_counts_nothing(value: Any) -> None:
    store = TieredChatStore()
    await store.add_message("chat", HELLO)
    for attempt in (store.delete_oldest_messages("chat", value), store.archive_oldest_messages("chat", value)):
        with pytest.raises(ConfigurationError) as caught:
            await attempt
        assert_teaches(caught.value, f"n={value!r}")
    assert await store.count_messages("chat") == 1
    await store.aclose()


# --- good values that look odd --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"chat_history_token_ratio": 0},
        {"chat_history_token_ratio": 1},
        {"insert_method": "user"},
        {"insert_method": InsertMethod.SYSTEM},
        {"memory_blocks": None},
        {"memory_blocks": ()},
        {"redaction": None},
        {"token_limit": 1},
        {"image_token_size_estimate": 0},
        {"session_id": "会话 №1 / ../etc 'x' \"y\" %_"},
        {"user_id": "o'Brien; DROP TABLE sessions --"},
    ],
)
async def test_what_is_allowed_works(arguments: dict[str, Any]) -> None:
    async with TieredMemory(**arguments) as memory:
        await memory.aput(HELLO)
        assert [message.content for message in await memory.aget()][-1:] == ["hello"]


# --- the error tree -------------------------------------------------------------------------------------------


def error_classes() -> list[type[MemoryTiersError]]:
    return [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, MemoryTiersError)]


@pytest.mark.parametrize("error", error_classes())
def test_every_error_needs_its_three_parts_and_says_them(error: type[MemoryTiersError]) -> None:
    made = error("A was given.", allowed="B is allowed.", remedy="Do C.")
    assert (made.given, made.allowed, made.remedy) == ("A was given.", "B is allowed.", "Do C.")
    assert str(made) == "A was given. B is allowed. Do C."
    for partial in (lambda: error("A"), lambda: error("A", allowed="B"), lambda: error("A", "B", "C")):  # type: ignore[misc, call-arg]
        with pytest.raises(TypeError):
            partial()


def test_the_tree_at_the_top_of_the_module_is_the_tree_of_classes() -> None:
    drawn = re.findall(r"^[│├└─ ]*(\w+Error)\b", inspect.getdoc(errors) or "", re.MULTILINE)
    assert sorted(drawn) == sorted(error.__name__ for error in error_classes())


def sites() -> Iterator[tuple[str, ast.Call]]:
    """Every place in the package that makes an error of ours."""
    names = {error.__name__ for error in error_classes()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield f"{path.name}:{node.lineno}", node


def test_every_error_that_the_package_makes_has_three_parts() -> None:
    found = list(sites())
    assert len(found) > 30
    for where, call in found:
        assert len(call.args) == 1, where
        assert {keyword.arg for keyword in call.keywords} == {"allowed", "remedy"}, where


def raised_names() -> Iterator[tuple[str, str]]:
    for path in PACKAGE.rglob("*.py"):
        if {"demo", "testing"} & set(path.relative_to(PACKAGE).parts):
            continue  # no part of a running memory
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                yield f"{path.name}:{node.lineno}", node.exc.func.id


def test_the_package_raises_its_own_errors_only() -> None:
    # Those a caller cannot meet: a block that is not finished, one that breaks stock's own contract, what `__getattr__`
    # owes Python, and a full disk as the operating system reports it.
    inner = {"NotImplementedError", "TypeError", "AttributeError", "OSError"}
    builtin: Callable[[str], Any] = lambda name: getattr(builtins, name, None)  # noqa: E731
    foreign = {where: name for where, name in raised_names() if inspect.isclass(builtin(name)) and name not in inner}
    assert foreign == {}
