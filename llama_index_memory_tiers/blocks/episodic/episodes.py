"""Episodes: what was tried for a task, step by step, how it ended, and what is learnt from it."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Literal

from llama_index_memory_tiers.records import NewRecord, Record
from llama_index_memory_tiers.text import analyse

Outcome = Literal["running", "success", "partial", "failure", "interrupted"]

KINDS: Mapping[Outcome, str] = MappingProxyType(
    {
        "running": "episode.running",
        "success": "episode",
        "partial": "episode",
        "failure": "episode.failure",
        "interrupted": "episode.interrupted",
    }
)
"""Kind of an episode's record, by its outcome: an index filters by kind before it takes the best."""

FINAL: tuple[Outcome, ...] = ("success", "partial", "failure")
"""How an episode may be said to have ended."""

MAX_TEXT_CHARS = 4000
"""A longer text is cut: an observation may be a whole page."""

MAX_STEPS = 500
"""Of a longer episode the first half and the newest steps are kept."""

_SIGN_CHARS = 14


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool that a step called.

    Args:
        name: Name of the tool.
        arguments: Its arguments as JSON text, without secrets.
        result: What it returned, as text.
        failed: Whether it returned an error.
    """

    name: str
    arguments: str = ""
    result: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """One step of an episode.

    Args:
        action: What was done.
        reasoning: Why.
        tool_calls: The tools that were called.
        observation: What came of it.
        evaluation: What that is worth.
        failed: Whether it went wrong; also true when a tool failed.
        agent: Who did it, when several agents work together.
        at: When, aware.
    """

    action: str
    reasoning: str = ""
    tool_calls: tuple[ToolUse, ...] = ()
    observation: str = ""
    evaluation: str = ""
    failed: bool = False
    agent: str = ""
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task.

    Args:
        id: Public id.
        task: What was to be done.
        outcome: `running`; `success`, `partial` or `failure`; or `interrupted`, when nobody ended it.
        started_at: When it began, aware.
        steps: What was done, in order.
        lessons: What to do, or not to do, the next time.
        tags: Words to find it by.
        ended_at: When it ended; of an interrupted one the last sign of life; `None` while it runs.
        cost: What it cost, in a unit of your choice.
        error: What ended it, when that was an error.
        touched_at: Last sign of life.
    """

    id: str
    task: str
    outcome: Outcome
    started_at: datetime
    steps: tuple[EpisodeStep, ...] = ()
    lessons: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    ended_at: datetime | None = None
    cost: float | None = None
    error: str | None = None
    touched_at: datetime | None = None

    @property
    def duration(self) -> timedelta | None:
        """How long it took, days included; `None` while it runs."""
        return None if self.ended_at is None else self.ended_at - self.started_at


# --- decisions ------------------------------------------------------------------------------------------------


def with_step(episode: Episode, step: EpisodeStep, now: datetime) -> Episode:
    """The episode with one more step; of too many the first half and the newest stay."""
    steps = (*episode.steps, step)
    if len(steps) > MAX_STEPS:
        steps = (*steps[: MAX_STEPS // 2], *steps[len(steps) - MAX_STEPS // 2 :])
    return replace(episode, steps=steps, touched_at=now)


def closed(episode: Episode, now: datetime, limit: timedelta) -> Episode | None:
    """A running episode as interrupted when it gave no sign of life for longer than the limit, else `None`.

    Args:
        episode: Any.
        now: The clock.
        limit: Silence after which its process is taken for dead.

    Returns:
        The interrupted episode, ended at its last sign of life.
    """
    last = episode.touched_at or episode.started_at
    if episode.outcome != "running" or now - last <= limit:
        return None
    return replace(episode, outcome="interrupted", ended_at=last)


def judged(steps: Iterable[EpisodeStep]) -> Outcome:
    """How a run that came to an answer ended, by its tools.

    Args:
        steps: What it did.

    Returns:
        `success` when each tool that failed succeeded later or none failed; `failure` when all calls failed; else
        `partial`.
    """
    last: dict[str, bool] = {}
    calls = [call for step in steps for call in step.tool_calls]
    for call in calls:
        last[call.name] = call.failed
    if calls and all(call.failed for call in calls):
        return "failure"
    return "partial" if any(last.values()) else "success"


# --- what an episode is found by ------------------------------------------------------------------------------


def plain(task: str) -> str:
    """A task without what makes no difference: case, width, spaces, marks at its end."""
    return " ".join(unicodedata.normalize("NFKC", task).casefold().split()).rstrip(" .!。！")


def sign(task: str) -> str:
    """A word that stands for exactly this task: equal tasks, and no others, are found by it.

    Args:
        task: Any text.

    Returns:
        Letters only, so that text analysis keeps it whole.
    """
    digest = hashlib.sha256(plain(task).encode("utf-8", "surrogatepass")).digest()
    return "zq" + "".join(chr(97 + byte % 26) for byte in digest[:_SIGN_CHARS])


def search_terms(episode: Episode) -> dict[str, int]:
    """Terms of BM25: the task counts twice, lessons and tags once."""
    found: Counter[str] = Counter()
    for text in (episode.task, episode.task, *episode.tags, *episode.lessons, sign(episode.task)):
        found.update(analyse(text))
    return dict(found)


# --- as a record ----------------------------------------------------------------------------------------------


def to_record(
    episode: Episode, *, tokens: int = 0, vector: tuple[float, ...] | None = None, model: str = ""
) -> NewRecord:
    """Write an episode.

    Args:
        episode: Any; only one that ended is found by search.
        tokens: Its size when shown.
        vector: Embedding of its task, shape (dimensions,).
        model: Name of the embedding model.

    Returns:
        Its record.
    """
    found = episode.outcome in FINAL
    return NewRecord(
        id=episode.id,
        kind=KINDS[episode.outcome],
        text="\n".join((episode.task, *episode.lessons)),
        data={name: _written(value) for name, value in asdict(episode).items() if name != "id"},
        said_at=episode.started_at,
        terms=search_terms(episode) if found else {},
        tokens=tokens,
        vector=vector if found else None,
        model=model,
    )


def from_record(record: Record) -> Episode:
    """Read an episode.

    Args:
        record: As `to_record` wrote it.

    Returns:
        The episode.

    Raises:
        ValueError: It is damaged; so do KeyError and TypeError say.
    """
    data = dict(record.data)
    data["steps"] = tuple(_step(step) for step in data["steps"])
    data |= {name: tuple(data[name]) for name in ("lessons", "tags")}
    data |= {name: _time(data[name]) for name in ("started_at", "ended_at", "touched_at")}
    return Episode(id=record.id, **data)


def _step(data: Mapping[str, Any]) -> EpisodeStep:
    calls = tuple(ToolUse(**call) for call in data["tool_calls"])
    return EpisodeStep(**{**data, "tool_calls": calls, "at": _time(data["at"])})


def _written(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: _written(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [_written(held) for held in value]
    return value


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def cut(text: str, chars: int = MAX_TEXT_CHARS) -> str:
    """The text, its end left out when it is too long."""
    return text if len(text) <= chars else f"{text[:chars]}…"


_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")
_OTHER_SCRIPTS = re.compile("[\u3040-\u30ff\uac00-\ud7af]")
_WORD = re.compile(r"[^\W\d_]{2,}")


def is_chinese(text: str) -> bool:
    """Whether a text is written in Chinese: at least as many Chinese characters as words in other letters."""
    if _OTHER_SCRIPTS.search(text):
        return False
    words = [word for word in _WORD.findall(_HAN.sub(" ", text)) if word]
    han = len(_HAN.findall(text))
    return han > 0 and han >= len(words)
