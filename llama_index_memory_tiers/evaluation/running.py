"""Memories live through chats, and are asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory.types import BaseMemory
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers.blocks import VectorMemoryBlock
from llama_index_memory_tiers.budget import TokenCounter, Tokenizer
from llama_index_memory_tiers.chats import ChatTurn, RecallQuestion
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.errors import MemoryTiersError
from llama_index_memory_tiers.evaluation.checks import MakeMemory, check_arguments, check_messages, check_questions
from llama_index_memory_tiers.evaluation.holding import context_text, holds, within
from llama_index_memory_tiers.evaluation.report import RecallOutcome, RecallReport
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage import Storage

# So much for the window, all else for recall: measured on public chats, 10 % costs .01 of the recall, 70 % .15.
_WINDOW_RATIO = 0.1


@checked
async def evaluate_recall(
    messages: Iterable[ChatTurn],
    questions: Iterable[RecallQuestion],
    *,
    make_memory: MakeMemory | None = None,
    budgets: Sequence[int] = (1000, 2000, 4000, 8000),
    embed_model: BaseEmbedding | None = None,
    tokenizer_fn: Tokenizer | None = None,
) -> RecallReport:
    """Measure evidence recall at budget: of the messages that hold an answer, how many stand in the context.

    A memory lives through each user's messages, session by session as they were said, absorbs them, and is asked
    each question in the user's last session a day later; no question is put, so none helps the next. A message of the
    evidence counts as recalled when its whole text stands in what `aget` returned, up to white space, escapes and
    control characters, and not as a piece of longer words; wherever it stands, so evidence as short as "Yes." tells
    nothing. A context over budget is cut at the budget, by the line, before it is searched. No LLM judges.

    The same input gives the same report, as far as the embedding model does.

    Args:
        messages: The chats of one or more users; `read_chat_file` reads them.
        questions: Each with evidence.
        make_memory: Makes a memory from a user and a token limit, called once for each pair with a user id that no
            other pair has; it may be any LlamaIndex memory, and one with `aclose` is closed. Default: `TieredMemory`
            with a tenth for the window and `VectorMemoryBlock(embed_model=embed_model)`, in a private storage; it
            lives through the chat once, at the largest budget, and is asked at each.
        budgets: Token limits.
        embed_model: For the default memory; `None` is BM25 alone.
        tokenizer_fn: Counts the tokens of a context; default LlamaIndex's.

    Returns:
        The report.

    Raises:
        ConfigurationError: Names the message, question or argument that is wrong.
        MemoryTiersError: A block could not absorb the messages, so that the numbers would mean nothing.
    """
    turns, asked = tuple(messages), tuple(questions)
    check_arguments(make_memory, embed_model, budgets)
    check_messages(turns)
    check_questions(turns, asked)
    clock = _Clock()
    storage = Storage(clock=clock)
    run = _Run(turns, asked, TokenCounter(tokenizer_fn or get_tokenizer()))
    outcomes: dict[tuple[int, int], RecallOutcome] = {}
    try:
        for user in dict.fromkeys(question.user for question in asked):
            clock.now = run.asked_at(user)
            # The default memory has heard all at the largest budget; each budget anew would take that much longer. All
            # 249 outcomes of the sample's Maya at 500, 1 000 and 4 000 tokens were the same both ways, tokens included.
            for number, budget in enumerate(sorted(set(budgets), reverse=True)):
                if make_memory is None:
                    memory: BaseMemory = _default_memory(storage, user, budget, embed_model, tokenizer_fn)
                else:
                    memory = make_memory(f"{user}@{budget}", budget)
                try:
                    if make_memory is not None or number == 0:
                        await run.live(user, memory)
                    outcomes |= await run.ask(user, memory, budget)
                finally:
                    await _close(memory)
    finally:
        await storage.aclose()
    return RecallReport(tuple(outcomes[key] for key in sorted(outcomes)))


@dataclass(slots=True)
class _Clock:
    """The time of the chat."""

    now: datetime = datetime(2025, 1, 1, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        return self.now


def _default_memory(
    storage: Storage, user: str, budget: int, embed_model: BaseEmbedding | None, tokenizer_fn: Tokenizer | None
) -> TieredMemory:
    return TieredMemory(
        storage=storage,
        user_id=user,
        session_id="questions",
        token_limit=budget,
        chat_history_token_ratio=_WINDOW_RATIO,
        tokenizer_fn=tokenizer_fn,
        memory_blocks=[VectorMemoryBlock(embed_model=embed_model)],
    )


async def _close(memory: BaseMemory) -> None:
    close = getattr(memory, "aclose", None)
    if close is not None:
        await close()


class _Run:
    """Lets memories live through chats, and asks them.

    Args:
        turns: All messages.
        questions: All questions.
        counter: Measures contexts.
    """

    def __init__(self, turns: Sequence[ChatTurn], questions: Sequence[RecallQuestion], counter: TokenCounter) -> None:
        self._turns = turns
        self._questions = questions
        self._counter = counter
        self._texts = {turn.id: turn.text for turn in turns}

    def asked_at(self, user: str) -> datetime:
        """A day after the user's last message."""
        return max(_aware(turn.said_at) for turn in self._of(user)) + timedelta(days=1)

    async def live(self, user: str, memory: BaseMemory) -> None:
        """Put a user's messages, each into its session, and let all be absorbed."""
        sessions: dict[str, BaseMemory] = {}
        for turn in self._of(user):
            if turn.session not in sessions:
                sessions[turn.session] = _in_session(memory, turn.session)
            session, message = sessions[turn.session], ChatMessage(role=MessageRole(turn.role), content=turn.text)
            if isinstance(session, TieredMemory):
                await session.aput(message, created_at=turn.said_at, sent_from=turn.speaker, uid=turn.id)
            else:
                await session.aput(message)
        for session in sessions.values():
            if isinstance(session, TieredMemory):
                _check_absorbed(await session.aflush())

    async def ask(self, user: str, memory: BaseMemory, budget: int) -> dict[tuple[int, int], RecallOutcome]:
        """Ask a user's questions in the user's last session; keys are the budget and the number of the question."""
        session = _in_session(memory, [turn.session for turn in self._of(user)][-1])
        outcomes = {}
        for number, question in enumerate(self._questions):
            if question.user == user:
                context = await session.aget(question.text)
                outcomes[budget, number] = self._outcome(question, budget, context)
        return outcomes

    def _of(self, user: str) -> Iterator[ChatTurn]:
        return (turn for turn in self._turns if turn.user == user)

    def _outcome(self, question: RecallQuestion, budget: int, context: Sequence[ChatMessage]) -> RecallOutcome:
        tokens = sum(self._counter.message(message) for message in context)
        text = context_text(context if tokens <= budget else within(context, budget, self._counter))
        evidence = tuple(dict.fromkeys(question.evidence))
        found = tuple(name for name in evidence if holds(text, self._texts[name]))
        missed = tuple(name for name in evidence if name not in found)
        return RecallOutcome(question, budget, tokens, found, missed)


def _in_session(memory: BaseMemory, session: str) -> BaseMemory:
    """The memory of a session, when sessions of one user share what they know."""
    if isinstance(memory, TieredMemory) and memory.user_id is not None:
        return memory.for_session(session)
    return memory


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


def _check_absorbed(report: Any) -> None:
    for block in report.blocks:
        if block.pending or block.parked:
            raise MemoryTiersError(
                f"The block {block.block!r} could not absorb the chat: {block.error or 'bad content'}.",
                allowed="Recall is measured when everything was absorbed.",
                remedy="Check the block's models, then start again.",
            )
