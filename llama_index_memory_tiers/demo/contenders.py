"""Who is compared: agents without a memory, with LlamaIndex's, and with ours; and how they are scored."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.memory import Memory
from llama_index.core.memory import StaticMemoryBlock as CoreStaticMemoryBlock
from llama_index.core.memory import VectorMemoryBlock as CoreVectorMemoryBlock
from llama_index.core.schema import TextNode
from llama_index.core.storage.chat_store.base_db import MessageStatus
from llama_index.core.utils import get_tokenizer
from pydantic import PrivateAttr
from typing_extensions import Self

from llama_index_memory_tiers import StaticMemoryBlock, Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.chats import Chat, ChatTurn, RecallQuestion
from llama_index_memory_tiers.demo.agents import (
    Clock,
    Heard,
    as_message,
    make_agent,
    make_embedding,
    put_lines,
    replay,
    run_agent,
)
from llama_index_memory_tiers.evaluation import as_shown, context_text, holds
from llama_index_memory_tiers.events import ContextReport, WindowFlushed, dispatcher

TOKEN_LIMIT = 1500
WINDOW_RATIO = 0.3
GUIDANCE = "You talk with somebody you know: answer from what you were told, or say that you don't know."

# --- the contenders ---------------------------------------------------------------------------------------------


class Contender(Protocol):
    """Somebody who is asked about a chat."""

    name: str

    async def ask(self, question: RecallQuestion) -> Heard:
        """Answer a question."""

    async def aclose(self) -> None:
        """Let go of everything."""


class NoMemory:
    """An agent that knows only what it is asked."""

    name = "no memory"

    def __init__(self, llm: FunctionCallingLLM) -> None:
        self._agent = make_agent(llm, Clock())

    async def ask(self, question: RecallQuestion) -> Heard:
        """Answer a question."""
        return await run_agent(self._agent, None, question.text)

    async def aclose(self) -> None:
        """There is nothing to close."""


class Stock:
    """LlamaIndex's own `Memory` and blocks: one process, one session a user, to its advantage."""

    name = "stock Memory"

    def __init__(self, llm: FunctionCallingLLM, embed_model: BaseEmbedding) -> None:
        from llama_index.vector_stores.qdrant import QdrantVectorStore  # noqa: PLC0415  # optional
        from qdrant_client import AsyncQdrantClient  # noqa: PLC0415  # loaded with it

        self._clock = Clock()
        self._agent = make_agent(llm, self._clock)
        self._embed_model = embed_model
        self._client = AsyncQdrantClient(":memory:")
        self._store = QdrantVectorStore("demo", aclient=self._client)
        self._memories: dict[str, Memory] = {}

    @staticmethod
    def installed() -> bool:
        """Whether its vector store can be imported."""
        return all(find_spec(name) for name in ("qdrant_client", "llama_index.vector_stores")) and (
            find_spec("llama_index.vector_stores.qdrant") is not None
        )

    def _memory(self, user: str) -> Memory:
        if user not in self._memories:
            self._memories[user] = Memory.from_defaults(
                session_id=user,
                token_limit=TOKEN_LIMIT,
                chat_history_token_ratio=WINDOW_RATIO,
                memory_blocks=[
                    CoreStaticMemoryBlock(name="Guidance", static_content=GUIDANCE, priority=0),
                    # A block of its own for each user: shared, it would keep the first one's filter.
                    CoreVectorMemoryBlock(vector_store=self._store, embed_model=self._embed_model, priority=1),
                ],
            )
        return self._memories[user]

    async def live(self, chat: Chat) -> None:
        """Live through the whole chat."""
        # Its store asks for payload indexes, which Qdrant's local mode does not have.
        warnings.filterwarnings("ignore", message="Payload indexes have no effect in the local Qdrant")
        await self._make_collection()
        for user in chat.users:
            memory = self._memory(user)

            async def put(line: ChatTurn, memory: Memory = memory) -> None:
                await memory.aput(as_message(line))

            for lines in chat.sessions(user):
                await replay(lines, self._agent, memory, self._clock, put)

    async def _make_collection(self) -> None:
        """The first node makes it; a chat so short that nothing is flushed would be asked without one."""
        node = TextNode(text="first", embedding=await self._embed_model.aget_text_embedding("first"))
        await self._store.async_add([node])
        await self._store.adelete_nodes([node.node_id])

    async def ask(self, question: RecallQuestion) -> Heard:
        """Answer a question in the user's session, which then is as it was before: no question helps the next."""
        memory = self._memory(question.user)
        for block in memory.memory_blocks:
            block.accept_short_term_memory = False
        window = await memory.aget_all(MessageStatus.ACTIVE)
        heard = await run_agent(self._agent, memory, question.text)
        await memory.aset(window)
        return heard

    async def aclose(self) -> None:
        """Close its vector store."""
        await self._client.close()


class Ours:
    """This package: any number of processes over one database, a new session for every question.

    Args:
        database: File.
        llm: The agent's model.
        embed_model: `None` is recall by words alone.
        learning: Whether the recall block takes in what is said; without it no question helps the next.
    """

    name = "TieredMemory"

    def __init__(
        self,
        database: Path,
        llm: FunctionCallingLLM,
        embed_model: BaseEmbedding | None,
        *,
        learning: bool = True,
    ) -> None:
        self._clock = Clock()
        self._storage = Storage(database, clock=self._clock)
        self._agent = make_agent(llm, self._clock)
        self._asked = 0
        recall = VectorMemoryBlock(
            name="Recall", embed_model=embed_model, priority=1, accept_short_term_memory=learning
        )
        self._memory = TieredMemory.from_defaults(
            storage=self._storage,
            session_id="first",
            token_limit=TOKEN_LIMIT,
            chat_history_token_ratio=WINDOW_RATIO,
            memory_blocks=[StaticMemoryBlock(name="Guidance", static_content=GUIDANCE, priority=0), recall],
        )

    def at(self, chat: Chat) -> Self:
        """Set the clock to the day after a chat."""
        self._clock.now = max(line.said_at for line in chat.messages) + timedelta(days=1)
        return self

    async def live(self, user: str, lines: Sequence[ChatTurn]) -> list[str]:
        """Live through one session.

        Args:
            user: Whose.
            lines: What was said.

        Returns:
            The tools that ran.
        """
        memory = self._memory.for_session(lines[0].session, user)

        async def put(line: ChatTurn) -> None:
            await memory.aput(as_message(line), created_at=line.said_at, sent_from=line.speaker, uid=line.id)

        return await replay(lines, self._agent, memory, self._clock, put)

    async def catch_up(self, chat: Chat) -> int:
        """Take up where other processes ended.

        Args:
            chat: What they lived through.

        Returns:
            How many messages the blocks had still to absorb.
        """
        waiting = 0
        for user in chat.users:
            report = await self._memory.for_session("catch-up", user).aflush()
            waiting += sum(block.absorbed for block in report.blocks)
        return waiting

    async def missing(self, chat: Chat) -> int:
        """Sessions whose log does not hold every message that was put, once and in order."""
        wrong = 0
        for user in chat.users:
            for lines in chat.sessions(user):
                put = [line.id for line in put_lines(lines)]
                stored = await self._memory.for_session(lines[0].session, user).amessages()
                wrong += [message.id for message in stored if message.id in set(put)] != put
        return wrong

    def new_session(self, user: str) -> TieredMemory:
        """A session that has heard nothing yet."""
        self._asked += 1
        return self._memory.for_session(f"question {self._asked}", user)

    async def ask(self, question: RecallQuestion) -> Heard:
        """Answer a question in a new session of its user."""
        return await run_agent(self._agent, self.new_session(question.user), question.text)

    async def explain(self, question: RecallQuestion) -> ContextReport:
        """Where the context for a question comes from."""
        return await self.new_session(question.user).aexplain(question.text)

    async def aclose(self) -> None:
        """Stop background work and close the database."""
        await self._memory.aclose()
        await self._storage.aclose()


class _Flushes(BaseEventHandler):
    """Counts what leaves windows."""

    _counts: list[int] = PrivateAttr(default_factory=list)

    @property
    def counts(self) -> list[int]:
        """Messages that left, one number per flush."""
        return self._counts

    def handle(self, event: BaseEvent, **_: Any) -> None:
        """Count."""
        if isinstance(event, WindowFlushed):
            self._counts.append(event.archived)


@dataclass(frozen=True, slots=True)
class Lived:
    """What one process lived through.

    Args:
        sessions: How many.
        messages: How many were put or said by the agent in their place.
        flushes: How often old turns left a window.
        left: How many messages that were.
        tools: Names of the tools that ran.
    """

    sessions: int
    messages: int
    flushes: int
    left: int
    tools: tuple[str, ...]


async def live_part(chat: Chat, database: Path, llm: FunctionCallingLLM, *, part: int, parts: int) -> Lived:
    """Live through a share of everybody's sessions, and stop without a last flush.

    Args:
        chat: The whole chat.
        database: Shared by all parts.
        llm: The agent's model.
        part: Which share, from 0.
        parts: How many there are.

    Returns:
        What happened.
    """
    flushes = _Flushes()
    dispatcher.add_event_handler(flushes)
    agent = Ours(database, llm, make_embedding())
    tools: list[str] = []
    sessions = messages = 0
    for user in chat.users:
        mine = chat.sessions(user)
        for lines in mine[len(mine) * part // parts : len(mine) * (part + 1) // parts]:
            tools += await agent.live(user, lines)
            sessions += 1
            messages += len(lines)
    await agent.aclose()
    return Lived(sessions, messages, len(flushes.counts), sum(flushes.counts), tuple(tools))


# --- scoring ----------------------------------------------------------------------------------------------------

_END = "。.！! "


def plain(text: str) -> str:
    """A text as it is compared: without differences in blanks and case."""
    return as_shown(text).casefold()


def shown(context: Sequence[ChatMessage]) -> str:
    """What a context says, to be compared."""
    return context_text(context).casefold()


def evidence_share(context: Sequence[ChatMessage], evidence: Sequence[str]) -> float:
    """Share, 0 to 1, of the evidence messages whose whole text stands in a context; 0 without evidence."""
    text = context_text(context)
    return sum(holds(text, each) for each in evidence) / len(evidence) if evidence else 0.0


def answered(reply: str, answer: str, evidence: Sequence[str]) -> bool:
    """Whether a reply holds the expected answer, as words, or the text of an evidence message."""
    said = plain(reply)
    if any(_holds(said, each) for each in evidence):
        return True
    wanted = plain(answer).rstrip(_END)
    return bool(wanted) and re.search(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])", said) is not None


def _holds(text: str, said: str) -> bool:
    wanted = plain(said).rstrip(_END)
    return bool(wanted) and wanted in text


@dataclass(frozen=True, slots=True)
class Score:
    """How a contender did in one language.

    Args:
        asked: Questions.
        evidence: Mean share of evidence in the context, 0 to 1.
        right: Share of replies that are right, 0 to 1.
        over: Contexts over the token limit.
    """

    asked: int
    evidence: float
    right: float
    over: int


def score(chat: Chat, heard: Sequence[tuple[RecallQuestion, Heard]]) -> Score:
    """Score one contender.

    Args:
        chat: Holds the evidence.
        heard: Questions and what came of them.

    Returns:
        The score.
    """
    counter = TokenCounter(get_tokenizer())
    shares, right, over = 0.0, 0, 0
    for question, run in heard:
        evidence = chat.texts(question.evidence)
        shares += evidence_share(run.context, evidence)
        right += answered(run.reply, question.answer, evidence)
        over += sum(counter.message(message) for message in run.context) > TOKEN_LIMIT
    count = len(heard)
    return Score(count, shares / count, right / count, over) if count else Score(0, 0.0, 0.0, 0)
