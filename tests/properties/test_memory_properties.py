"""Whatever is said in whatever order: budgets hold, histories are whole, blocks hear everything once."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from doubles import (
    BadContentError,
    RecordingBlock,
    absorb_all,
    assert_once,
    assert_tiled,
    heads,
    shown,
    told,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.memory.memory import BaseMemoryBlock
from running import SOAK

from llama_index_memory_tiers import StaticMemoryBlock, Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.records import Batch

IMAGE_TOKENS = 7
SESSIONS = ("red", "green", "blue")


def words(text: str) -> list[str]:
    """A tokenizer that a test can count by itself."""
    return re.findall(r"\w+|[^\w\s]", text)


def recount(messages: Sequence[ChatMessage]) -> int:
    total = 0
    for message in messages:
        total += len(words(str(message.additional_kwargs))) if message.additional_kwargs else 0
        for block in message.blocks:
            if isinstance(block, TextBlock):
                total += len(words(block.text))
            elif isinstance(block, ImageBlock):
                total += IMAGE_TOKENS
            else:
                assert isinstance(block, ToolCallBlock)
                total += len(words(f"{block.tool_name} {json.dumps(block.tool_kwargs)}"))
    return total


# --- histories ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One thing that happens in one session."""

    kind: str
    session: str
    size: int = 1


@dataclass(frozen=True)
class Setting:
    """How the memory is made."""

    token_limit: int
    ratio: float
    flush_size: int
    window_messages: int | None
    static_priority: int
    vector_priority: int
    insert_method: str
    recall_position: str
    delivery: str
    absorb_every: int


KINDS = ("user", "assistant", "tools", "parallel tools", "system", "image", "get", "flush", "fail", "mute", "reopen")
WEIGHTED = [kind for kind in KINDS for _ in range(4 if kind in {"user", "assistant", "get"} else 1)]
steps = st.builds(Step, kind=st.sampled_from(WEIGHTED), session=st.sampled_from(SESSIONS), size=st.integers(1, 20))
made_settings = st.builds(
    Setting,
    token_limit=st.sampled_from([70, 90, 150, 400]),
    ratio=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    flush_size=st.sampled_from([1, 20, 60]),
    window_messages=st.sampled_from([None, None, 3]),
    static_priority=st.integers(0, 2),
    vector_priority=st.integers(0, 3),
    insert_method=st.sampled_from(["system", "user"]),
    recall_position=st.sampled_from(["system", "user"]),
    delivery=st.sampled_from(["inline", "background"]),
    absorb_every=st.integers(1, 3),
)


class Moody(BaseMemoryBlock[str]):
    """A third-party block that cannot always answer."""

    name: str = "Moody"
    priority: int = 3
    mute: bool = False

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        if self.mute:
            raise RuntimeError("not today")
        return "a line of my own " * 3

    async def _aput(self, messages: list[ChatMessage]) -> None:
        if self.mute:
            raise RuntimeError("not today")

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        left = content.split()[: -tokens_to_truncate or None]
        return " ".join(left) or None


@dataclass
class Failures:
    """How often the recording block fails before it works again."""

    left: int = 0

    def __call__(self, batch: Batch) -> None:
        if self.left:
            self.left -= 1
            raise BadContentError("unreadable")


@dataclass
class World:
    """A user with overlapping sessions, and what a test knows to be true of them."""

    path: Path
    setting: Setting
    said: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    newest_user: dict[str, str] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    moody: Moody = field(default_factory=Moody)
    number: int = 0

    def open(self) -> None:
        given = self.setting
        self.memory = TieredMemory(
            storage=Storage(self.path),
            user_id="ada",
            session_id=SESSIONS[0],
            token_limit=given.token_limit,
            chat_history_token_ratio=given.ratio,
            token_flush_size=given.flush_size,
            window_messages=given.window_messages,
            insert_method=given.insert_method,
            recall_position=given.recall_position,
            delivery=given.delivery,
            tokenizer_fn=words,
            image_token_size_estimate=IMAGE_TOKENS,
            claim_seconds=0.05,
            memory_blocks=[
                StaticMemoryBlock(static_content="my name is ada", priority=given.static_priority),
                RecordingBlock(absorb_every=given.absorb_every, on_prepare=self.failures),
                VectorMemoryBlock(embed_model=None, priority=max(1, given.vector_priority)),
                self.moody,
            ],
        )

    async def close(self) -> None:
        await self.memory.aclose()
        await self.memory.storage.aclose()

    def session(self, name: str) -> TieredMemory:
        return self.memory.for_session(name)

    def mark(self) -> str:
        self.number += 1
        return f"m{self.number}"

    def messages(self, step: Step) -> list[list[ChatMessage]]:
        """What is put by a step: a list for each put."""
        text = " ".join([self.mark(), *(f"word{self.number * at % 7}" for at in range(step.size))])
        if step.kind in {"user", "assistant", "system"}:
            return [[ChatMessage(role=step.kind, content=text)]]
        if step.kind == "image":
            image = ImageBlock(url="https://pictures.invalid/cat.png")
            return [[ChatMessage(role="user", blocks=[TextBlock(text=text), image])]]
        calls = [self.mark() for _ in range(1 if step.kind == "tools" else 2)]
        made = [ToolCallBlock(tool_call_id=call, tool_name="look", tool_kwargs={"at": call}) for call in calls]
        results = [
            ChatMessage(role="tool", content=f"{call} found", additional_kwargs={"tool_call_id": call})
            for call in calls
        ]
        asked = ChatMessage(role="assistant", blocks=list(made))
        return [[asked], *([result] for result in results)] if step.size % 2 else [[asked, *results]]

    async def take(self, step: Step) -> None:
        """Do a step."""
        if step.kind == "get":
            await self.check_context(step.session)
        elif step.kind == "flush":
            await self.session(step.session).aflush()
        elif step.kind == "fail":
            self.failures.left += step.size
            for _ in range(step.size // 2):  # eight tries at one message make it a dead letter
                await self.session(step.session).aflush()
        elif step.kind == "mute":
            self.moody.mute = not self.moody.mute
        elif step.kind == "reopen":
            await self.close()
            self.open()
        else:
            for put in self.messages(step):
                await self.session(step.session).aput_messages(put)
                self.said[step.session] += [shown(message) for message in put]
                if put[-1].role == MessageRole.USER:
                    self.newest_user[step.session] = (put[-1].content or "").split()[0]

    async def check_context(self, name: str) -> None:
        report = await self.session(name).aexplain()
        found = list(report.messages)
        total = recount(found)
        assert total <= self.setting.token_limit, f"{total} tokens in a context of {self.setting.token_limit}"
        assert total == report.tokens
        assert not report.overflow
        self.check_turns(name, found)
        archived = sum(part.name == "RetrievedMessages" and bool(part.kept) for part in report.parts)
        event(f"recalled: {bool(archived)}")

    def check_turns(self, name: str, found: Sequence[ChatMessage]) -> None:
        newest = self.newest_user.get(name)
        users = [message for message in found if message.role == MessageRole.USER]
        if newest is not None:
            assert users
            assert newest in (users[-1].content or "").split()
        called: set[str] = set()
        for message in found:
            called |= {
                block.tool_call_id for block in message.blocks if isinstance(block, ToolCallBlock) if block.tool_call_id
            }
            if message.role == MessageRole.TOOL:
                assert message.additional_kwargs["tool_call_id"] in called
        turns = [shown(message) for message in found if message.role in {MessageRole.ASSISTANT, MessageRole.TOOL}]
        assert turns == [text for text in self.said[name] if text in set(turns)]

    async def check_end(self) -> None:
        """Nothing was forgotten: the log is whole and every block has heard it once."""
        self.failures.left, self.moody.mute = 0, False
        for name in SESSIONS:
            assert [shown(message) for message in await self.session(name).aget_all()] == self.said[name]
        await absorb_all(self.memory)
        event(f"dead letters: {bool(await self.memory.adead_letters())}")
        assert (await self.memory.areplay()).complete
        assert await self.memory.adead_letters() == []
        heard = await told(self.memory.storage)
        assert_once(heard.texts, [text for texts in self.said.values() for text in texts])
        assert_tiled(sorted(heard.ranges), await heads(self.memory.storage))


async def live(history: Sequence[Step], setting: Setting) -> None:
    with TemporaryDirectory() as folder:
        world = World(Path(folder) / "memory.db", setting)
        world.open()
        for step in history:
            await world.take(step)
        for name in world.said:
            await world.check_context(name)
        await world.close()
        world.open()
        await world.check_end()
        await world.close()


@settings(max_examples=400 if SOAK else 20)
@given(history=st.lists(steps, min_size=5, max_size=40), setting=made_settings)
def test_any_history_keeps_its_budget_its_turns_and_every_message(history: list[Step], setting: Setting) -> None:
    asyncio.run(live(history, setting))
