"""Contract suites: what every chat store and every memory block promises, as tests to run on your own."""
# ruff: noqa: S101, PLR2004  # these are tests: they assert, and their values are literals

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest, mock

from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.memory import Memory
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus

from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.events import ItemReport
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.chat_store import TieredChatStore

STORE_CAPABILITIES = frozenset(
    {
        "atomic_set",  # a set that fails, or is read half way, never shows part of a window
        "bulk_7000",  # one call may hold thousands of messages
        "concurrent",  # writers on one session at the same time lose nothing
        "copies",  # what is given in or out may be changed
        "deletes_by_id",  # `ids_of` names messages for `delete_message`
        "empty_batch",  # adding no messages is harmless
        "keeps_archive",  # setting the window leaves the archive in peace
        "ordered_by_put",  # order is that of the puts, whatever the clock says
    }
)
"""What a store may promise beyond LlamaIndex's interface."""

BLOCK_CAPABILITIES = frozenset(
    {
        "recalls",  # what was told comes back
        "keeps_sessions_apart",  # one object serves several sessions
        "leaves_messages_alone",  # the caller's messages are not written to
    }
)
"""What a block may promise beyond LlamaIndex's interface."""

_PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000049454e44ae426082")
_ODD_TEXTS = (
    "nul \0 in it",
    "lone \ud83d surrogate",
    "🐈‍⬛ und Ümläute",
    "我的猫叫汤姆。",
    "'; DROP TABLE x; --",
    "{{ x }} </memory>",
)
_ALIKE = ("john_doe", "john-doe", "john%", "JOHN_DOE", "john_doe ", "john", "约翰")


def _user(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=text)


def _texts(messages: Sequence[ChatMessage]) -> list[str | None]:
    return [message.content for message in messages]


def _numbered(count: int, start: int = 0) -> list[ChatMessage]:
    return [_user(f"message {number}") for number in range(start, start + count)]


def _tool_turn() -> list[ChatMessage]:
    call = ToolCallBlock(tool_call_id="call-1", tool_name="weather", tool_kwargs={"city": "Paris", "days": [1, 2]})
    return [
        _user("How is the weather in Paris?"),
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[TextBlock(text="Let me look."), call]),
        ChatMessage(role=MessageRole.TOOL, content="Sunny.", additional_kwargs={"tool_call_id": "call-1"}),
        ChatMessage(role=MessageRole.ASSISTANT, content="It is sunny.", additional_kwargs={"cost": 0.5, "tags": None}),
    ]


class StoreContract:
    """What every `AsyncDBChatStore` promises.

    Subclass it under a name that begins with `Test`, override `make_store`, and let pytest collect it (with
    pytest-asyncio in auto mode). What your store does not promise, leave out of `capabilities`: its tests are
    skipped.

    Example:
        ```python
        class TestMyStore(StoreContract):
            capabilities = STORE_CAPABILITIES - {"bulk_7000"}

            async def make_store(self):
                return MyStore(...)
        ```
    """

    capabilities: frozenset[str] = STORE_CAPABILITIES

    async def make_store(self) -> AsyncDBChatStore:
        """Return an empty store; called once per test."""
        raise NotImplementedError

    async def close_store(self, store: AsyncDBChatStore) -> None:
        """Release what the store holds; default: its `aclose`, if it has one."""
        await _close(store)

    async def ids_of(self, store: AsyncDBChatStore, key: str) -> list[Any]:
        """Return what `delete_message` takes for each message of a session, in order; for `deletes_by_id`."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def _store(self, capability: str | None = None) -> AsyncIterator[AsyncDBChatStore]:
        if capability is not None and capability not in self.capabilities:
            raise SkipTest(f"the store does not promise {capability!r}")
        store = await self.make_store()
        try:
            yield store
        finally:
            await self.close_store(store)

    async def test_capabilities_are_known_names(self) -> None:
        """A misspelt capability would skip nothing and promise nothing."""
        assert self.capabilities <= STORE_CAPABILITIES

    # -- what LlamaIndex's interface asks for ----------------------------------------------------------------

    async def test_a_new_session_is_empty(self) -> None:
        """Reading, counting and moving in a session that nobody wrote to gives nothing."""
        async with self._store() as store:
            assert await store.get_messages("nobody") == []
            assert await store.count_messages("nobody") == 0
            assert await store.archive_oldest_messages("nobody", 3) == []
            assert await store.delete_oldest_messages("nobody", 3) == []
            await store.delete_messages("nobody")
            assert await store.get_keys() == []

    async def test_messages_come_back_in_order(self) -> None:
        """Single puts and batches come back equal, in the order they were given."""
        async with self._store() as store:
            await store.add_message("s", _user("first"))
            await store.add_messages("s", _numbered(5))
            await store.add_message("s", _user("last"))
            assert await store.get_messages("s") == [_user("first"), *_numbered(5), _user("last")]

    async def test_every_role_comes_back(self) -> None:
        """No role is mistaken for another."""
        async with self._store() as store:
            messages = [ChatMessage(role=role, content=role.value) for role in MessageRole]
            await store.add_messages("s", messages)
            assert [message.role for message in await store.get_messages("s")] == list(MessageRole)

    async def test_limit_takes_the_oldest(self) -> None:
        """A limit cuts at the end, and may be larger than what there is."""
        async with self._store() as store:
            await store.add_messages("s", _numbered(6))
            assert await store.get_messages("s", limit=2) == _numbered(2)
            assert await store.get_messages("s", limit=60) == _numbered(6)

    async def test_offset_with_limit_reads_a_page(self) -> None:
        """An offset skips the oldest."""
        async with self._store() as store:
            await store.add_messages("s", _numbered(6))
            assert await store.get_messages("s", limit=2, offset=3) == _numbered(2, start=3)
            assert await store.get_messages("s", limit=5, offset=6) == []

    async def test_counts_follow_the_status(self) -> None:
        """Active and archived messages are counted apart and together."""
        async with self._store() as store:
            await store.add_messages("s", _numbered(3))
            await store.add_messages("s", _numbered(2, start=3), status=MessageStatus.ARCHIVED)
            assert await store.count_messages("s") == 3
            assert await store.count_messages("s", MessageStatus.ARCHIVED) == 2
            assert await store.count_messages("s", None) == 5
            assert await store.get_messages("s") == _numbered(3)
            assert await store.get_messages("s", None) == _numbered(5)

    async def test_archiving_moves_the_oldest(self) -> None:
        """The oldest active messages are returned, leave the window and stay readable."""
        async with self._store() as store:
            await store.add_messages("s", _numbered(5))
            assert await store.archive_oldest_messages("s", 2) == _numbered(2)
            assert await store.archive_oldest_messages("s", 1) == _numbered(1, start=2)
            assert await store.archive_oldest_messages("s", 0) == []
            assert await store.get_messages("s") == _numbered(2, start=3)
            assert await store.get_messages("s", MessageStatus.ARCHIVED) == _numbered(3)

    async def test_deleting_the_oldest_returns_them(self) -> None:
        """They are gone for good; more than there are is all there are."""
        async with self._store() as store:
            await store.add_messages("s", _numbered(4))
            assert await store.delete_oldest_messages("s", 1) == _numbered(1)
            assert await store.delete_oldest_messages("s", 9) == _numbered(3, start=1)
            assert await store.get_messages("s", None) == []

    async def test_deleting_a_session_keeps_the_others(self) -> None:
        """A deletion by key or status reaches nothing else."""
        async with self._store() as store:
            for key in ("s", "t"):
                await store.add_messages(key, _numbered(4))
                await store.archive_oldest_messages(key, 2)
            await store.delete_messages("s", MessageStatus.ARCHIVED)
            assert await store.get_messages("s", None) == _numbered(2, start=2)
            await store.delete_messages("s")
            assert await store.get_messages("s", None) == []
            assert await store.get_messages("t", None) == _numbered(4)

    async def test_deleting_what_is_absent_returns_none(self) -> None:
        """An id that no message has is no error."""
        async with self._store() as store:
            await store.add_message("s", _user("here"))
            assert await store.delete_message("s", 987_654) is None
            assert await store.delete_message("nobody", 1) is None
            assert await store.count_messages("s") == 1

    async def test_set_replaces_the_window(self) -> None:
        """After a set the window is exactly what was given, in order; an empty one empties it."""
        async with self._store() as store:
            await store.add_messages("s", _numbered(4))
            wanted = [_user("new"), *_numbered(2, start=2), _user("new")]
            await store.set_messages("s", wanted)
            assert await store.get_messages("s") == wanted
            await store.set_messages("s", [])
            assert await store.get_messages("s") == []

    async def test_set_may_bring_back_what_was_archived(self) -> None:
        """A window that is set to the whole history shows the whole history, once."""
        async with self._store() as store:
            await store.add_messages("s", _numbered(4))
            await store.archive_oldest_messages("s", 2)
            await store.set_messages("s", _numbered(5))
            assert await store.get_messages("s") == _numbered(5)

    async def test_keys_are_those_written_to(self) -> None:
        """Every session with messages is listed once."""
        async with self._store() as store:
            for key in ("a", "b", "a"):
                await store.add_message(key, _user(key))
            assert sorted(await store.get_keys()) == ["a", "b"]

    async def test_look_alike_keys_are_different_sessions(self) -> None:
        """Keys are compared character by character: no pattern, no case folding, no trimming."""
        async with self._store() as store:
            for key in _ALIKE:
                await store.add_message(key, _user(f"only for {key}"))
            for key in _ALIKE:
                assert _texts(await store.get_messages(key)) == [f"only for {key}"]
            await store.delete_messages("john%")
            assert await store.count_messages("john_doe") == 1

    async def test_any_text_survives(self) -> None:
        """NUL, lone surrogates, emoji, Chinese, SQL and template code come back as they were."""
        async with self._store() as store:
            await store.add_messages("s", [_user(text) for text in _ODD_TEXTS])
            assert _texts(await store.get_messages("s")) == list(_ODD_TEXTS)

    async def test_empty_contents_survive(self) -> None:
        """No text, no block and many blocks are all messages."""
        async with self._store() as store:
            many = ChatMessage(role=MessageRole.USER, blocks=[TextBlock(text=str(number)) for number in range(3)])
            messages = [_user(""), ChatMessage(role=MessageRole.USER, blocks=[]), many]
            await store.add_messages("s", messages)
            assert await store.get_messages("s") == messages

    async def test_tool_calls_survive(self) -> None:
        """Tool calls, results and extra arguments come back equal."""
        async with self._store() as store:
            await store.add_messages("s", _tool_turn())
            assert await store.get_messages("s") == _tool_turn()

    async def test_images_survive(self) -> None:
        """An image given as bytes comes back with the same bytes."""
        async with self._store() as store:
            await store.add_message("s", ChatMessage(role=MessageRole.USER, blocks=[ImageBlock(image=_PNG)]))
            block = (await store.get_messages("s"))[0].blocks[0]
            assert isinstance(block, ImageBlock)
            assert block.resolve_image().read() == _PNG

    async def test_the_callers_messages_are_left_as_they_are(self) -> None:
        """Storing writes nothing into the objects that were given."""
        async with self._store() as store:
            given = _tool_turn()
            await store.add_message("s", given[0])
            await store.add_messages("s", given)
            await store.set_messages("s", given)
            assert given == _tool_turn()

    # -- what a store may promise beyond it ------------------------------------------------------------------

    async def test_an_empty_batch_changes_nothing(self) -> None:
        """An agent's scratchpad may be empty."""
        async with self._store("empty_batch") as store:
            await store.add_messages("s", [])
            assert await store.get_messages("s", None) == []

    async def test_returned_messages_are_copies(self) -> None:
        """An agent edits the last message it is given; the store must not see that."""
        async with self._store("copies") as store:
            given = _tool_turn()
            await store.add_messages("s", given)
            given[2].additional_kwargs["later"] = True
            for message in await store.get_messages("s"):
                message.blocks.append(TextBlock(text="scribbled"))
                message.additional_kwargs["scribbled"] = True
            assert await store.get_messages("s") == _tool_turn()

    async def test_order_does_not_depend_on_the_clock(self) -> None:
        """A clock that steps back reorders nothing and moves the oldest, not the newest."""
        async with self._store("ordered_by_put") as store:
            with mock.patch("time.time_ns", side_effect=itertools.count(time.time_ns(), -1_000_000_000)):
                for message in _numbered(4):
                    await store.add_message("s", message)
            assert await store.get_messages("s") == _numbered(4)
            assert await store.archive_oldest_messages("s", 1) == _numbered(1)

    async def test_a_set_that_fails_changes_nothing(self) -> None:
        """One message that cannot be stored leaves window and archive as they were."""
        async with self._store("atomic_set") as store:
            await store.add_messages("s", _numbered(3))
            bad = ChatMessage(role=MessageRole.USER, content="bad", additional_kwargs={"x": object()})
            with contextlib.suppress(Exception):
                await store.set_messages("s", [_user("new"), bad])
            assert await store.get_messages("s", None) == _numbered(3)

    async def test_readers_never_see_half_a_set(self) -> None:
        """While one task sets, others read one whole window or the other."""
        async with self._store("atomic_set") as store:
            windows = (_numbered(3), _numbered(5, start=100))
            await store.set_messages("s", windows[0])

            async def switch() -> None:
                for number in range(1, 9):
                    await store.set_messages("s", windows[number % 2])

            switching = asyncio.create_task(switch())
            while not switching.done():
                assert await store.get_messages("s") in windows
                await asyncio.sleep(0)  # a store in memory never waits by itself
            await switching

    async def test_setting_the_window_keeps_the_archive(self) -> None:
        """What has left the window is history, not the window's to delete."""
        async with self._store("keeps_archive") as store:
            await store.add_messages("s", _numbered(3))
            await store.archive_oldest_messages("s", 2)
            await store.set_messages("s", [_user("new")])
            assert await store.get_messages("s") == [_user("new")]
            assert (await store.get_messages("s", MessageStatus.ARCHIVED))[:2] == _numbered(2)

    async def test_deleting_by_id_deletes_that_message(self) -> None:
        """The message is returned once, then gone; its neighbours stay."""
        async with self._store("deletes_by_id") as store:
            await store.add_messages("s", _numbered(3))
            middle = (await self.ids_of(store, "s"))[1]
            assert await store.delete_message("other", middle) is None
            assert await store.delete_message("s", middle) == _user("message 1")
            assert await store.delete_message("s", middle) is None
            assert await store.get_messages("s", None) == [_user("message 0"), _user("message 2")]

    async def test_concurrent_adds_lose_nothing(self) -> None:
        """Fifty writers on one new session: each message is there once, each batch in one piece."""
        async with self._store("concurrent") as store:
            await asyncio.gather(*(store.add_messages("s", _numbered(3, start=3 * n)) for n in range(50)))
            found = _texts(await store.get_messages("s"))
            assert sorted(found, key=str) == sorted(_texts(_numbered(150)), key=str)
            assert all(found[at : at + 3] == _texts(_numbered(3, start=_number(found[at]))) for at in range(0, 150, 3))

    async def test_concurrent_archiving_moves_each_message_once(self) -> None:
        """Several flushes at once archive what they say, and nothing twice."""
        async with self._store("concurrent") as store:
            await store.add_messages("s", _numbered(40))
            moved = await asyncio.gather(*(store.archive_oldest_messages("s", 5) for _ in range(4)))
            told = [text for part in moved for text in _texts(part)]
            assert len(told) == len(set(told))
            assert await store.count_messages("s", MessageStatus.ARCHIVED) == len(told)

    async def test_one_call_may_hold_thousands_of_messages(self) -> None:
        """Databases bound the parameters of a statement; callers need not know."""
        async with self._store("bulk_7000") as store:
            await store.add_messages("s", _numbered(7000))
            assert await store.count_messages("s") == 7000
            assert await store.get_messages("s", limit=1, offset=6999) == _numbered(1, start=6999)
            await store.set_messages("s", _numbered(1))
            assert await store.get_messages("s") == _numbered(1)


class BlockContract:
    """What every memory block promises, LlamaIndex's, ours and yours.

    Subclass it under a name that begins with `Test` and override `make_block`; see `StoreContract`. Say in `told`,
    `asked` and `expected` how to see that the block remembers; with an empty `expected` nothing is expected back.
    Blocks that are a `TieredMemoryBlock` get the tests about durable storage as well, the others skip them.
    """

    capabilities: frozenset[str] = BLOCK_CAPABILITIES
    told = "My cat is called Tom."
    asked = "What is my cat called?"
    expected = "Tom"

    def make_block(self) -> BaseMemoryBlock[Any]:
        """Return a new block with the same settings every time."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def _block(self, capability: str | None = None) -> AsyncIterator[BaseMemoryBlock[Any]]:
        if capability is not None and capability not in self.capabilities:
            raise SkipTest(f"the block does not promise {capability!r}")
        block = self.make_block()
        try:
            yield block
        finally:
            await _close(block)

    async def _ask(self, block: BaseMemoryBlock[Any], session_id: str = "s") -> str:
        return content_text(await block.aget([_user(self.asked)], session_id=session_id))

    async def _tell(self, block: BaseMemoryBlock[Any], text: str, session_id: str = "s") -> None:
        messages = [_user(text), ChatMessage(role=MessageRole.ASSISTANT, content="I see.")]
        await block.aput(messages, from_short_term_memory=True, session_id=session_id)

    async def test_capabilities_are_known_names(self) -> None:
        """A misspelt capability would skip nothing and promise nothing."""
        assert self.capabilities <= BLOCK_CAPABILITIES

    async def test_a_new_block_can_be_read(self) -> None:
        """Before anything was put, reading gives a content and raises nothing."""
        async with self._block() as block:
            for messages in (None, [], [_user(self.asked)]):
                assert isinstance(content_text(await block.aget(messages, session_id="s")), str)

    async def test_what_was_told_comes_back(self) -> None:
        """After a put, the block's content answers the question."""
        async with self._block("recalls") as block:
            await self._tell(block, self.told)
            assert self.expected in await self._ask(block)

    async def test_sessions_do_not_mix(self) -> None:
        """What one session told is in no other session's content."""
        async with self._block("keeps_sessions_apart") as block:
            before = await self._ask(block, "another")
            await self._tell(block, self.told, "one")
            assert await self._ask(block, "another") == before

    async def test_the_callers_messages_are_left_as_they_are(self) -> None:
        """Putting and getting write nothing into the objects that were given."""
        async with self._block("leaves_messages_alone") as block:
            given = _tool_turn()
            await block.aput(given, from_short_term_memory=True, session_id="s")
            await block.aget(given, session_id="s")
            assert given == _tool_turn()

    async def test_an_empty_put_changes_nothing(self) -> None:
        """A flush may have nothing for a block."""
        async with self._block() as block:
            before = await self._ask(block)
            await block.aput([], from_short_term_memory=True, session_id="s")
            assert await self._ask(block) == before

    async def test_reading_changes_nothing(self) -> None:
        """An agent reads once per tool round: the same question has the same answer."""
        async with self._block() as block:
            await self._tell(block, self.told)
            first = await self._ask(block)
            assert [await self._ask(block) for _ in range(3)] == [first] * 3

    async def test_any_text_can_be_put(self) -> None:
        """NUL, lone surrogates, emoji, Chinese and template code break neither put nor get."""
        async with self._block() as block:
            for text in (*_ODD_TEXTS, self.told):
                await self._tell(block, text)
            content = await self._ask(block)
            assert not self.expected or "recalls" not in self.capabilities or self.expected in content

    async def test_any_message_can_be_put(self) -> None:
        """Tool calls, images and messages without any content are no surprise."""
        async with self._block() as block:
            picture = ChatMessage(role=MessageRole.USER, blocks=[ImageBlock(image=_PNG)])
            await block.aput(
                [*_tool_turn(), picture, ChatMessage(role=MessageRole.ASSISTANT, blocks=[])], session_id="s"
            )
            assert isinstance(await self._ask(block), str)

    async def test_many_messages_can_be_put(self) -> None:
        """A first flush of an old session is large."""
        async with self._block() as block:
            await block.aput([_user(self.told), *_numbered(300)], from_short_term_memory=True, session_id="s")
            assert isinstance(await self._ask(block), str)

    async def test_cutting_never_makes_more(self) -> None:
        """`atruncate` gives up its content or returns less of it."""
        async with self._block() as block:
            await self._tell(block, self.told)
            content = await block.aget([_user(self.asked)], session_id="s")
            if content:
                cut = await block.atruncate(content, 5)
                assert cut is None or len(content_text(cut)) <= len(content_text(content))

    async def test_it_works_in_stock_memory(self) -> None:
        """One agent's conversation in LlamaIndex's own `Memory` runs to its end."""
        async with self._block() as block, Storage() as storage:
            memory = Memory.from_defaults(
                session_id="s", token_limit=2000, token_flush_size=100, chat_history_token_ratio=0.05,
                memory_blocks=[block], chat_store=TieredChatStore(storage),
            )  # fmt: skip
            await self._converse(memory)

    async def test_it_works_in_tiered_memory(self) -> None:
        """The same conversation in `TieredMemory` stays within its limit, and the block reads all of it."""
        async with self._block() as block, Storage() as storage:
            memory = TieredMemory(
                storage=storage, session_id="s", token_limit=2000, token_flush_size=100,
                chat_history_token_ratio=0.05, memory_blocks=[block],
            )  # fmt: skip
            await self._converse(memory)
            report = await memory.aflush()
            assert [(one.pending, one.error) for one in report.blocks] == [(0, None)] * len(report.blocks)
            assert (await memory.aexplain(self.asked)).tokens <= 2000
            await memory.aclose()

    async def _converse(self, memory: Memory) -> None:
        for number in range(4):
            for message in (_user(f"{self.told} ({number})"), *_tool_turn()[1:]):
                await memory.aput(message)
                assert await memory.aget(input=self.told)
        shown = await memory.aget(input=self.asked)
        assert any("It is sunny." in (message.content or "") for message in shown)

    # -- blocks whose state is in a storage ------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _address(self) -> AsyncIterator[Path]:
        if not isinstance(self.make_block(), TieredMemoryBlock):
            raise SkipTest("the block keeps its state by itself")
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / "memory.db"

    @property
    def _crosses_sessions(self) -> bool:
        return "recalls" in self.capabilities and getattr(self.make_block(), "scope", "") == "user"

    def _memory(self, storage: Storage, user_id: str, session_id: str) -> TieredMemory:
        return TieredMemory(storage=storage, user_id=user_id, session_id=session_id, memory_blocks=[self.make_block()])

    async def _recalled(self, memory: TieredMemory) -> list[ItemReport]:
        report = await memory.aexplain(self.asked)
        return [item for part in report.parts for item in part.kept]

    async def _told_in(self, memory: TieredMemory) -> None:
        await memory.aput_messages([_user(self.told), ChatMessage(role=MessageRole.ASSISTANT, content="I see.")])
        await memory.aflush()

    async def test_absorbing_twice_changes_nothing(self) -> None:
        """A second flush and a repeated put leave exactly what the first left."""
        async with self._address() as path, Storage(path) as storage:
            memory = self._memory(storage, "ann", "s")
            for _ in range(3):
                await memory.aput(_user(self.told), uid="the-same-put")
                await memory.aflush()
            asking = memory.for_session("t")
            first = await self._recalled(asking)
            assert len([item for item in first if self.expected in item.text]) <= 1
            await memory.aflush()
            assert await self._recalled(asking) == first
            await memory.aclose()

    async def test_it_survives_a_restart(self) -> None:
        """A new block on a reopened storage knows what the old one learnt."""
        async with self._address() as path:
            async with Storage(path) as storage:
                memory = self._memory(storage, "ann", "s")
                await self._told_in(memory)
                before = await self._recalled(memory.for_session("t"))
                await memory.aclose()
            async with Storage(path) as storage:
                memory = self._memory(storage, "ann", "t")
                after = await self._recalled(memory)
                await memory.aclose()
            assert [item.text for item in after] == [item.text for item in before]
            assert any(self.expected in item.text for item in after) is self._crosses_sessions

    async def test_a_user_is_known_in_another_session(self) -> None:
        """Long-term memory belongs to the user, or with `scope="session"` to the session."""
        async with self._address() as path, Storage(path) as storage:
            memory = self._memory(storage, "ann", "s")
            await self._told_in(memory)
            known = any(self.expected in item.text for item in await self._recalled(memory.for_session("t")))
            assert known is self._crosses_sessions
            await memory.aclose()

    async def test_users_do_not_mix(self) -> None:
        """A block object that serves two users shows neither the other's, whatever their sessions are called."""
        async with self._address() as path, Storage(path) as storage:
            ann = self._memory(storage, "ann", "s")
            await self._told_in(ann)
            for user_id, session_id in (("Ann", "s"), ("ann ", "s"), ("a%", "t")):
                other = ann.for_session(session_id, user_id=user_id)
                assert await self._recalled(other) == []
            await ann.aclose()


def content_text(content: Any) -> str:
    """The text of what a block returned.

    Args:
        content: A text, content blocks, chat messages, or nothing.

    Returns:
        The text; '' for nothing.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        (part.content or "") if isinstance(part, ChatMessage) else getattr(part, "text", type(part).__name__)
        for part in content
    )


def _number(text: str | None) -> int:
    return int((text or "").split()[-1])


async def _close(resource: Any) -> None:
    close = getattr(resource, "aclose", None)
    if close is not None:
        await close()
