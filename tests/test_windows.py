"""The window: in our log with counts that follow the tokenizer, or in a chat store that somebody brought."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from doubles import answer, user
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore
from pydantic import Field

from llama_index_memory_tiers import Storage, TieredChatStore, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.windows import LogWindow, StoreWindow


def letters(text: str) -> list[str]:
    return list(text)


def words(text: str) -> list[str]:
    return text.split()


def texts(messages: list[Any]) -> list[str]:
    return [getattr(message, "message", message).content for message in messages]


# --- in our log: another tokenizer ----------------------------------------------------------------------------


async def test_another_tokenizer_recounts_the_window_when_it_is_read() -> None:
    async with Storage() as storage:
        one = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=words)
        await one.aput_messages([user("four words are here"), answer("two words")])
        assert [stored.tokens for stored in await one.amessages()] == [4, 2]

        other = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=letters)
        window = await other._window.read()
        assert [stored.tokens for stored in window.messages] == [19, 9]
        assert set(window.counters) == {other._shared.counter.name}
        session = await storage.log.session("", "chat")
        assert session is not None
        assert session.active_tokens == 28


async def test_a_recount_is_made_once_and_changes_nothing_else() -> None:
    async with Storage() as storage:
        one = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=words)
        await one.aput_messages([user("four words are here"), answer("two words")])
        other = LogWindow(storage, Scope("chat"), TokenCounter(letters))
        before = [(s.id, s.seq, s.created_at, s.message) for s in await one.amessages()]
        await other.read()
        written = storage.statements
        await other.read()
        assert storage.statements == written + 1  # the read itself
        assert [(s.id, s.seq, s.created_at, s.message) for s in await one.amessages()] == before


async def test_messages_of_a_bare_chat_store_are_counted_by_the_first_memory_that_reads_them() -> None:
    async with Storage() as storage:
        await TieredChatStore(storage).add_messages("chat", [user("four words are here"), answer("two words")])
        memory = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=words)
        await memory.aget()
        session = await storage.log.session("", "chat")
        assert session is not None
        assert session.active_tokens == 6


async def test_a_larger_count_leads_to_a_flush_at_the_next_put() -> None:
    async with Storage() as storage:
        limits: dict[str, Any] = {"token_limit": 100, "chat_history_token_ratio": 0.5, "token_flush_size": 10}
        one = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=words, **limits)
        for number in range(4):
            await one.aput_messages([user(f"question number {number}"), answer("an answer to it")])
        assert await one.aget_all(MessageStatus.ARCHIVED) == []
        other = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=letters, **limits)
        await other.aget()
        await other.aput(user("more"))
        session = await storage.log.session("", "chat")
        assert session is not None
        assert session.active_tokens <= 50
        kept = await other.amessages(MessageStatus.ACTIVE)
        gone = await other.amessages(MessageStatus.ARCHIVED)
        assert sum(stored.tokens for stored in kept) == session.active_tokens
        assert texts(gone + kept) == texts(await other.amessages())
        assert gone


async def test_a_new_message_beside_recounted_ones_is_added_to_the_new_sum() -> None:
    async with Storage() as storage:
        one = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=words)
        await one.aput(user("four words are here"))
        other = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=letters)
        await other.aget()
        await one.aput(answer("two words"))  # by words again
        await other.aget()
        session = await storage.log.session("", "chat")
        assert session is not None
        assert session.active_tokens == 19 + 9


# --- more than enough messages --------------------------------------------------------------------------------


async def test_a_bound_on_messages_holds_within_the_turn_that_crosses_it() -> None:
    async with TieredMemory(session_id="chat", window_messages=3) as memory:
        for number in range(3):
            await memory.aput(user(f"q{number}"))
            await memory.aput(answer(f"a{number}"))
            assert len(await memory.amessages(MessageStatus.ACTIVE)) <= 3
        assert texts(await memory.amessages()) == ["q0", "a0", "q1", "a1", "q2", "a2"]


async def test_a_turn_that_grows_too_large_pushes_older_turns_out_before_it_is_complete() -> None:
    async with TieredMemory(
        session_id="chat", tokenizer_fn=words, token_limit=100, chat_history_token_ratio=0.2, window_messages=50
    ) as memory:
        await memory.aput_messages([user("old question"), answer("old answer")])
        await memory.aput(user("new question"))
        await memory.aput(answer("word " * 30))
        assert texts(await memory.amessages(MessageStatus.ARCHIVED)) == ["old question", "old answer"]


# --- in a foreign store ---------------------------------------------------------------------------------------


class Listener(BaseMemoryBlock[str]):
    """A stock block that notes what it is given."""

    name: str = "listener"
    heard: list[str] = Field(default_factory=list)

    async def _aget(self, messages: list[ChatMessage] | None = None, **_: object) -> str:
        return ""

    async def _aput(self, messages: list[ChatMessage]) -> None:
        self.heard.extend(texts(messages))


@pytest.fixture(params=["stock", "ours"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[AsyncDBChatStore]:
    if request.param == "ours":
        ours = TieredChatStore()
        yield _Foreign(inner=ours)
        await ours.aclose()
        return
    stock = SQLAlchemyChatStore("stock")
    yield stock
    engine = getattr(stock, "_async_engine", None)
    if engine is not None:
        await engine.dispose()


class _Foreign(AsyncDBChatStore):
    """Any store: all that is known of it is LlamaIndex's interface."""

    inner: Any

    async def get_messages(self, key: str, status: Any = MessageStatus.ACTIVE, limit: Any = None, offset: Any = None):
        return await self.inner.get_messages(key, status, limit, offset)

    async def count_messages(self, key: str, status: Any = MessageStatus.ACTIVE) -> int:
        return await self.inner.count_messages(key, status)

    async def add_message(self, key: str, message: ChatMessage, status: Any = MessageStatus.ACTIVE) -> None:
        await self.inner.add_message(key, message, status)

    async def add_messages(self, key: str, messages: list[ChatMessage], status: Any = MessageStatus.ACTIVE) -> None:
        await self.inner.add_messages(key, messages, status)

    async def set_messages(self, key: str, messages: list[ChatMessage], status: Any = MessageStatus.ACTIVE) -> None:
        await self.inner.set_messages(key, messages, status)

    async def delete_message(self, key: str, idx: int) -> ChatMessage | None:
        return await self.inner.delete_message(key, idx)

    async def delete_messages(self, key: str, status: Any = None) -> None:
        await self.inner.delete_messages(key, status)

    async def delete_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
        return await self.inner.delete_oldest_messages(key, n)

    async def archive_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
        return await self.inner.archive_oldest_messages(key, n)

    async def get_keys(self) -> list[str]:
        return await self.inner.get_keys()


SMALL: dict[str, Any] = {"tokenizer_fn": words, "token_limit": 60, "chat_history_token_ratio": 0.3}


@pytest.mark.parametrize("user_id", [None, "logan"])
async def test_a_foreign_store_holds_the_window_and_blocks_get_what_leaves_it(
    store: AsyncDBChatStore, user_id: str | None
) -> None:
    listener = Listener()
    memory = TieredMemory(
        chat_store=store, session_id="chat", user_id=user_id, memory_blocks=[listener], token_flush_size=6, **SMALL
    )
    said = []
    for number in range(6):
        turn = [user(f"question number {number}"), answer(f"answer number {number}")]
        said += texts(turn)
        await memory.aput_messages(turn)
    (key,) = await store.get_keys()
    kept = texts(await store.get_messages(key, MessageStatus.ACTIVE))
    gone = texts(await store.get_messages(key, MessageStatus.ARCHIVED))
    assert gone + kept == said
    assert gone
    await memory.aflush()
    assert listener.heard == gone
    assert texts(await memory.aget()) == kept
    assert texts(await memory.aget_all()) == said
    await memory.aclose()


@pytest.mark.parametrize("user_id", [None, "logan"])
async def test_what_left_a_foreign_store_counts_as_flushed_in_our_log(
    store: AsyncDBChatStore, user_id: str | None
) -> None:
    memory = TieredMemory(
        chat_store=store, session_id="chat", user_id=user_id, memory_blocks=[VectorMemoryBlock()], **SMALL
    )
    for number in range(6):
        await memory.aput_messages([user(f"question number {number}"), answer(f"answer number {number}")])
    log = memory.storage.log
    session = await log.session(user_id or "", "chat")
    assert session is not None
    assert session.head_seq > 0
    assert session.active_tokens == 0
    assert await log.flushed_until(session.sid) == session.head_seq
    await memory.aclose()


async def test_what_left_a_foreign_store_is_recalled(store: AsyncDBChatStore) -> None:
    memory = TieredMemory(
        chat_store=store,
        session_id="chat",
        memory_blocks=[VectorMemoryBlock(embed_model=None)],
        tokenizer_fn=words,
        token_limit=200,
        chat_history_token_ratio=0.1,
    )
    await memory.aput_messages([user("my parrot is called Ozymandias"), answer("what a name")])
    for number in range(8):
        await memory.aput_messages([user(f"question number {number}"), answer(f"answer number {number}")])
    await memory.aflush()
    assert "Ozymandias" not in str(await store.get_messages("chat"))
    context = await memory.aget("what is my parrot called?")
    assert "Ozymandias" in (context[0].content or "")
    await memory.aclose()


async def test_setting_and_resetting_reach_the_foreign_store(store: AsyncDBChatStore) -> None:
    memory = TieredMemory(chat_store=store, session_id="chat")
    await memory.aput(user("before"))
    await memory.aset([user("one"), answer("two")])
    assert texts(await store.get_messages("chat")) == ["one", "two"]
    await memory.areset()
    assert await store.get_messages("chat", None) == []
    await memory.aclose()


async def test_an_empty_batch_leaves_a_foreign_store_alone(store: AsyncDBChatStore) -> None:
    memory = TieredMemory(chat_store=store, session_id="chat")
    await memory.aput_messages([])
    assert await store.get_keys() == []
    await memory.aclose()


async def test_a_memory_for_another_session_uses_the_same_foreign_store_under_its_own_key(
    store: AsyncDBChatStore,
) -> None:
    memory = TieredMemory(chat_store=store, session_id="chat")
    twin = memory.for_session("other")
    await memory.aput(user("here"))
    await twin.aput(user("there"))
    assert texts(await memory.aget()) == ["here"]
    assert texts(await twin.aget()) == ["there"]
    assert sorted(await store.get_keys()) == ["chat", "other"]
    await memory.aclose()


async def test_messages_of_a_foreign_store_are_copied_before_they_are_handed_out() -> None:
    class Live(_Foreign):
        async def get_messages(
            self, key: str, status: Any = MessageStatus.ACTIVE, limit: Any = None, offset: Any = None
        ):
            return self.inner[key]

        async def add_messages(self, key: str, messages: list[ChatMessage], status: Any = MessageStatus.ACTIVE) -> None:
            self.inner.setdefault(key, []).extend(messages)

    live = Live(inner={})
    memory = TieredMemory(chat_store=live, session_id="chat")
    await memory.aput(user("as it was"))
    for message in await memory.aget():
        message.blocks.clear()
    assert texts(live.inner["chat"]) == ["as it was"]
    await memory.aclose()


async def test_the_weaker_promises_of_a_foreign_store_are_documented() -> None:
    said = StoreWindow.__doc__ or ""
    assert all(word in said for word in ("Weaker", "concurrent", "crash", "ids and times"))


async def test_two_users_with_one_session_id_have_each_a_window_in_a_foreign_store(store: AsyncDBChatStore) -> None:
    ann = TieredMemory(chat_store=store, session_id="chat", user_id="ann")
    ben = ann.for_session("chat", user_id="ben")
    nobody = TieredMemory(chat_store=store, session_id="chat")
    # Without the lengths, "a" in "b:c" and "a:b" in "c" would be one.
    near, far = ann.for_session("b:c", user_id="a"), ann.for_session("c", user_id="a:b")
    for number, memory in enumerate((ann, ben, nobody, near, far)):
        await memory.aput(user(f"secret {number}"))
    for number, memory in enumerate((ann, ben, nobody, near, far)):
        assert texts(await memory.aget()) == [f"secret {number}"]
        assert [stored.session_id for stored in await memory.amessages()] == [memory.session_id]
    assert "chat" in await store.get_keys()  # without a user it is the session's id, as in stock
    await ann.aclose()
    await nobody.aclose()


async def test_counts_of_one_unnamed_tokenizer_are_not_trusted_by_another() -> None:
    async with Storage() as storage:
        one = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=lambda text: text.split())
        await one.aput(user("four words are here"))
        other = TieredMemory(storage=storage, session_id="chat", tokenizer_fn=lambda text: text[:])
        await other.aget()
        assert [stored.tokens for stored in await other.amessages()] == [19]
