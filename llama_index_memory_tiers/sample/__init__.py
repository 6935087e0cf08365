"""A chat of our own, in English and Chinese, with questions and the messages that answer them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from llama_index_memory_tiers.chats import Chat, ChatTurn, RecallQuestion
from llama_index_memory_tiers.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SampleMessage", "SampleQuestion", "load_chat", "load_questions", "sample_chat"]

Role = Literal["user", "assistant"]
Language = Literal["en", "zh"]
Category = Literal["single-hop", "multi-hop", "temporal", "update", "assistant"]


@dataclass(frozen=True, slots=True)
class SampleMessage:
    """One message of the sample chat.

    Args:
        id: Unique and stable: session and position, as in `maya-03-017`.
        user: Whose memory it belongs to.
        session: The conversation it was said in.
        role: `user` or `assistant`.
        speaker: Name of who said it.
        said_at: When it was said, aware, in the user's own zone.
        text: What was said.
    """

    id: str
    user: str
    session: str
    role: Role
    speaker: str
    said_at: datetime
    text: str


@dataclass(frozen=True, slots=True)
class SampleQuestion:
    """One question about a user's chat.

    Args:
        id: Unique and stable, as in `maya-q007`.
        user: Whose chat it asks about.
        language: `en` or `zh`, the language of the question and of its evidence.
        category: `single-hop`, `multi-hop`, `temporal`, `update`, or `assistant` (what the assistant said).
        question: What is asked, mostly in other words than the evidence.
        answer: A short phrase.
        evidence: Ids of the one to four messages that together hold the answer.
    """

    id: str
    user: str
    language: Language
    category: Category
    question: str
    answer: str
    evidence: tuple[str, ...]


def load_chat(user: str | None = None) -> tuple[SampleMessage, ...]:
    """Load the sample chat.

    Args:
        user: Whose messages; `None` means everybody's, one user after the other.

    Returns:
        Messages, in the order in which each user's were said.

    Raises:
        ConfigurationError: The sample has no such user.
    """
    messages = tuple(
        SampleMessage(**{**row, "said_at": datetime.fromisoformat(row["said_at"])}) for row in _rows("chat.jsonl")
    )
    if user is None:
        return messages
    _require_known(user, messages)
    return tuple(message for message in messages if message.user == user)


def load_questions(user: str | None = None) -> tuple[SampleQuestion, ...]:
    """Load the questions about the sample chat.

    Args:
        user: About whose chat; `None` means everybody's.

    Returns:
        Questions, grouped by user and category.

    Raises:
        ConfigurationError: The sample has no such user.
    """
    questions = tuple(SampleQuestion(**{**row, "evidence": tuple(row["evidence"])}) for row in _rows("questions.jsonl"))
    if user is None:
        return questions
    _require_known(user, questions)
    return tuple(question for question in questions if question.user == user)


def sample_chat(user: str | None = None) -> Chat:
    """The sample chat as `evaluate_recall` takes it.

    Args:
        user: Whose; `None` means everybody's.

    Returns:
        Messages and questions.

    Raises:
        ConfigurationError: The sample has no such user.
    """
    messages = tuple(
        ChatTurn(said.id, said.text, said.role, said.speaker, said.said_at, said.session, said.user)
        for said in load_chat(user)
    )
    questions = tuple(
        RecallQuestion(asked.question, asked.evidence, asked.category, asked.user, asked.language, asked.answer)
        for asked in load_questions(user)
    )
    return Chat("the sample chat", messages, questions)


def _rows(name: str) -> Iterator[dict[str, Any]]:
    text = files(__name__).joinpath(name).read_text(encoding="utf-8")
    # not splitlines(): it would also split at U+2028 and its like, which JSON allows inside a string
    return (json.loads(line) for line in text.split("\n") if line)


def _require_known(user: str, items: tuple[SampleMessage, ...] | tuple[SampleQuestion, ...]) -> None:
    known = sorted({item.user for item in items})
    if user not in known:
        raise ConfigurationError(
            f"user={user!r} was given.",
            allowed=f"The sample chat has the users {', '.join(map(repr, known))}.",
            remedy="Pass one of them, or leave user out to load all.",
        )
