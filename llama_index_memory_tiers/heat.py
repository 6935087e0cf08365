"""Arithmetic of tiers: how warm a topic is, what belongs to it, and what leaves when there is no room."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Terms = Mapping[str, float]
"""Term → how often it occurs."""

_HOUR = 3600.0
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class HeatParts:
    """What a heat is made of.

    Args:
        visits: Share of the visits.
        pages: Share of the pages.
        recency: Share of the time since the last touch.
    """

    visits: float
    pages: float
    recency: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.visits + self.pages + self.recency


def heat_parts(
    visits: float,
    pages: float,
    since: datetime,
    now: datetime,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
    tau_hours: float = 24.0,
) -> HeatParts:
    """How warm a topic is, part by part.

    Args:
        visits: How often it was shown since it was last analysed.
        pages: How many pages it gained since then.
        since: When it was last touched: a page, a visit, an analysis.
        now: The clock; a touch in the future counts as now.
        alpha: Weight of a visit, default 1.
        beta: Weight of a page, default 1.
        gamma: Weight of the recency, default 1.
        tau_hours: After so many hours the recency has fallen to 1/e, default 24.

    Returns:
        The parts of α·visits + β·pages + γ·exp(-Δt / τ). Kang et al., "Memory OS of AI Agent", 2025.
    """
    hours = max(0.0, (now - since).total_seconds()) / _HOUR
    return HeatParts(alpha * visits, beta * pages, gamma * math.exp(-hours / tau_hours))


def heat(
    visits: float,
    pages: float,
    since: datetime,
    now: datetime,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
    tau_hours: float = 24.0,
) -> float:
    """How warm a topic is; see `heat_parts`."""
    parts = heat_parts(visits, pages, since, now, alpha=alpha, beta=beta, gamma=gamma, tau_hours=tau_hours)
    return parts.total


# --- what belongs together ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """What the cosines of one embedding model mean.

    Args:
        unrelated: Cosine of texts that have nothing in common.
        related: Cosine of texts on one topic in different words.
        meaning: What `related` is turned into.
    """

    unrelated: float = 0.0
    related: float = 1.0
    meaning: float = 1.0

    def of(self, cosine: float) -> float:
        """Similarity that means the same for every model: 0 for unrelated texts, `meaning` for related ones."""
        span = self.related - self.unrelated
        if span <= 0:
            return 0.0  # a model that tells nothing apart
        return min(1.0, max(0.0, (cosine - self.unrelated) / span * self.meaning))

    def of_all(self, cosines: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """The same for many cosines."""
        span = self.related - self.unrelated
        if span <= 0:
            return np.zeros(len(cosines))
        scaled: NDArray[np.float64] = (cosines.astype(np.float64) - self.unrelated) / span * self.meaning
        return np.clip(scaled, 0.0, 1.0)


RAW = Scale()
"""Cosines as they are, negative ones as 0."""


def calibrated(pairs: Sequence[float], others: Sequence[float], meaning: float = 0.6) -> Scale:
    """Read the scale of a model off texts that are known to belong together, and others that do not.

    Args:
        pairs: Cosines of related texts.
        others: Cosines of unrelated texts.
        meaning: What the median of the first becomes, default .6.

    Returns:
        The scale, by medians; one on which everything is 0 when the model cannot tell them apart.
    """
    low, high = _median(others), _median(pairs)
    return Scale(low, high, meaning) if high - low > _LEAST_SPAN else Scale(1.0, 1.0, meaning)


_LEAST_SPAN = 0.02


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    if not ordered:
        return 0.0
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def jaccard(one: Collection[str], other: Collection[str]) -> float:
    """Shared keywords: what is in both over what is in either; 0 when both are empty."""
    mine, theirs = set(one), set(other)
    return len(mine & theirs) / len(mine | theirs) if mine or theirs else 0.0


def segment_score(similarity: float, keywords: Collection[str], others: Collection[str]) -> float:
    """How well a page belongs to a segment.

    Args:
        similarity: Of their embeddings, -1 to 1; on the model's scale.
        keywords: Of the page.
        others: Of the segment.

    Returns:
        Similarity plus Jaccard of the keywords; the F of MemoryOS.
    """
    return similarity + jaccard(keywords, others)


def rarity(documents: Iterable[Collection[str]], only: Collection[str] | None = None) -> dict[str, float]:
    """Weight of each term, rare ones more.

    Args:
        documents: The terms of each document, each once.
        only: Terms that matter; default all that occur. One that no document has weighs as if one had.

    Returns:
        Term → ln(1 + N / n): N documents, n of them with the term.
    """
    counts: dict[str, int] = dict.fromkeys(only or (), 0)
    total = 0
    for terms in documents:
        total += 1
        for term in terms if only is None else (term for term in only if term in terms):
            counts[term] = counts.get(term, 0) + 1
    return {term: math.log1p(total / max(1, count)) for term, count in counts.items()}


def term_cosine(one: Terms, other: Terms, weights: Terms) -> float:
    """Cosine of two texts by their words, where there is no embedding.

    Args:
        one: Terms of the first.
        other: Terms of the second.
        weights: From `rarity`; an unknown term weighs 1.

    Returns:
        0 to 1. A term counts 1 + ln(times), times its weight.
    """
    mine, theirs = _weighted(one, weights), _weighted(other, weights)
    size = math.sqrt(sum(w * w for w in mine.values()) * sum(w * w for w in theirs.values()))
    if not size:
        return 0.0
    if len(theirs) < len(mine):
        mine, theirs = theirs, mine
    return sum(weight * theirs[term] for term, weight in mine.items() if term in theirs) / size


def _weighted(terms: Terms, weights: Terms) -> dict[str, float]:
    return {term: (1 + math.log(count)) * weights.get(term, 1.0) for term, count in terms.items() if count > 0}


def coverage(question: Collection[str], terms: Collection[str], weights: Terms) -> float:
    """How much of a question a text speaks of.

    Args:
        question: Its terms.
        terms: Those of the text.
        weights: From `rarity`, of the question's terms; an unknown one weighs 1.

    Returns:
        0 to 1: weight of the shared terms over that of all. A question's three words against a topic's sixty make
        no Jaccard to speak of.
    """
    total = sum(weights.get(term, 1.0) for term in question)
    found = sum(weights.get(term, 1.0) for term in question if term in terms)
    return found / total if total else 0.0


# --- who leaves -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tenant:
    """A segment as seen by who has to make room.

    Args:
        id: Public id.
        heat: See `heat`.
        created_at: When it came to be.
        visits: How often it was ever shown.
        pinned: Never leaves.
    """

    id: str
    heat: float
    created_at: datetime
    visits: int = 0
    pinned: bool = False


Policy = Literal["heat", "memoryos"]


def eviction_order(
    tenants: Iterable[Tenant], now: datetime, *, grace_hours: float = 24.0, policy: Policy = "heat"
) -> list[str]:
    """Who leaves first.

    Args:
        tenants: All segments.
        now: The clock.
        grace_hours: Those that came within so many hours leave only when nobody else is there, default 24.
        policy: `heat`: the coldest first. `memoryos`: the least frequently used first, without grace.

    Returns:
        Ids; pinned ones are missing. Of equals the oldest leaves.
    """

    def key(one: Tenant) -> tuple[float, float, float, str]:
        if policy == "memoryos":
            return 0.0, float(one.visits), one.created_at.timestamp(), one.id
        new = (now - one.created_at).total_seconds() < grace_hours * _HOUR
        return float(new), one.heat, one.created_at.timestamp(), one.id

    return [one.id for one in sorted((one for one in tenants if not one.pinned), key=key)]


@dataclass(frozen=True, slots=True)
class Known:
    """A piece of knowledge as seen by who has to make room.

    Args:
        id: Public id.
        importance: 0 to 1.
        said_at: When it was said.
    """

    id: str
    importance: float
    said_at: datetime


def staleness(importance: float, age_days: float) -> float:
    """How little is lost with a piece of knowledge: (1 - importance) · age; what matters fully is never stale."""
    return (1.0 - importance) * max(0.0, age_days)


def overflow_order(
    known: Iterable[Known], now: datetime, *, by: Literal["importance", "fifo"] = "importance"
) -> list[str]:
    """Which knowledge leaves first.

    Args:
        known: All of it.
        now: The clock.
        by: `importance`: what is unimportant and old at once. `fifo`: the oldest.

    Returns:
        Ids; of equals the less important one leaves, then the older one.
    """

    def key(one: Known) -> tuple[float, float, float, str]:
        age = one.said_at.timestamp()
        if by == "fifo":
            return age, 0.0, 0.0, one.id
        return -staleness(one.importance, (now - one.said_at).total_seconds() / _DAY), one.importance, age, one.id

    return [one.id for one in sorted(known, key=key)]
