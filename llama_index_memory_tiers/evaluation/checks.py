"""What an evaluation refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.memory.types import BaseMemory

from llama_index_memory_tiers.chats import ROLES, ChatTurn, RecallQuestion
from llama_index_memory_tiers.checks import repeated
from llama_index_memory_tiers.errors import ConfigurationError

MakeMemory = Callable[[str, int], BaseMemory]
"""User and token limit → a memory that has heard nothing yet."""


def check_arguments(make_memory: MakeMemory | None, embed_model: BaseEmbedding | None, budgets: Any) -> None:
    """Refuse a model beside a factory, and budgets that are none."""
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


def check_messages(turns: Sequence[ChatTurn]) -> None:
    """Refuse what is no message, and ids that are not unique."""
    for at, turn in enumerate(turns):
        if not isinstance(turn, ChatTurn) or turn.role not in ROLES:
            raise ConfigurationError(
                f"messages[{at}] is {turn!r:.200}.",
                allowed=f"Messages are ChatTurns whose role is one of {', '.join(ROLES)}.",
                remedy="Correct it, or read the chat by read_chat_file.",
            )
    twice = repeated(turn.id for turn in turns)
    if twice:
        raise ConfigurationError(
            f"messages has several with id={twice[0]!r}.",
            allowed="Evidence names messages by their id, which is unique.",
            remedy="Give each an id of its own.",
        )


def check_questions(turns: Sequence[ChatTurn], questions: Sequence[RecallQuestion]) -> None:
    """Refuse questions whose evidence is not there."""
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
