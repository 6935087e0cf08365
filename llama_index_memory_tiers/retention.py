"""Who may leave: rules of retention as values, each with one pure plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeAlias

from llama_index_memory_tiers.checks import check_kind
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.heat import staleness
from llama_index_memory_tiers.records import Departure
from llama_index_memory_tiers.sameness import NEAR, Known

_DAY = 86400.0
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Holding:
    """A record as seen by who decides what may leave.

    Args:
        id: Public id.
        block: Name of the block that wrote it.
        kind: Of the record.
        said_at: When it was said, or written when that is not known.
        text: What is recalled.
        used_at: When it was last shown or added to; `None` when it never was.
        importance: 0 to 1.
        heat: How warm it is; `None` when it has none.
        pinned: Never leaves.
        side: What says the same on another side is no duplicate: knowledge of two agents.
    """

    id: str
    block: str
    kind: str
    said_at: datetime
    text: str = ""
    used_at: datetime | None = None
    importance: float = 0.5
    heat: float | None = None
    pinned: bool = False
    side: str = ""


class _Checked:
    """Refuses numbers that make no sense, and one kind given as a text."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]  # every rule is a dataclass
            value = getattr(self, one.name)
            if one.name == "kinds":
                check_kind(one.name, value, Collection[str] | None)
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise _refused(self, one.name, value, f"{one.name} is a number from 0.")
            elif one.name == "similarity" and not 0 < value <= 1:
                raise _refused(self, one.name, value, "similarity lies between 0 and 1.")


def _refused(rule: object, name: str, value: Any, allowed: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name}={value!r:.100} was given to {type(rule).__name__}.", allowed=allowed, remedy="Pass such a value."
    )


@dataclass(frozen=True, slots=True)
class ByAge(_Checked):
    """What was said too long ago leaves.

    Args:
        days: Age in days.
        kinds: Of which kinds; `None` is all.
    """

    days: float = 90.0
    kinds: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class ByDisuse(_Checked):
    """What was not shown for too long leaves.

    Args:
        days: Since it was last shown, or said when it never was.
        kinds: Of which kinds; only those whose uses are counted should stand here.
    """

    days: float = 30.0
    kinds: Collection[str] | None = ("segment",)


@dataclass(frozen=True, slots=True)
class ByHeat(_Checked):
    """What has cooled down leaves.

    Args:
        below: Heat.
        grace_hours: Younger ones stay, default 24.
    """

    below: float = 0.1
    grace_hours: float = 24.0


@dataclass(frozen=True, slots=True)
class ByImportance(_Checked):
    """What is unimportant and old at once leaves: (1 - importance) · age.

    Args:
        stale_days: Limit: something of importance .5 leaves at twice that age, something of importance 1 never.
        kinds: Of which kinds.
    """

    stale_days: float = 90.0
    kinds: Collection[str] | None = ("fact",)


@dataclass(frozen=True, slots=True)
class NearDuplicates(_Checked):
    """What says the same as a newer one is replaced by it.

    Args:
        similarity: Share of words that both have, in one order, default .9; numbers, signs and negations must agree.
        kinds: Of which kinds; messages have no text of their own, so none is a duplicate.
    """

    similarity: float = NEAR
    kinds: Collection[str] | None = ("fact",)


RetentionPolicy: TypeAlias = ByAge | ByDisuse | ByHeat | ByImportance | NearDuplicates
INTERNAL = frozenset({"page", "meter"})
"""Kinds that come and go with others."""


def _of(kinds: Collection[str] | None, holdings: Iterable[Holding]) -> list[Holding]:
    return [
        one for one in holdings if not one.pinned and one.kind not in INTERNAL and (kinds is None or one.kind in kinds)
    ]


def _leaves(one: Holding, policy: RetentionPolicy, reason: str, successor: str | None = None) -> Departure:
    return Departure(one.id, one.block, one.kind, type(policy).__name__, reason, successor)


def _days(since: datetime, now: datetime) -> float:
    return (now - since).total_seconds() / _DAY


def plan_by_age(policy: ByAge, holdings: Iterable[Holding], now: datetime) -> list[Departure]:
    """What leaves by `ByAge`."""
    aged = ((one, _days(one.said_at, now)) for one in _of(policy.kinds, holdings))
    return [_leaves(one, policy, f"said {days:.1f} days ago") for one, days in aged if days > policy.days]


def plan_by_disuse(policy: ByDisuse, holdings: Iterable[Holding], now: datetime) -> list[Departure]:
    """What leaves by `ByDisuse`."""
    idle = ((one, _days(max(one.used_at or one.said_at, one.said_at), now)) for one in _of(policy.kinds, holdings))
    return [_leaves(one, policy, f"not used for {days:.1f} days") for one, days in idle if days > policy.days]


def plan_by_heat(policy: ByHeat, holdings: Iterable[Holding], now: datetime) -> list[Departure]:
    """What leaves by `ByHeat`."""
    return [
        _leaves(one, policy, f"heat {one.heat:.2f}")
        for one in _of(None, holdings)
        if one.heat is not None
        and one.heat < policy.below
        and (now - one.said_at).total_seconds() >= policy.grace_hours * _HOUR
    ]


def plan_by_importance(policy: ByImportance, holdings: Iterable[Holding], now: datetime) -> list[Departure]:
    """What leaves by `ByImportance`."""
    return [
        _leaves(one, policy, f"importance {one.importance:.2f}, said {_days(one.said_at, now):.1f} days ago")
        for one in _of(policy.kinds, holdings)
        if staleness(one.importance, _days(one.said_at, now)) > policy.stale_days
    ]


def plan_near_duplicates(policy: NearDuplicates, holdings: Iterable[Holding], now: datetime) -> list[Departure]:  # noqa: ARG001  # one signature for all
    """What leaves by `NearDuplicates`: of two that say the same, the older."""
    newest = sorted(_of(policy.kinds, holdings), key=lambda one: (-one.said_at.timestamp(), one.id))
    known: defaultdict[tuple[str, str, str], Known] = defaultdict(lambda: Known(near=policy.similarity))
    twins = ((one, known[one.block, one.kind, one.side].find_or_add(one.id, one.text)) for one in newest)
    return [_leaves(one, policy, "says the same as a newer one", twin) for one, twin in twins if twin is not None]


_PLANS: Mapping[type, Callable[..., list[Departure]]] = {
    ByAge: plan_by_age,
    ByDisuse: plan_by_disuse,
    ByHeat: plan_by_heat,
    ByImportance: plan_by_importance,
    NearDuplicates: plan_near_duplicates,
}


def plan_retention(
    policies: Sequence[RetentionPolicy], holdings: Sequence[Holding], now: datetime
) -> tuple[Departure, ...]:
    """What leaves by any of several rules.

    Args:
        policies: In order; the first that wants a record gives the reason.
        holdings: All records.
        now: The clock.

    Returns:
        One departure per record.
    """
    left = list(holdings)
    found: list[Departure] = []
    for policy in policies:
        going = _PLANS[type(policy)](policy, left, now)
        gone = {one.record_id for one in going}
        left = [one for one in left if one.id not in gone]
        found += going
    return tuple(found)


def as_data(policies: Sequence[RetentionPolicy]) -> list[dict[str, Any]]:
    """Rules as plain JSON data; see `from_data`."""
    return [
        {"rule": type(one).__name__} | {each.name: _plain(getattr(one, each.name)) for each in fields(one)}
        for one in policies
    ]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else sorted(value)


def from_data(data: Iterable[Mapping[str, Any]]) -> tuple[RetentionPolicy, ...]:
    """Rules as `as_data` wrote them.

    Raises:
        ConfigurationError: One is of a kind that this release does not know.
    """
    kinds = {kind.__name__: kind for kind in _PLANS}
    found = []
    for one in data:
        kind = kinds.get(str(one.get("rule")))
        if kind is None:
            raise ConfigurationError(
                f"A rule of retention of kind {one.get('rule')!r:.50} was given.",
                allowed=f"Rules are: {', '.join(kinds)}.",
                remedy="Install the release that wrote it, or pass retention=.",
            )
        found.append(kind(**{name: value for name, value in one.items() if name != "rule"}))
    return tuple(found)


def checked_policies(given: Any) -> tuple[RetentionPolicy, ...]:
    """Refuse what is no list of rules.

    Raises:
        ConfigurationError: Names what was given.
    """
    several = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for one in several:
        if type(one) not in _PLANS:
            raise ConfigurationError(
                f"retention holds {one!r:.100}.",
                allowed=f"Rules are: {', '.join(kind.__name__ for kind in _PLANS)}.",
                remedy="Write retention=[ByAge(days=365), …], or leave it out.",
            )
    return several
