"""Segments: the topics that pages are filed under, and how a page finds its own."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np

from llama_index_memory_tiers.blocks.heat.pages import Extension, Page, Vector
from llama_index_memory_tiers.heat import (
    RAW,
    HeatParts,
    Scale,
    coverage,
    heat_parts,
    rarity,
    segment_score,
    term_cosine,
)
from llama_index_memory_tiers.moments import aware
from llama_index_memory_tiers.records import NewRecord, Place, Record, nothing
from llama_index_memory_tiers.storage import SUM, Visits

KIND = "segment"
LEXICAL = Scale(0.0, 0.25, 0.6)
"""Cosines of words: .25 is the median of the pairs on one topic that embedding models are calibrated on."""
_MOST_TERMS = 128
_MOST_KEYS = 24
_SHOWN_KEYWORDS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A topic.

    Args:
        id: Public id.
        title: In a few words.
        summary: What was said, newest state.
        keywords: As they are written.
        keys: Terms of the keywords → times.
        terms: Terms of the pages → times, the most frequent ones.
        total: Sum of the pages' unit vectors, if all have one of this model.
        model: Name of the embedding model.
        pages: How many pages it has.
        analysed: How many of them, from the first on, are in long-term memory.
        forgiven: Visits that were counted before the last analysis.
        touched_at: When its newest page was said, or when it was last analysed.
        created_at: When it came to be.
        tokens: Size of its pages.
        pinned: Never put aside.
    """

    id: str
    title: str
    touched_at: datetime
    created_at: datetime
    summary: str = ""
    keywords: tuple[str, ...] = ()
    keys: Mapping[str, float] = field(default_factory=nothing)
    terms: Mapping[str, float] = field(default_factory=nothing)
    total: Vector | None = None
    model: str = ""
    pages: int = 0
    analysed: int = 0
    forgiven: int = 0
    tokens: int = 0
    pinned: bool = False

    @property
    def vector(self) -> Vector | None:
        """Direction of its pages."""
        if self.total is None:
            return None
        length = float(np.linalg.norm(self.total))
        return (self.total / length).astype(np.float32) if length > 0 else None

    @property
    def unanalysed(self) -> int:
        """Pages that no model has analysed."""
        return self.pages - self.analysed

    def lacks(self, model: str) -> bool:
        """Whether its direction by a model is unknown although it has pages."""
        return bool(model and self.pages) and (self.total is None or self.model != model)

    def directed(self, mean: Vector, model: str) -> Segment:
        """With the mean embedding of its pages by a model."""
        return replace(self, total=mean * np.float32(self.pages), model=model)

    def parts(self, visits: Visits | None, now: datetime, weights: Mapping[str, float]) -> HeatParts:
        """How warm it is, from stored counters and the clock."""
        since, shown = self.touched_at, 0
        if visits is not None:
            since, shown = max(since, visits.last_at), max(0, visits.count - self.forgiven)
        return heat_parts(shown, self.unanalysed, since, now, **weights)

    def joined(self, page: Page, model: str) -> Segment:
        """With another page: centroid, summary, keywords and counters are brought up to date."""
        keys = _added(self.keys, dict.fromkeys(page.keys, 1), _MOST_KEYS)
        written = dict.fromkeys([*self.keywords, *page.keywords])
        total = None
        if page.vector is not None and (self.pages == 0 or (self.total is not None and self.model == model)):
            total = page.vector if self.total is None else self.total + page.vector
        return replace(
            self,
            summary=page.meta or self.summary,
            keywords=tuple(written)[-_SHOWN_KEYWORDS:],
            keys=keys,
            terms=_added(self.terms, page.terms, _MOST_TERMS),
            total=total,
            model=model if total is not None else "",
            pages=self.pages + 1,
            tokens=self.tokens + page.tokens,
            touched_at=max(self.touched_at, page.said_at),
        )

    def told_more(self, more: Extension, model: str) -> Segment:
        """With an answer that came later: its page has other words, and points elsewhere."""
        total = None
        if self.total is not None and self.model == model and more.before is not None and more.vector is not None:
            total = self.total - more.before + more.vector
        return replace(
            self,
            terms=_added(self.terms, more.terms, _MOST_TERMS),
            total=total,
            model=model if total is not None else "",
        )


def _added(old: Mapping[str, float], new: Mapping[str, float], most: int) -> dict[str, float]:
    found = dict(old)
    for term, count in new.items():
        found[term] = found.get(term, 0) + count
    if len(found) <= most:
        return found
    # What is new stays before what is as rare and older.
    fresh = set(new)
    kept = sorted(found, key=lambda term: (-found[term], term not in fresh))[:most]
    return {term: found[term] for term in kept}


def begun(page: Page, segment_id: str, now: datetime) -> Segment:
    """An empty segment for a page that no other fits."""
    return Segment(segment_id, page.title, touched_at=page.said_at, created_at=now)


def segment_id(page: Page) -> str:
    """Id of the segment that begins with a page: the same at every try."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{page.id}/segment"))


def read_segment(record: Record) -> Segment:
    """A segment from its record; fields that are damaged count as absent."""
    data: Mapping[str, Any] = record.data
    touched = record.said_at or record.created_at
    return Segment(
        id=record.id,
        title=str(data.get("title", "")),
        summary=str(data.get("summary", "")),
        keywords=tuple(map(str, data.get("keywords", ()))),
        keys=_numbers(data.get("keys")),
        terms=_numbers(data.get("terms")),
        total=_decoded(data.get(SUM)),
        model=str(data.get("model", "")),
        pages=int(data.get("pages", 0)),
        analysed=int(data.get("analysed", 0)),
        forgiven=int(data.get("forgiven", 0)),
        touched_at=aware(touched),
        created_at=aware(record.created_at),
        tokens=record.tokens,
        pinned=bool(data.get("pinned")),
    )


def segment_record(segment: Segment, sources: Iterable[Place] = ()) -> NewRecord:
    """The record of a segment; `sources` are those of the pages that joined."""
    return NewRecord(
        id=segment.id,
        kind=KIND,
        text="\n".join(part for part in (segment.title, segment.summary) if part),
        data={
            "title": segment.title,
            "summary": segment.summary,
            "keywords": list(segment.keywords),
            "keys": dict(segment.keys),
            "terms": dict(segment.terms),
            SUM: _encoded(segment.total),
            "model": segment.model,
            "pages": segment.pages,
            "analysed": segment.analysed,
            "forgiven": segment.forgiven,
            "pinned": segment.pinned,
        },
        said_at=segment.touched_at,
        sources=tuple(dict.fromkeys(sources)),
        tokens=segment.tokens,
    )


def _numbers(stored: Any) -> dict[str, float]:
    return {str(term): float(count) for term, count in stored.items()} if isinstance(stored, Mapping) else {}


def _encoded(total: Vector | None) -> dict[str, Any] | None:
    """Half precision of the direction, and its length: a sum of a thousand vectors is as exact as that of two."""
    if total is None:
        return None
    length = float(np.linalg.norm(total))
    if length == 0:
        return None
    return {"unit": base64.b64encode((total / length).astype("<f2").tobytes()).decode(), "length": length}


def _decoded(stored: Any) -> Vector | None:
    if not isinstance(stored, Mapping):
        return None
    unit = np.frombuffer(base64.b64decode(str(stored.get("unit", ""))), "<f2").astype(np.float32)
    return (unit * np.float32(stored.get("length", 0.0))).astype(np.float32) if unit.size else None


# --- what belongs where ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """What is compared with many.

    Args:
        terms: Its terms → times.
        keys: Terms of its keywords.
        vector: Unit embedding, if there is one.
    """

    terms: Mapping[str, float]
    keys: Collection[str]
    vector: Vector | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """One of the many.

    Args:
        id: Public id.
        terms: Its terms → times.
        keys: Terms of its keywords.
        vector: Unit embedding by the model in use, if there is one.
    """

    id: str
    terms: Mapping[str, float]
    keys: Collection[str]
    vector: Vector | None = None


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike a probe and a volume are.

    Args:
        scale: Of the embedding model.
        weights: Rarity of terms.
    """

    scale: Scale = RAW
    weights: Mapping[str, float] = field(default_factory=nothing)

    def similarity(self, probe: Probe, volume: Volume) -> float:
        """By embeddings where both have one, else by words; on one scale."""
        if probe.vector is not None and volume.vector is not None and probe.vector.shape == volume.vector.shape:
            return self.scale.of(float(np.dot(probe.vector, volume.vector)))
        return LEXICAL.of(term_cosine(probe.terms, volume.terms, self.weights))

    def filing(self, probe: Probe, volume: Volume) -> float:
        """How well a page belongs to a segment: similarity + Jaccard of the keywords."""
        return segment_score(self.similarity(probe, volume), probe.keys, volume.keys)

    def answering(self, probe: Probe, volume: Volume, *, literal: bool = False) -> float:
        """How much a segment or page has to do with a question.

        Args:
            probe: The question.
            volume: The other.
            literal: MemoryOS's rule, Jaccard; else the share of the question's words that it speaks of, as one of
                few words has no Jaccard to speak of with sixty.

        Returns:
            Similarity plus overlap; without embeddings the overlap alone.
        """
        if literal:
            return self.filing(probe, volume)
        dense = probe.vector is not None and volume.vector is not None
        similarity = self.similarity(probe, volume) if dense else 0.0
        return similarity + coverage(probe.terms, volume.terms, self.weights)


def likeness(scale: Scale, volumes: Iterable[Volume], only: Collection[str] | None = None) -> Likeness:
    """Measure with the rarity of terms, of all or `only` of a question's, among these."""
    return Likeness(scale, rarity((volume.terms for volume in volumes), only))


def volume_of(segment: Segment, model: str) -> Volume:
    """A segment as something to compare with."""
    return Volume(segment.id, segment.terms, segment.keys, segment.vector if segment.model == model else None)


def probe_of(page: Page) -> Probe:
    """A page as something to compare."""
    return Probe(page.terms, page.keys, page.vector)


def ranked(
    probe: Probe, volumes: Sequence[Volume], measure: Likeness, *, least: float, most: int, literal: bool = False
) -> list[tuple[str, float]]:
    """The volumes that have most to do with a question.

    Args:
        probe: The question.
        volumes: All of them.
        measure: How.
        least: From this score on.
        most: At most so many.
        literal: See `Likeness.answering`.

    Returns:
        Ids and scores, best first; of equals the one that comes first.
    """
    scores = [(measure.answering(probe, volume, literal=literal), at) for at, volume in enumerate(volumes)]
    found = sorted((-score, at) for score, at in scores if score >= least)
    return [(volumes[at].id, -score) for score, at in found[:most]]
