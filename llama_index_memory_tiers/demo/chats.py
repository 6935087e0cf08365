"""The chats that the demo lives through, and what it asks about them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from llama_index_memory_tiers.chats import Chat, ChatTurn, RecallQuestion, read_chat_file

_HAN = re.compile("[\u3400-\u9fff]")


def language_of(question: RecallQuestion) -> str:
    """`zh` when it has Chinese characters, else `en`."""
    return "zh" if _HAN.search(question.text) else "en"


def spread(questions: Sequence[RecallQuestion], most: int) -> list[RecallQuestion]:
    """A fixed choice, evenly spread over the questions of each language.

    Args:
        questions: All.
        most: At most so many of each language.

    Returns:
        The choice, in order.
    """
    chosen: list[RecallQuestion] = []
    for language in dict.fromkeys(language_of(question) for question in questions):
        mine = [question for question in questions if language_of(question) == language]
        count = min(most, len(mine))
        chosen += [mine[at * len(mine) // count] for at in range(count)]
    return chosen


def read_chat(path: Path) -> Chat:
    """Read somebody's own chat.

    Args:
        path: See `read_chat_file`.

    Returns:
        The chat. Without questions of its own, those that its users asked in it are asked again, and the reply
        that each got is the evidence.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    chat = read_chat_file(path)
    return chat if chat.questions else replace(chat, questions=_asked_before(chat.messages))


def _asked_before(messages: Sequence[ChatTurn], most: int = 40) -> tuple[RecallQuestion, ...]:
    found: dict[tuple[str, str], RecallQuestion] = {}
    for said, reply in pairwise(messages):
        asks = said.role == "user" and said.text.rstrip().endswith(("?", "？"))
        if asks and reply.role == "assistant" and reply.session == said.session:
            found[said.user, said.text] = RecallQuestion(said.text, (reply.id,), user=said.user)
    return tuple(found.values())[:most]
