"""What counts as recalled."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import lru_cache

from llama_index.core.base.llms.types import ChatMessage

from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.text import escape


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


def within(context: Sequence[ChatMessage], budget: int, counter: TokenCounter) -> list[ChatMessage]:
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
