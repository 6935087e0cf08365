"""Measure on your own chats how much of the evidence for a question stands in a memory's context."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from statistics import fmean
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory.types import BaseMemory
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers.blocks import VectorMemoryBlock
from llama_index_memory_tiers.budget import TokenCounter, Tokenizer
from llama_index_memory_tiers.chats import ROLES, ChatTurn, RecallQuestion
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.display import Grid, Shown
from llama_index_memory_tiers.errors import ConfigurationError, MemoryTiersError
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.text import escape

MakeMemory = Callable[[str, int], BaseMemory]
"""User and token limit → a memory that has heard nothing yet."""

# So much for the window, all else for recall: measured on public chats, 10 % costs .01 of the recall, 70 % .15.
_WINDOW_RATIO = 0.1
_COLUMNS = ("budget", "group", "name", "questions", "any", "all", "mean", "tokens", "over")


# --- what counts as recalled ------------------------------------------------------------------------------------


def as_shown(text: str) -> str:
    """A text as it is compared: without what no context keeps, each run of white space one blank.

    Args:
        text: What somebody said.

    Returns:
        The text; that of its escaped form is the same.
    """
    return " ".join(html.unescape(escape(text)).split())


def context_text(context: Sequence[ChatMessage]) -> str:
    """What a context says, to be compared: as it is, and without the escapes of recalled text.

    Args:
        context: Messages that a memory returned.

    Returns:
        Both, each as `as_shown` has it.
    """
    text = "\n".join(message.content or "" for message in context)
    return f"{as_shown(text)}\n{as_shown(html.unescape(text))}"


def holds(text: str, said: str) -> bool:
    """Whether a context holds a message: all of its text, not as a piece of longer words.

    Args:
        text: From `context_text`.
        said: The message's text; a blank one is never held.
    """
    pattern = _pattern(said)
    return pattern is not None and pattern.search(text) is not None


@lru_cache(maxsize=4096)
def _pattern(said: str) -> re.Pattern[str] | None:
    wanted = as_shown(said)
    if not wanted:
        return None
    before = r"(?<!\w)" if re.match(r"\w", wanted) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", wanted) else ""
    return re.compile(f"{before}{re.escape(wanted)}{after}")


def _within(context: Sequence[ChatMessage], budget: int, counter: TokenCounter) -> list[ChatMessage]:
    """A context cut at the budget, by the line, so that being too long is not taken for remembering."""
    kept: list[ChatMessage] = []
    free = budget
    for message in context:
        lines: list[str] = []
        for line in (message.content or "").split("\n"):
            free -= counter.text(f"{line}\n")
            if free < 0:
                return [*kept, ChatMessage(role=message.role, content="\n".join(lines))]
            lines.append(line)
        kept.append(message)
    return kept


# --- the report -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecallOutcome:
    """What came of one question at one budget.

    Args:
        question: What was asked.
        budget: Token limit of the memory.
        tokens: Tokens of the context.
        found: Ids of the evidence that it holds.
        missed: Ids of the evidence that it does not hold.
    """

    question: RecallQuestion
    budget: int
    tokens: int
    found: tuple[str, ...]
    missed: tuple[str, ...]

    @property
    def share(self) -> float:
        """Of the evidence, 0 to 1, what the context holds."""
        return len(self.found) / (len(self.found) + len(self.missed))


@dataclass(frozen=True, slots=True)
class RecallReport(Shown):
    """How much of the evidence stood in the contexts; printed, it is a table.

    Args:
        outcomes: One per budget and question.
    """

    outcomes: tuple[RecallOutcome, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Per budget, one row for all questions, then one for each category and each language.

        Keys: `budget`; `group` (`all`, `category` or `language`) with its `name`; `questions`, how many; `any`, `all`
        and `mean`: share of the questions of which one, or all messages of the evidence were recalled, and the mean
        share of evidence recalled, 0 to 1; `tokens`, mean size of a context; `over`, share of contexts over budget.
        """
        rows = []
        for budget in dict.fromkeys(outcome.budget for outcome in self.outcomes):
            mine = [outcome for outcome in self.outcomes if outcome.budget == budget]
            rows.append(_row(budget, "all", "", mine))
            for group in ("category", "language"):
                for name in sorted({getattr(outcome.question, group) for outcome in mine} - {""}):
                    members = [outcome for outcome in mine if getattr(outcome.question, group) == name]
                    rows.append(_row(budget, group, name, members))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data: `rows`, and `outcomes` with each question."""
        return {"rows": self.rows, "outcomes": [asdict(outcome) for outcome in self.outcomes]}

    def _grids(self) -> Sequence[Grid]:
        return [Grid(_COLUMNS, self._cells())]

    def _cells(self) -> list[list[str]]:
        return [[_cell(row[column]) for column in _COLUMNS] for row in self.rows]


def _row(budget: int, group: str, name: str, outcomes: Sequence[RecallOutcome]) -> dict[str, Any]:
    return {
        "budget": budget,
        "group": group,
        "name": name,
        "questions": len(outcomes),
        "any": fmean(bool(outcome.found) for outcome in outcomes),
        "all": fmean(not outcome.missed for outcome in outcomes),
        "mean": fmean(outcome.share for outcome in outcomes),
        "tokens": fmean(outcome.tokens for outcome in outcomes),
        "over": fmean(outcome.tokens > budget for outcome in outcomes),
    }


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value <= 1 else f"{value:.0f}"
    return str(value)


# --- the run ----------------------------------------------------------------------------------------------------


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
    _check_arguments(make_memory, embed_model, budgets)
    _check_messages(turns)
    _check_questions(turns, asked)
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
        text = context_text(context if tokens <= budget else _within(context, budget, self._counter))
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


# --- checks -----------------------------------------------------------------------------------------------------


def _check_arguments(make_memory: MakeMemory | None, embed_model: BaseEmbedding | None, budgets: Any) -> None:
    if make_memory is not None and embed_model is not None:
        raise ConfigurationError(
            "make_memory and embed_model were given together.",
            allowed="embed_model is for the default memory.",
            remedy="Give the model to the blocks that make_memory makes, or leave make_memory out.",
        )
    several = isinstance(budgets, Iterable) and not isinstance(budgets, str)
    numbers = list(budgets) if several else []
    if not numbers or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in numbers):
        raise ConfigurationError(
            f"budgets={budgets!r:.100} was given.",
            allowed="Budgets are whole numbers of tokens from 1.",
            remedy="Pass such numbers, as in budgets=(1000, 4000).",
        )


def _check_messages(turns: Sequence[ChatTurn]) -> None:
    for at, turn in enumerate(turns):
        if not isinstance(turn, ChatTurn) or turn.role not in ROLES:
            raise ConfigurationError(
                f"messages[{at}] is {turn!r:.200}.",
                allowed=f"Messages are ChatTurns whose role is one of {', '.join(ROLES)}.",
                remedy="Correct it, or read the chat by read_chat_file.",
            )
    twice = sorted(name for name, times in Counter(turn.id for turn in turns).items() if times > 1)
    if twice:
        raise ConfigurationError(
            f"messages has several with id={twice[0]!r}.",
            allowed="Evidence names messages by their id, which is unique.",
            remedy="Give each an id of its own.",
        )


def _check_questions(turns: Sequence[ChatTurn], questions: Sequence[RecallQuestion]) -> None:
    if not questions:
        raise ConfigurationError(
            "questions is empty.",
            allowed="Recall is measured by questions whose evidence is known.",
            remedy="Pass RecallQuestion(text='…', evidence=('message id',)).",
        )
    owners = {turn.id: turn.user for turn in turns}
    for at, question in enumerate(questions):
        if not isinstance(question, RecallQuestion):
            raise ConfigurationError(
                f"questions[{at}] is {question!r:.200}.",
                allowed="Questions are RecallQuestions.",
                remedy="Write RecallQuestion(text='…', evidence=('message id',)).",
            )
        wrong = [name for name in question.evidence if owners.get(name) != question.user]
        if wrong or not question.evidence or not question.text.strip():
            raise ConfigurationError(
                f"questions[{at}] has text={question.text!r:.60}, evidence={question.evidence!r:.100} and "
                f"user={question.user!r:.60}.",
                allowed="A question has a text, and one or more ids of messages of its user as evidence"
                + (f"; {wrong[0]!r:.60} is none." if wrong else "."),
                remedy="Name the messages that hold the answer, or leave the question out.",
            )
