"""What may be said about an episode, and how it may be stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from llama_index_memory_tiers.blocks.episodic.episodes import (
    FINAL,
    MAX_TEXT_CHARS,
    Episode,
    EpisodeStep,
    ToolUse,
    cut,
)
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.storage import codec


def check_text(name: str, value: Any) -> str:
    """A text that says something, without blanks around it."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(
            f"{name}={value!r:.100} was given.",
            allowed=f"{name} is a text with at least one visible character.",
            remedy="Say in a few words what is to be done.",
        )
    return value.strip()


def check_final(outcome: Any) -> None:
    """Refuse what is no end."""
    if outcome not in FINAL:
        raise ConfigurationError(
            f"outcome={outcome!r:.100} was given.",
            allowed=f"An episode ends as {', '.join(FINAL)}.",
            remedy="Pass one of them.",
        )


def check_cost(cost: Any) -> None:
    """Refuse what is no cost."""
    number = isinstance(cost, int | float) and not isinstance(cost, bool) and math.isfinite(cost)
    if cost is not None and not (number and cost >= 0):
        raise ConfigurationError(
            f"cost={cost!r:.100} was given.",
            allowed="It is a number from 0, in a unit of your choice.",
            remedy="Pass such a number, or leave it out.",
        )


def check_open(episode: Episode) -> None:
    """Refuse an episode that has ended."""
    # One that was closed as interrupted may be alive after all: its process was only silent for long.
    if episode.outcome not in {"running", "interrupted"}:
        raise ConfigurationError(
            f"episode_id={episode.id!r} was given, and that episode has ended as {episode.outcome}.",
            allowed="Steps and an end are written to an episode that runs.",
            remedy="Start a new one, or correct this one with amend(…).",
        )


class Cleaner:
    """Makes what is said about episodes fit to be stored: without secrets, and not too long.

    Args:
        redacted: Takes secrets out of a text.
    """

    def __init__(self, redacted: Callable[[str], str]) -> None:
        self._redacted = redacted

    def text(self, text: str) -> str:
        """One text."""
        # First cut wide, so that no secret is cut in two before it is seen in what stays.
        return cut(codec.storable(self._redacted(text[: 2 * MAX_TEXT_CHARS])))

    def texts(self, name: str, texts: Iterable[str]) -> tuple[str, ...]:
        """Several, none twice and none blank; `ConfigurationError` when they are no list of texts."""
        several = isinstance(texts, Iterable) and not isinstance(texts, str | Mapping)
        given = tuple(texts) if several else ()
        if not several or not all(isinstance(text, str) for text in given):
            raise ConfigurationError(
                f"{name}={texts!r:.100} was given.",
                allowed=f"{name} is a list of texts.",
                remedy=f"Write {name}=['…'].",
            )
        return tuple(dict.fromkeys(self.text(text.strip()) for text in given if text.strip()))

    def step(self, step: EpisodeStep, now: datetime) -> EpisodeStep:
        """A step, with its time."""
        calls = tuple(
            ToolUse(self.text(call.name), self.text(call.arguments), self.text(call.result), call.failed)
            for call in step.tool_calls
        )
        return EpisodeStep(
            self.text(step.action),
            self.text(step.reasoning),
            calls,
            self.text(step.observation),
            self.text(step.evaluation),
            step.failed or any(call.failed for call in calls),
            self.text(step.agent),
            now,
        )
