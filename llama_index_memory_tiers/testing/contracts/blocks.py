"""What every memory block promises, as tests to run on your own."""
# ruff: noqa: S101, PLR2004  # these are tests: they assert, and their values are literals

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole
from llama_index.core.memory import Memory
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.events import ItemReport
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.chat_store import TieredChatStore
from llama_index_memory_tiers.testing.contracts.samples import (
    ODD_TEXTS,
    PNG,
    close,
    content_text,
    numbered,
    tool_turn,
    user_says,
)

BLOCK_CAPABILITIES = frozenset(
    {
        "recalls",  # what was told comes back
        "keeps_sessions_apart",  # one object serves several sessions
        "leaves_messages_alone",  # the caller's messages are not written to
    }
)
"""What a block may promise beyond LlamaIndex's interface."""


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
            await close(block)

    async def _ask(self, block: BaseMemoryBlock[Any], session_id: str = "s") -> str:
        return content_text(await block.aget([user_says(self.asked)], session_id=session_id))

    async def _tell(self, block: BaseMemoryBlock[Any], text: str, session_id: str = "s") -> None:
        messages = [user_says(text), ChatMessage(role=MessageRole.ASSISTANT, content="I see.")]
        await block.aput(messages, from_short_term_memory=True, session_id=session_id)

    async def test_capabilities_are_known_names(self) -> None:
        """A misspelt capability would skip nothing and promise nothing."""
        assert self.capabilities <= BLOCK_CAPABILITIES

    async def test_a_new_block_can_be_read(self) -> None:
        """Before anything was put, reading gives a content and raises nothing."""
        async with self._block() as block:
            for messages in (None, [], [user_says(self.asked)]):
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
            given = tool_turn()
            await block.aput(given, from_short_term_memory=True, session_id="s")
            await block.aget(given, session_id="s")
            assert given == tool_turn()

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
            for text in (*ODD_TEXTS, self.told):
                await self._tell(block, text)
            content = await self._ask(block)
            assert not self.expected or "recalls" not in self.capabilities or self.expected in content

    async def test_any_message_can_be_put(self) -> None:
        """Tool calls, images and messages without any content are no surprise."""
        async with self._block() as block:
            picture = ChatMessage(role=MessageRole.USER, blocks=[ImageBlock(image=PNG)])
            await block.aput(
                [*tool_turn(), picture, ChatMessage(role=MessageRole.ASSISTANT, blocks=[])], session_id="s"
            )
            assert isinstance(await self._ask(block), str)

    async def test_many_messages_can_be_put(self) -> None:
        """A first flush of an old session is large."""
        async with self._block() as block:
            await block.aput([user_says(self.told), *numbered(300)], from_short_term_memory=True, session_id="s")
            assert isinstance(await self._ask(block), str)

    async def test_cutting_never_makes_more(self) -> None:
        """`atruncate` gives up its content or returns less of it."""
        async with self._block() as block:
            await self._tell(block, self.told)
            content = await block.aget([user_says(self.asked)], session_id="s")
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
            for message in (user_says(f"{self.told} ({number})"), *tool_turn()[1:]):
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
        await memory.aput_messages([user_says(self.told), ChatMessage(role=MessageRole.ASSISTANT, content="I see.")])
        await memory.aflush()

    async def test_absorbing_twice_changes_nothing(self) -> None:
        """A second flush and a repeated put leave exactly what the first left."""
        async with self._address() as path, Storage(path) as storage:
            memory = self._memory(storage, "ann", "s")
            for _ in range(3):
                await memory.aput(user_says(self.told), uid="the-same-put")
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
