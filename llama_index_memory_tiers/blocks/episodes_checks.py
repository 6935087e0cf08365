"""What may be said about an episode: refused before anything is stored."""

from __future__ import annotations

import math
from typing import Any

from llama_index_memory_tiers.blocks.episodes import FINAL, KINDS, Episode, Outcome
from llama_index_memory_tiers.errors import ConfigurationError


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


def check_outcome(outcome: Any) -> Outcome:
    """An outcome, of any sort."""
    if outcome not in KINDS:
        raise ConfigurationError(
            f"outcome={outcome!r:.100} was given.",
            allowed=f"Outcomes are {', '.join(KINDS)}.",
            remedy="Pass some of them, or none for all.",
        )
    known: Outcome = outcome
    return known


def check_cost(cost: Any) -> None:
    """Refuse what is no cost."""
    number = isinstance(cost, int | float) and not isinstance(cost, bool) and math.isfinite(cost)
    if cost is not None and not (number and cost >= 0):
        raise ConfigurationError(
            f"cost={cost!r:.100} was given.",
            allowed="It is a number from 0, in a unit of your choice.",
            remedy="Pass such a number, or leave it out.",
        )


def check_k(k: Any) -> None:
    """Refuse what is no number of episodes."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigurationError(
            f"k={k!r:.100} was given.",
            allowed="k is a whole number from 1.",
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
