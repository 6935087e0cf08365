"""TieredMemory as its users see it: scripts, notebooks, handles, reports, budgets, and the user's own store."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from doubles import answer, user
from foreign import DictStore
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.memory.memory import BaseMemoryBlock, InsertMethod
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.storage.chat_store.base_db import MessageStatus

from llama_index_memory_tiers import (
    ByAge,
    NearDuplicates,
    Redactor,
    StaticMemoryBlock,
    Storage,
    TieredMemory,
    TokenBudget,
    VectorMemoryBlock,
)
from llama_index_memory_tiers.errors import BudgetError, ConfigurationError

KEY = "sk-proj-4f9Kq2LmZx81BvNc7Tr5Wy3HsD6GjP0aQeRuIoXbM"


def words(text: str) -> list[str]:
    return text.split()


def texts(messages: list[ChatMessage]) -> list[str | None]:
    return [message.content for message in messages]


def everything(messages: list[ChatMessage]) -> str:
    return "\n".join(str(message) for message in messages)


async def chat(memory: TieredMemory, turns: int, *, size: int = 10) -> None:
    for number in range(turns):
        await memory.aput(user(f"question{number} " + "w " * (size - 1)))
        await memory.aput(answer(f"answer{number} " + "w " * (size - 1)))


class Notes(BaseMemoryBlock[str]):
    """A third-party block that says what it is told to say."""

    name: str = "Notes"
    said: str = ""

    async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> str:
        return self.said or f"asked with {kwargs.get('colour', 'nothing')} about {messages[-1].content}"

    async def _aput(self, messages: list[ChatMessage]) -> None:
        pass


# --- scripts, threads, notebooks -------------------------------------------------------------------------------


def test_a_script_needs_no_event_loop() -> None:
    memory = TieredMemory.from_defaults(session_id="script", chat_history=[user("before")])
    memory.put(user("one"))
    memory.put_messages([answer("two"), user("three")])
    assert texts(memory.get()) == ["before", "one", "two", "three"]
    assert texts(memory.get_all()) == texts(memory.get())
    memory.set([user("anew")])
    assert texts(memory.get()) == ["anew"]
    memory.reset()
    assert memory.get() == []
    memory.close()
    assert memory.storage.closed


def test_threads_share_a_memory_and_nothing_is_lost() -> None:
    memory = TieredMemory(session_id="threads")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: memory.put(user(f"m{number}")), range(60)))
    assert sorted(texts(memory.get_all())) == sorted(f"m{number}" for number in range(60))
    memory.close()


async def test_sync_methods_work_inside_a_running_loop_as_in_a_notebook() -> None:
    memory = TieredMemory(
        user_id="maya", session_id="notebook", delivery="inline", memory_blocks=[VectorMemoryBlock(embed_model=None)]
    )
    memory.put(user("The ferry to Elba leaves at nine."))
    await memory.aput(answer("Noted."))
    assert memory.flush().complete
    assert texts(memory.get()) == texts(await memory.aget())
    assert "ferry" in everything(memory.for_session("other").get("When does the ferry leave?"))
    assert memory.explain("ferry").tokens > 0
    assert len(memory.messages()) == 2
    await memory.aclose()


async def test_a_block_that_calls_a_sync_method_is_told_the_async_one() -> None:
    class Asking(Notes):
        async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> str:
            return str(memory.get())

    memory = TieredMemory(session_id="s", memory_blocks=[Asking()])
    report = await asyncio.to_thread(memory.explain, "hello")
    assert report.parts[0].error == "ConfigurationError"
    memory.close()


def test_loops_that_come_and_go_see_the_same_memory() -> None:
    memory = TieredMemory(session_id="loops")
    for number in range(3):
        asyncio.run(memory.aput(user(f"m{number}")))
    assert texts(asyncio.run(memory.aget())) == ["m0", "m1", "m2"]
    memory.close()


def test_the_first_window_is_the_given_chat_history() -> None:
    with_history = TieredMemory.from_defaults(session_id="s", chat_history=[user("q"), answer("a")])
    assert texts(with_history.get()) == ["q", "a"]
    without = TieredMemory.from_defaults(chat_history=[])
    assert without.get() == []
    with_history.close()
    without.close()


def test_from_defaults_and_the_constructor_agree() -> None:
    one = TieredMemory.from_defaults(token_limit=4000)
    other = TieredMemory(token_limit=4000)
    fields = set(TieredMemory.model_fields) - {"session_id", "sql_store", "memory_blocks_template", "tokenizer_fn"}
    assert {name: getattr(one, name) for name in fields} == {name: getattr(other, name) for name in fields}
    assert one.token_flush_size == 400
    large = TieredMemory()
    assert (large.token_limit, large.chat_history_token_ratio, large.token_flush_size) == (30_000, 0.7, 3_000)
    for memory in (one, other, large):
        memory.close()


def test_by_default_a_flush_leaves_half_of_the_window() -> None:
    small = TieredMemory(token_limit=8000, chat_history_token_ratio=0.1)
    shared = TieredMemory(budget=TokenBudget(8000, window=300))
    assert (small.token_flush_size, shared.token_flush_size) == (400, 150)
    for memory in (small, shared):
        memory.close()


async def test_an_empty_memory_is_true_as_agents_test_for_it() -> None:
    memory = TieredMemory()
    assert memory
    assert not hasattr(memory, "__len__")
    assert hasattr(memory, "tokenizer_fn")
    await memory.aclose()


# --- sessions and users ----------------------------------------------------------------------------------------


async def test_another_session_shares_blocks_and_storage_but_not_the_window() -> None:
    memory = TieredMemory(user_id="maya", session_id="one", memory_blocks=[VectorMemoryBlock(embed_model=None)])
    await memory.aput_messages([user("My dog is called Biscuit."), answer("A good name.")])
    await memory.aflush()
    second = memory.for_session("two")
    assert second.storage is memory.storage
    assert second.memory_blocks is memory.memory_blocks
    assert await second.aget_all() == []
    assert "Biscuit" in everything(await second.aget("What is my dog called?"))
    await memory.aclose()


async def test_another_user_gets_nothing_not_even_under_the_same_session_name() -> None:
    memory = TieredMemory(user_id="maya", session_id="chat-1", memory_blocks=[VectorMemoryBlock(embed_model=None)])
    await memory.aput_messages([user("My dog is called Biscuit."), answer("A good name.")])
    await memory.aflush()
    other = memory.for_session("chat-1", user_id="ben")
    assert await other.aget("What is my dog called?") == []
    assert await other.amessages() == []
    assert other.sql_store.user_id == "ben"
    assert await other.sql_store.get_keys() == []
    await memory.aclose()


async def test_closing_a_derived_memory_leaves_the_others_open() -> None:
    memory = TieredMemory(user_id="maya", session_id="one")
    second = memory.for_session("two")
    await second.aclose()
    await memory.aput(user("still here"))
    await second.aput(user("me too"))
    await memory.aclose()
    assert memory.storage.closed


@pytest.mark.parametrize(("user_id", "scope"), [(None, "user"), ("maya", "user"), ("maya", "session")])
async def test_what_is_absorbed_is_recalled_in_the_same_turn(user_id: str | None, scope: str) -> None:
    """A turn's recall is remembered, until something is learnt about its user or in its session."""
    memory = TieredMemory(
        session_id="s",
        user_id=user_id,
        token_limit=100,
        tokenizer_fn=words,
        memory_blocks=[VectorMemoryBlock(embed_model=None, scope=scope, absorb_on=frozenset({"idle"}))],
    )
    await memory.aput_messages([user("The code of the safe is heron."), answer("I see.")])
    await chat(memory, 6, size=10)
    await memory.aput(user("What is the code of the safe?"))
    assert "heron" not in everything(await memory.aget())
    await memory.aflush()
    assert "heron" in everything(await memory.aget())
    await memory.aclose()


async def test_a_block_that_changes_at_run_time_shows_it_at_the_next_call() -> None:
    static = StaticMemoryBlock(static_content="The user is new.")
    memory = TieredMemory(session_id="s", memory_blocks=[static])
    await memory.aput(user("hello"))
    assert "new" in everything(await memory.aget())
    static.static_content = [TextBlock(text="The user is an old friend.")]
    assert "old friend" in everything(await memory.aget())
    await memory.aclose()


# --- handles ---------------------------------------------------------------------------------------------------


async def test_a_handle_goes_through_json_and_finds_the_same_memory(tmp_path: Path) -> None:
    memory = TieredMemory(
        storage=tmp_path / "m.db",
        user_id="maya",
        session_id="one",
        agent_id="clerk",
        token_limit=5000,
        reserve_tokens=7,
        window_messages=40,
        insert_method="user",
        chat_history_token_ratio=0.5,
        token_flush_size=99,
        overflow="raise",
        delivery="inline",
        claim_seconds=5,
    )
    await memory.aput(user("remember me"))
    handle = json.loads(json.dumps(memory.to_handle()))
    await memory.aclose()
    again = TieredMemory.from_handle(handle)
    assert texts(await again.aget()) == ["remember me"]
    names = ("user_id", "session_id", "agent_id", "token_limit", "reserve_tokens", "window_messages", "insert_method")
    more = ("chat_history_token_ratio", "token_flush_size", "overflow", "delivery", "claim_seconds")
    for name in (*names, *more):
        assert getattr(again, name) == getattr(memory, name), name
    await again.aclose()
    assert again.storage.closed


def test_a_handle_holds_no_password_and_says_when_one_is_missing() -> None:
    uri = "postgresql+asyncpg://clerk:hunter2@db.example/app"
    handle = TieredMemory(storage=uri, session_id="s").to_handle()
    assert "hunter2" not in json.dumps(handle)
    with pytest.raises(ConfigurationError, match="storage="):
        TieredMemory.from_handle(handle)
    assert TieredMemory.from_handle(handle, storage=uri).session_id == "s"
    # Where the password is the driver's business (PGPASSWORD, .pgpass), the handle is enough.
    bare = TieredMemory(storage="postgresql+asyncpg://clerk@db.example/app", session_id="s").to_handle()
    assert TieredMemory.from_handle(json.loads(json.dumps(bare))).storage.address == bare["storage"]


def test_a_password_in_the_query_of_an_address_is_missed_as_well() -> None:
    uri = "postgresql+asyncpg://clerk@db.example/app?password=hunter2"
    handle = json.loads(json.dumps(TieredMemory(storage=uri, session_id="s").to_handle()))
    assert "hunter2" not in json.dumps(handle)
    with pytest.raises(ConfigurationError, match="holds no password"):
        TieredMemory.from_handle(handle)
    assert TieredMemory.from_handle(handle, storage=uri).session_id == "s"


async def test_a_handle_keeps_what_may_leave_and_what_takes_secrets_out(tmp_path: Path) -> None:
    rules = [ByAge(days=30, kinds={"message", "fact"}), NearDuplicates(similarity=0.8)]
    for redaction in ("default", None):
        memory = TieredMemory(storage=tmp_path / "m.db", session_id="s", retention=rules, redaction=redaction)
        handle = json.loads(json.dumps(memory.to_handle()))
        again = TieredMemory.from_handle(handle)
        assert [replace(rule, kinds=frozenset(rule.kinds)) for rule in again.retention] == [
            replace(rule, kinds=frozenset(rule.kinds or ())) for rule in rules
        ]
        assert again._shared.entries.redactor == memory._shared.entries.redactor
        await again.aclose()
        await memory.aclose()
    handle["settings"]["retention"].append({"rule": "ByMood"})
    with pytest.raises(ConfigurationError, match="ByMood"):
        TieredMemory.from_handle(handle)


def test_a_handle_of_a_memory_with_its_own_redactor_is_not_taken_up_with_another_by_mistake(tmp_path: Path) -> None:
    own = Redactor(key=b"sixteen bytes or")
    handle = json.loads(json.dumps(TieredMemory(storage=tmp_path / "m.db", session_id="s", redaction=own).to_handle()))
    assert "sixteen" not in json.dumps(handle)
    with pytest.raises(ConfigurationError, match="Redactor of its own"):
        TieredMemory.from_handle(handle)
    assert TieredMemory.from_handle(handle, redaction=own)._shared.entries.redactor == own
    del handle["redaction"], handle["settings"]["retention"]  # as the release before wrote it
    assert TieredMemory.from_handle(handle).retention == ()


@pytest.mark.parametrize("name", ["user_id", "session_id", "agent_id"])
async def test_a_memory_is_not_made_anothers_by_assignment(name: str) -> None:
    async with TieredMemory(session_id="s", user_id="ann", agent_id="x") as memory:
        with pytest.raises(ConfigurationError, match=f"{name}='bob' was assigned"):
            setattr(memory, name, "bob")
        memory.token_limit = 500


@pytest.mark.parametrize("deep", [False, True])
async def test_a_copy_for_another_person_sees_that_persons_messages(deep: bool) -> None:
    async with TieredMemory(session_id="s", user_id="ann") as memory:
        await memory.aput(user("the cat has gout"))
        for other in (memory.model_copy(update={"user_id": "bob"}, deep=deep), memory.for_session("s", "bob")):
            assert await other.aget() == []
            await other.aclose()
        assert texts(await copy.deepcopy(memory).aget()) == ["the cat has gout"]


def test_a_memory_is_not_pickled_into_another_database(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"to_handle\(\)"):
        pickle.dumps(TieredMemory(storage=tmp_path / "m.db", session_id="s"))


async def test_another_counter_at_work_in_the_same_session_does_not_break_the_limit(tmp_path: Path) -> None:
    async with Storage(tmp_path / "m.db") as storage:
        one = TieredMemory(storage=storage, session_id="s", token_limit=100, tokenizer_fn=words)
        other = TieredMemory(storage=storage, session_id="s", token_limit=10_000, tokenizer_fn=lambda text: text[:1])
        await chat(other, 12, size=10)
        recount = storage.log.recount

        async def and_then_the_other(sid: int, counts: Any, counter: str) -> None:
            await recount(sid, counts, counter)
            if counter == one._shared.counter.name:
                await other.aget()

        storage.log.recount = and_then_the_other  # type: ignore[method-assign]
        for _ in range(2):
            assert sum(len(words(message.content or "")) for message in await one.aget()) <= 100


async def test_a_handle_keeps_the_estimates_of_media(tmp_path: Path) -> None:
    sizes = {f"{kind}_token_size_estimate": size for size, kind in enumerate(("image", "audio", "video", "document"))}
    memory = TieredMemory(storage=tmp_path / "m.db", session_id="s", **sizes)
    again = TieredMemory.from_handle(json.loads(json.dumps(memory.to_handle())))
    assert {name: getattr(again, name) for name in sizes} == sizes
    assert again._shared.counter.name == memory._shared.counter.name
    await again.aclose()
    await memory.aclose()


async def test_a_handle_works_with_an_open_storage_and_leaves_it_open(tmp_path: Path) -> None:
    async with Storage(tmp_path / "m.db", table_name="mine") as storage:
        memory = TieredMemory(storage=storage, session_id="one")
        await memory.aput(user("hello"))
        again = TieredMemory.from_handle(memory.to_handle(), storage=storage, token_limit=100)
        assert texts(await again.aget()) == ["hello"]
        assert again.token_limit == 100
        await again.aclose()
        await memory.aclose()
        assert not storage.closed


def test_a_handle_of_a_private_or_newer_memory_is_refused_with_the_way_out() -> None:
    memory = TieredMemory(session_id="s")
    handle = memory.to_handle()
    with pytest.raises(ConfigurationError, match="private"):
        TieredMemory.from_handle(handle)
    with pytest.raises(ConfigurationError, match="version 99"):
        TieredMemory.from_handle({**handle, "version": 99}, storage=memory.storage)
    memory.close()


# --- the report ------------------------------------------------------------------------------------------------


async def test_explain_says_where_tokens_went_what_was_left_out_and_which_leg_found_it() -> None:
    memory = TieredMemory(
        user_id="maya",
        session_id="now",
        token_limit=60,
        tokenizer_fn=words,
        memory_blocks=[
            StaticMemoryBlock(static_content="Answer in short sentences."),
            VectorMemoryBlock(embed_model=None),
        ],
    )
    old = memory.for_session("then")
    for number in range(8):
        await old.aput_messages([user(f"ferry number {number} leaves at {number} " + "o " * 8), answer("fine")])
    await memory.aflush()
    await memory.aput(user("When does the ferry leave?"))
    report = await memory.aexplain()
    static, recalled = report.parts
    assert report.query == "When does the ferry leave?"
    assert report.limit == 60
    assert report.tokens == sum(len(words(message.content or "")) for message in report.messages) <= 60
    assert (static.name, static.priority) == ("StaticContent", 0)
    assert static.tokens > 0
    assert (report.window_messages, report.window_tokens, report.window_left_out) == (1, 5, 0)
    assert recalled.kept
    assert recalled.left_out
    assert all("bm25" in item.legs for item in recalled.kept)
    assert {item.reason for item in recalled.left_out} <= {"no room", "share", "cut"}
    assert texts(list(report.messages)) == texts(await memory.aget())
    assert "StaticContent" in str(report)
    assert "<table>" in report._repr_html_()
    await memory.aclose()


async def test_explain_names_a_block_that_failed() -> None:
    class Broken(Notes):
        async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> str:
            raise KeyError("gone")

    memory = TieredMemory(session_id="s", memory_blocks=[Broken(name="Broken"), Notes(name="Fine", said="still here")])
    await memory.aput(user("hello"))
    report = await memory.aexplain()
    assert [part.error for part in report.parts] == ["KeyError", None]
    assert "still here" in everything(list(report.messages))
    await memory.aclose()


async def test_explain_leaves_free_what_is_spoken_for_as_a_get_does() -> None:
    memory = TieredMemory(session_id="s", token_limit=100, tokenizer_fn=words)
    await chat(memory, 3, size=10)
    report = await memory.aexplain(initial_token_count=70)
    assert report.limit == 30
    assert texts(list(report.messages)) == texts(await memory.aget(initial_token_count=70))
    assert await asyncio.to_thread(lambda: memory.explain(initial_token_count=70).limit) == 30
    await memory.aclose()


async def test_explain_names_a_block_that_could_not_absorb() -> None:
    down = True

    class Deaf(Notes):
        async def _aput(self, messages: list[ChatMessage]) -> None:
            if down:
                raise TimeoutError("secret")

    memory = TieredMemory(session_id="s", memory_blocks=[Deaf(name="Deaf"), Notes(name="Fine")])
    await memory.aput_messages([user("hello"), answer("hi")])
    await memory.aflush()
    report = await memory.aexplain()
    assert [part.absorb_error for part in report.parts] == ["TimeoutError", None]
    assert "could not absorb: TimeoutError" in str(report)
    assert "secret" not in str(report)
    down = False
    await memory.aflush()
    assert [part.absorb_error for part in (await memory.aexplain()).parts] == [None, None]
    await memory.aclose()


# --- what a context is asked for -------------------------------------------------------------------------------


async def test_tokens_that_are_spoken_for_are_left_free() -> None:
    memory = TieredMemory(session_id="s", token_limit=100, tokenizer_fn=words)
    await chat(memory, 3, size=10)
    assert len(await memory.aget()) == 6
    assert len(await memory.aget(initial_token_count=70)) == 2
    assert sum(len(words(m.content or "")) for m in memory.get(initial_token_count=55)) <= 45
    await memory.aclose()


async def test_the_request_is_a_text_a_message_or_the_newest_of_given_messages() -> None:
    memory = TieredMemory(session_id="s", memory_blocks=[Notes()])
    await memory.aput(user("the last thing said"))
    assert "about the last thing said" in everything(await memory.aget())
    assert "about ferries" in everything(await memory.aget("ferries"))
    assert "about trains" in everything(await memory.aget(user("trains")))
    assert "about planes" in everything(await memory.aget(messages=[user("ships"), user("planes")]))
    report = await memory.aexplain(messages=[user("ships"), answer("which?")])
    assert report.query == "ships"
    await memory.aclose()


async def test_other_arguments_reach_the_blocks() -> None:
    memory = TieredMemory(session_id="s", memory_blocks=[Notes()])
    await memory.aput(user("hello"))
    assert "asked with blue" in everything(await memory.aget(colour="blue"))
    assert "asked with red" in everything(await memory.aget(colour="red"))
    await memory.aclose()


# --- messages and what is known about them ---------------------------------------------------------------------


async def test_ids_times_and_metadata_are_readable_beside_the_message_and_never_in_it() -> None:
    memory = TieredMemory(session_id="s")
    said = datetime(2025, 3, 8, 0, 30, tzinfo=timezone(timedelta(hours=9)))
    message = user("I moved to Kyoto.")
    before = message.model_copy(deep=True)
    await memory.aput(
        message, created_at=said, sent_from="Maya", send_to=["clerk", "guide"], cause_by="intake", uid="m-1"
    )
    await memory.aput(message, created_at=said, uid="m-1")  # a retry
    (stored,) = await memory.amessages()
    assert stored.id == "m-1"
    assert stored.created_at == said
    assert stored.created_at.utcoffset() == timedelta(hours=9)
    assert (stored.meta.sent_from, stored.meta.send_to, stored.meta.cause_by) == ("Maya", ("clerk", "guide"), "intake")
    assert stored.status is MessageStatus.ACTIVE
    assert stored.session_id == "s"
    assert message == before
    assert await memory.aget() == [before]
    assert stored.message == before
    await memory.aclose()


async def test_a_batch_of_messages_can_bring_its_own_ids_and_repeat() -> None:
    memory = TieredMemory(session_id="s")
    batch = [user("one"), answer("two")]
    await memory.aput_messages(batch, uids=["a", "b"], sent_from="Maya")
    await memory.aput_messages([*batch, user("three")], uids=["a", "b", "c"])
    stored = await memory.amessages()
    assert [row.id for row in stored] == ["a", "b", "c"]
    assert [row.meta.sent_from for row in stored] == ["Maya", "Maya", ""]
    await memory.aclose()


async def test_made_ids_are_unique_and_times_come_from_the_clock() -> None:
    noon = datetime(2025, 1, 1, 12, tzinfo=timezone.utc)
    async with Storage(clock=lambda: noon) as storage:
        memory = TieredMemory(storage=storage, session_id="s")
        await memory.aput_messages([user("one"), answer("two")])
        stored = await memory.amessages()
        assert len({row.id for row in stored}) == 2
        assert {row.created_at for row in stored} == {noon}
        await memory.aclose()


async def test_returned_messages_are_the_callers_to_change() -> None:
    memory = TieredMemory(session_id="s")
    given = ChatMessage(role=MessageRole.USER, blocks=[TextBlock(text="look")], additional_kwargs={"labels": ["first"]})
    await memory.aput(given)
    for messages in (await memory.aget(), await memory.aget_all(), [row.message for row in await memory.amessages()]):
        messages[0].blocks[0].text = "changed"
        messages[0].blocks.append(TextBlock(text="more"))
        messages[0].additional_kwargs["labels"].append("second")
    given.blocks[0].text = "changed by the one who put it"
    (kept,) = await memory.aget()
    assert texts([kept]) == ["look"]
    assert kept.additional_kwargs == {"labels": ["first"]}
    await memory.aclose()


# --- secrets ---------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


async def test_a_key_is_there_in_the_running_turn_and_nowhere_else(tmp_path: Path) -> None:
    memory = TieredMemory(
        storage=tmp_path / "m.db", session_id="s", memory_blocks=[VectorMemoryBlock(embed_model=None)]
    )
    await memory.aput(user(f"Use this key: {KEY}"))
    assert KEY in everything(await memory.aget())
    assert KEY in everything(await memory.aget("Use it"))
    assert KEY not in everything(await memory.aget_all())
    await memory.aput(answer("I used it."))
    assert KEY in everything(await memory.aget())
    await memory.aput(user("Thanks."))
    assert KEY not in everything(await memory.aget())
    await memory.aflush()
    await memory.aclose()
    assert KEY.encode() not in files_of(tmp_path)


async def test_without_redaction_messages_are_kept_as_they_are() -> None:
    memory = TieredMemory(session_id="s", redaction=None)
    await memory.aput(user(f"Use this key: {KEY}"))
    await memory.aput(user("Thanks."))
    assert KEY in everything(await memory.aget_all())
    await memory.aclose()


# --- the budget ------------------------------------------------------------------------------------------------


async def test_what_cannot_fit_is_an_error_when_asked_for_and_an_event_otherwise() -> None:
    long = user("w " * 50)
    for overflow in ("raise", "event"):
        memory = TieredMemory(session_id="s", token_limit=20, tokenizer_fn=words, overflow=overflow)
        await memory.aput(long)
        if overflow == "raise":
            with pytest.raises(BudgetError, match="20 tokens"):
                await memory.aget()
        else:
            assert await memory.aget() == [long]
            assert (await memory.aexplain()).overflow
        await memory.aclose()


async def test_reserved_tokens_are_never_used() -> None:
    memory = TieredMemory(session_id="s", token_limit=100, reserve_tokens=60, tokenizer_fn=words)
    await chat(memory, 10, size=9)
    assert (await memory.aexplain()).limit == 40
    assert 0 < sum(len(words(m.content or "")) for m in await memory.aget()) <= 40
    await memory.aclose()


async def test_a_window_of_messages_keeps_whole_turns_and_the_system_message() -> None:
    memory = TieredMemory(session_id="s", window_messages=6)
    await memory.aput(ChatMessage(role=MessageRole.SYSTEM, content="Be kind."))
    await chat(memory, 10)
    active = await memory.aget()
    assert [message.role.value for message in active] == ["system"] + ["user", "assistant"] * 3
    assert (active[1].content or "").startswith("question7")
    stored = await memory.amessages()
    assert len(stored) == 21
    assert sum(row.status is MessageStatus.ARCHIVED for row in stored) == 14
    await memory.aclose()


async def test_the_flush_size_says_how_much_leaves_at_once() -> None:
    left = []
    for size in (20, 60):
        memory = TieredMemory(
            session_id="s", token_limit=100, chat_history_token_ratio=1.0, token_flush_size=size, tokenizer_fn=words
        )
        await chat(memory, 5, size=10)
        await memory.aput(user("w " * 10))
        left.append(len(await memory.aget_all(MessageStatus.ARCHIVED)))
        await memory.aclose()
    assert left == [2, 6]


# --- where the memory goes -------------------------------------------------------------------------------------


async def test_the_memory_stands_in_one_system_message_behind_the_systems_own_text() -> None:
    memory = TieredMemory(session_id="s", memory_blocks=[StaticMemoryBlock(static_content="I am Logan.")])
    await memory.aput_messages([ChatMessage(role=MessageRole.SYSTEM, content="Be kind."), user("hello")])
    system, last = await memory.aget()
    assert [block.text for block in system.blocks if isinstance(block, TextBlock)] == [
        "Be kind.",
        "<memory>\n<StaticContent>\nI am Logan.\n</StaticContent>\n</memory>",
    ]
    assert last == user("hello")
    await memory.aclose()


@pytest.mark.parametrize("method", ["user", InsertMethod.USER])
async def test_the_memory_can_stand_in_the_newest_user_message(method: str) -> None:
    memory = TieredMemory(
        session_id="s", insert_method=method, memory_blocks=[StaticMemoryBlock(static_content="I am Logan.")]
    )
    await memory.aput_messages([user("hi"), answer("hello"), user("who am I?")])
    first, second, third = await memory.aget()
    assert [first, second] == [user("hi"), answer("hello")]
    assert [block.text for block in third.blocks if isinstance(block, TextBlock)] == [
        "<memory>\n<StaticContent>\nI am Logan.\n</StaticContent>\n</memory>",
        "who am I?",
    ]
    assert texts(await memory.aget_all()) == ["hi", "hello", "who am I?"]
    await memory.aclose()


async def test_volatile_recall_can_stand_beside_the_user_so_that_the_system_message_stays_equal() -> None:
    memory = TieredMemory(
        user_id="maya",
        session_id="now",
        recall_position="user",
        memory_blocks=[StaticMemoryBlock(static_content="I am Logan."), VectorMemoryBlock(embed_model=None)],
    )
    await memory.for_session("then").aput_messages([user("The ferry leaves at nine."), answer("fine")])
    await memory.aflush()
    await memory.aput(user("When does the ferry leave?"))
    system, first = await memory.aget()
    assert "nine" in everything([first])
    assert "nine" not in everything([system])
    await memory.aput_messages([answer("At nine."), user("And who am I?")])
    assert (await memory.aget())[0] == system
    await memory.aclose()


async def test_a_custom_template_writes_the_sections_and_stored_text_is_never_its_code() -> None:
    memory = TieredMemory(
        session_id="s",
        memory_blocks=[StaticMemoryBlock(static_content="{{ 7 * 7 }} stays as it is")],
        memory_blocks_template=RichPromptTemplate(
            "{% for name, blocks in memory_blocks %}## {{ name }}\n{% for b in blocks %}{{ b.text }}{% endfor %}"
            "{% endfor %}"
        ),
    )
    await memory.aput(user("hello"))
    (system, _) = await memory.aget()
    assert system.content == "## StaticContent\n{{ 7 * 7 }} stays as it is"
    await memory.aclose()


async def test_images_given_as_bytes_reach_the_model() -> None:
    picture = ImageBlock(image=b"\x89PNG\r\n\x1a\n", image_mimetype="image/png")
    memory = TieredMemory(
        session_id="s", memory_blocks=[StaticMemoryBlock(static_content=[TextBlock(text="A map:"), picture])]
    )
    await memory.aput(user("where am I?"))
    (system, _) = await memory.aget()
    assert [block.image for block in system.blocks if isinstance(block, ImageBlock)] == [picture.image]
    await memory.aclose()


async def test_recalled_text_that_comes_back_as_history_is_not_stored_again() -> None:
    memory = TieredMemory(session_id="s", memory_blocks=[StaticMemoryBlock(static_content="I am Logan.")])
    await memory.aput_messages([ChatMessage(role=MessageRole.SYSTEM, content="Be kind."), user("hello")])
    await memory.aset(await memory.aget())
    assert texts(await memory.aget_all()) == ["Be kind.", "hello"]
    await memory.aset([*(await memory.aget()), answer("hi")])
    assert len(await memory.amessages()) == 3
    await memory.aclose()


# --- a chat store of the user's own ----------------------------------------------------------------------------


async def test_a_store_of_the_users_own_keeps_the_window() -> None:
    store = DictStore()
    memory = TieredMemory.from_defaults(session_id="s", chat_store=store, chat_history=None)
    await memory.aput_messages([user("one"), answer("two")])
    assert memory.sql_store is store
    assert texts(store.active["s"]) == ["one", "two"]
    assert texts(await memory.aget()) == ["one", "two"]
    (await memory.aget())[0].blocks.append(TextBlock(text="more"))
    assert texts(store.active["s"]) == ["one", "two"]
    await memory.aset([user("anew")])
    assert texts(await memory.aget()) == ["anew"]
    await memory.areset()
    assert await memory.aget_all() == []
    await memory.aclose()


@pytest.mark.parametrize("user_id", [None, "maya"])
async def test_what_leaves_a_store_of_the_users_own_reaches_the_blocks_once(user_id: str | None) -> None:
    given: list[str | None] = []

    class Listening(Notes):
        async def _aput(self, messages: list[ChatMessage]) -> None:
            given.extend(texts(messages))

    store = DictStore()
    memory = TieredMemory(
        session_id="s",
        user_id=user_id,
        chat_store=store,
        token_limit=60,
        tokenizer_fn=words,
        delivery="inline",
        memory_blocks=[Listening(said="noted")],
    )
    await chat(memory, 12, size=10)
    (key,) = await store.get_keys()
    assert len(store.old[key]) > 0
    assert given == texts(store.old[key])
    assert [row.content for row in await memory.aget_all()] == texts([*store.old[key], *store.active[key]])
    report = await memory.aexplain()
    assert report.tokens <= 60
    await memory.aclose()


async def test_each_user_of_a_foreign_store_has_its_own_recall() -> None:
    store = DictStore()
    memory = TieredMemory(
        session_id="s", user_id="maya", chat_store=store, token_limit=60, tokenizer_fn=words,
        memory_blocks=[VectorMemoryBlock(embed_model=None)],
    )  # fmt: skip
    await memory.aput_messages([user("My dog is called Biscuit."), answer("A good name.")])
    await chat(memory, 6, size=10)
    await memory.aflush()
    assert "Biscuit" in everything(await memory.aget("What is my dog called?"))
    assert "Biscuit" not in everything(await memory.for_session("t", user_id="ben").aget("What is my dog called?"))
    await memory.aclose()


async def test_concurrent_puts_into_a_foreign_store_archive_as_one_after_the_other() -> None:
    class Slow(DictStore):
        async def archive_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
            await asyncio.sleep(0.02)
            return await super().archive_oldest_messages(key, n)

    store = Slow()
    memory = TieredMemory(
        session_id="s", chat_store=store, token_limit=60, chat_history_token_ratio=1.0, token_flush_size=20,
        tokenizer_fn=words,
    )  # fmt: skip
    await asyncio.gather(*(memory.aput(user(f"m{number} " + "w " * 9)) for number in range(12)))
    assert len(store.active["s"]) >= 4
    assert len(store.active["s"]) + len(store.old["s"]) == 12
    await memory.aclose()


# --- a window that cannot be flushed ---------------------------------------------------------------------------


async def test_a_session_without_user_messages_is_flushed_again_after_one_oversize_message() -> None:
    async with TieredMemory(session_id="s", token_limit=100, tokenizer_fn=words) as memory:
        await memory.aput(answer("w " * 90))
        await memory.aput(answer("w " * 90))
        for number in range(50):
            await memory.aput(answer(f"note {number}"))
            kept = await memory.amessages(MessageStatus.ACTIVE)
            assert sum(stored.tokens for stored in kept) <= 70
        assert len(await memory.aget_all()) == 52


async def test_results_of_an_oversize_call_are_not_planned_for_again() -> None:
    async with TieredMemory(session_id="s", token_limit=100, tokenizer_fn=words) as memory:
        await memory.aput(answer("w " * 90))
        before = memory.storage.statements
        await memory.aput(ChatMessage(role=MessageRole.TOOL, content="a result"))
        one = memory.storage.statements - before
        for number in range(5):
            await memory.aput(ChatMessage(role=MessageRole.TOOL, content=f"result {number}"))
        assert memory.storage.statements - before == 6 * one
        assert memory._key in memory._shared.stuck


# --- foreign blocks that hang ----------------------------------------------------------------------------------


async def test_a_block_that_hangs_while_it_cuts_costs_its_own_section_only() -> None:
    class Hanging(BaseMemoryBlock[str]):
        name: str = "Hanging"
        priority: int = 1
        timeout_seconds: float = 0.05

        async def _aget(self, messages: list[ChatMessage] | None = None, **_: Any) -> str:
            return "w " * 200

        async def _aput(self, messages: list[ChatMessage]) -> None:
            raise NotImplementedError

        async def atruncate(self, content: str, tokens_to_truncate: int) -> str:
            await asyncio.Event().wait()
            raise AssertionError("never set")

    async with TieredMemory(session_id="s", token_limit=50, tokenizer_fn=words, memory_blocks=[Hanging()]) as memory:
        await memory.aput(user("hello"))
        assert texts(await asyncio.wait_for(memory.aget(), 5)) == ["hello"]


# --- closing ---------------------------------------------------------------------------------------------------


async def test_async_with_closes_what_the_memory_opened(tmp_path: Path) -> None:
    async with TieredMemory(storage=tmp_path / "m.db", session_id="s") as memory:
        await memory.aput(user("hello"))
    assert memory.storage.closed
    async with Storage(tmp_path / "m.db") as storage, TieredMemory(storage=storage, session_id="s") as again:
        assert texts(await again.aget()) == ["hello"]
    assert again.storage.closed


async def test_close_with_flush_lets_the_blocks_absorb_before(tmp_path: Path) -> None:
    class Listening(Notes):
        async def _aput(self, messages: list[ChatMessage]) -> None:
            given.extend(texts(messages))

    given: list[str | None] = []
    memory = TieredMemory(storage=tmp_path / "m.db", session_id="s", memory_blocks=[Listening(said="x")])
    await memory.aput_messages([user("one"), answer("two")])
    await memory.aclose(flush=True)
    assert given == ["one", "two"]


def test_no_thread_but_one_is_left_behind() -> None:
    memories = [TieredMemory(session_id=f"s{number}") for number in range(5)]
    for memory in memories:
        memory.put(user("hello"))
        memory.close()
    assert sum(thread.name == "memory-tiers" for thread in threading.enumerate()) == 1
