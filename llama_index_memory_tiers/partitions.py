"""Partitions of a vector memory: what kind of thing a message is, and whether it is worth keeping."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from typing_extensions import Self

from llama_index_memory_tiers.checks import check_fields, checked
from llama_index_memory_tiers.errors import ConfigurationError

_MOST_DAYS = 36_525  # a hundred years
FALLBACK = "conversations"
"""Where a message belongs that nothing else claims, or whose classifier failed."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of a vector memory with a quota and a retention of its own.

    Args:
        name: Unique within a block.
        top_k: At most so many of its messages stand in a context; default no bound but the block's.
        retention_days: Days after which a message of it is no longer recalled; default never.
        priority: Partitions with a smaller number are offered first; equal ones by score. Default 0.
    """

    name: str
    top_k: int | None = None
    retention_days: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.name, str) or not self.name.strip():
            raise _wrong("name", self.name, "a name with a visible character")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise _wrong("top_k", self.top_k, "a whole number from 1, or None")
        days = self.retention_days
        if days is not None and (type(days) not in {int, float} or not 0 < days <= _MOST_DAYS):
            raise _wrong("retention_days", days, f"a number of days above 0, at most {_MOST_DAYS}, or None for ever")

    @classmethod
    def survey(cls) -> tuple[Self, ...]:
        """The partitions of the survey of agent memory."""
        return (
            cls("facts", top_k=10),
            cls("decisions", top_k=5, retention_days=365),
            cls("errors", top_k=5, retention_days=180),
            cls(FALLBACK, top_k=3, retention_days=30),
        )

    def expires_at(self, said_at: datetime) -> datetime | None:
        """From when on a message of this partition is no longer recalled."""
        return None if self.retention_days is None else said_at + timedelta(days=self.retention_days)


# In this order: a message about a mistake in a decision is about the mistake.
_RULES = (
    ("errors", r"错误|失败|修复|\b(?:errors?|fail(?:s|ed|ures?)?|fix(?:e[sd])?|bugs?)\b"),
    ("decisions", r"决定|选择|方案|\b(?:decid(?:e[sd]?|ing)|decisions?|cho(?:ose|oses|se|sen|ices?))\b"),
    ("facts", r"偏好|设置|环境|\b(?:prefer(?:s|red|ences?)?|settings?|environments?)\b"),
)
_COMPILED = tuple((name, re.compile(rule, re.IGNORECASE)) for name, rule in _RULES)
_SIGNALS = (
    r"决定|选择|偏好|用户要求|错误|修复|教训|结论|配置|环境"
    r"|\b(?:decid(?:e[sd]?|ing)|decisions?|cho(?:ose|oses|se|sen|ices?)|prefer(?:s|red|ences?)?"
    r"|user (?:asks?|asked|requires?|required|requests?|requested|wants?|wanted)|errors?|fix(?:e[sd])?"
    r"|lessons?|conclu(?:de[sd]?|sions?)|config(?:ur(?:e[sd]?|ations?))?|environments?)\b"
)


def classify_by_rule(text: str) -> str:
    """Name the partition of a text by its words, Chinese or English.

    Args:
        text: What was said.

    Returns:
        `errors`, `decisions`, `facts` or `conversations`, the first that has a word in it; the survey's lists.
    """
    return next((name for name, rule in _COMPILED if rule.search(text)), FALLBACK)


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """Which messages reach the long-term memory; those that do not stay in the session's log.

    Args:
        keeps: Text → whether it is kept. One that raises keeps the message: nothing is lost by a fault.
    """

    keeps: Callable[[str], bool]

    @classmethod
    def survey(cls) -> Self:
        """Keep what has one of the survey's signals: decisions, preferences, errors, lessons."""
        return cls.words(_SIGNALS)

    @classmethod
    @checked
    def words(cls, pattern: str) -> Self:
        """Keep what a regular expression finds, whatever the case.

        Raises:
            ConfigurationError: It is no regular expression.
        """
        try:
            rule = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise _wrong("pattern", pattern, f"a regular expression ({error})") from error
        return cls(lambda text: rule.search(text) is not None)

    def kept(self, text: str) -> bool:
        """Whether a text is kept."""
        try:
            return bool(self.keeps(text))
        except Exception:  # noqa: BLE001  # the user's own function
            return True


def checked_partitions(partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """Refuse partitions that cannot be told apart.

    Raises:
        ConfigurationError: Two have one name, or one is no `Partition`.
    """
    names = [partition.name if isinstance(partition, Partition) else None for partition in partitions]
    if None in names or len(set(names)) < len(names):
        raise _wrong("partitions", names, "a list of Partition values with different names")
    return tuple(partitions)


def place(partitions: Sequence[Partition], name: object) -> Partition:
    """The partition of that name; for an unknown one the fallback, which is `conversations` or else the last."""
    by_name = {partition.name: partition for partition in partitions}
    if isinstance(name, str) and name in by_name:
        return by_name[name]
    return by_name.get(FALLBACK, partitions[-1])


def _wrong(name: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name}={value!r:.200} was given.", allowed=f"{name} is {allowed}.", remedy=f"Correct {name}."
    )
