"""Merging: what one batch does to the tiers, decided on the records as they are then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from llama_index_memory_tiers.blocks.heat.filing import Filing
from llama_index_memory_tiers.blocks.heat.pages import Extension, page_record
from llama_index_memory_tiers.blocks.heat.promotion import KNOWLEDGE, PROFILE, LongTerm, Promotion, version
from llama_index_memory_tiers.blocks.heat.segments import (
    KIND,
    Segment,
    begun,
    read_segment,
    segment_id,
    segment_record,
)
from llama_index_memory_tiers.blocks.heat.sharing import granted
from llama_index_memory_tiers.events import (
    MemoryEvent,
    SegmentCreated,
    SegmentEvicted,
    SegmentHeated,
    SegmentMerged,
    SegmentPromoted,
)
from llama_index_memory_tiers.records import Changes, NewRecord, Place, Reads, Record
from llama_index_memory_tiers.storage import Visits

METER = "meter"


@dataclass(frozen=True, slots=True)
class Calls:
    """Model calls of one batch, for the owner's meter.

    Args:
        id: Id of the meter's record.
        day: The day they count for.
        calls: How many.
        tokens: Sent and received.
    """

    id: str
    day: str
    calls: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class HeatDraft:
    """What `prepare` found out about one batch.

    Args:
        session_id: For events.
        block: Key of the block.
        now: The clock.
        model: Name of the embedding model.
        filings: Where each page goes.
        extended: A page whose answer came now.
        promotions: What hot segments brought.
        surplus: How many segments are too many.
        leaving: Ids of segments in the order in which they leave, a few more than must, with their heats.
        visits: How often segments were shown.
        directed: Segments with the direction of their pages by `model`, which their records lack.
        weights: Of the heat.
        threshold: Of the heat.
        capacity: Of the knowledge.
        overflow: Which knowledge leaves first.
        calls: For the meter.
    """

    session_id: str
    block: str
    now: datetime
    model: str
    weights: Mapping[str, float]
    threshold: float
    capacity: int
    overflow: Literal["importance", "fifo"]
    calls: Calls
    filings: tuple[Filing, ...] = ()
    extended: tuple[Extension, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    surplus: int = 0
    leaving: Mapping[str, float] = field(default_factory=dict)
    visits: Mapping[str, Visits] = field(default_factory=dict)
    directed: Mapping[str, Segment] = field(default_factory=dict)


def reads_of(draft: HeatDraft) -> Reads:
    """What the merge of a draft must see: the segments that it changes, and long-term memory if it adds to it."""
    ids = [filing.segment for filing in draft.filings] + [promotion.segment for promotion in draft.promotions]
    ids += [more.page.parent for more in draft.extended if more.page.parent is not None]
    kinds = (KNOWLEDGE, PROFILE) if draft.promotions else ()
    return Reads(kinds=kinds, ids=tuple(dict.fromkeys([*ids, *draft.leaving, *draft.directed, draft.calls.id])))


def merge_heat(draft: HeatDraft, records: Sequence[Record]) -> Changes:
    """Decide what to write.

    Args:
        draft: What `prepare` found out.
        records: What `reads_of` names, as it is now.

    Returns:
        Pages, segments, long-term memory, what leaves, and the events that say so.
    """
    return _Merge(draft, records).changes()


class _Merge:
    def __init__(self, draft: HeatDraft, records: Sequence[Record]) -> None:
        self._draft = draft
        self._fresh = {r.id: read_segment(r) for r in records if r.kind == KIND and r.live}
        self._meter = next((record for record in records if record.id == draft.calls.id), None)
        profiles = [record for record in records if record.kind == PROFILE and record.live]
        known = {record.id: record for record in records if record.kind == KNOWLEDGE and record.live}
        self._long = LongTerm(profiles[-1].id if profiles else None, dict(known))
        self._segments: dict[str, Segment] = {}
        self._direct()
        self._sources: dict[str, list[Place]] = {}
        self._pages: list[NewRecord] = []
        self._events: list[MemoryEvent] = []

    def changes(self) -> Changes:
        """See `merge_heat`."""
        self._extend()
        self._file()
        self._heated()
        for promotion in self._draft.promotions:
            self._promote(promotion)
        self._long.shrink(self._draft.capacity, self._draft.now, self._draft.overflow)
        evicted = self._evict()
        new = [self._record(one) for one in self._segments.values() if one.id not in self._fresh]
        old = [self._record(one) for one in self._segments.values() if one.id in self._fresh]
        meter = self._metered()
        return Changes(
            add=(*new, *self._pages, *self._long.add.values(), *(meter if self._meter is None else ())),
            revise=(*old, *(more.page for more in self._draft.extended), *(meter if self._meter is not None else ())),
            supersede=self._long.supersede,
            archive=(*self._long.archive, *evicted),
            share=granted(self._long.add.values()),
            events=tuple(self._events),
        )

    def _direct(self) -> None:
        """Write down directions in the space of another embedding model."""
        for one, found in self._draft.directed.items():
            segment = self._fresh.get(one)
            if segment is not None and segment.lacks(found.model) and segment.pages == found.pages:
                self._segments[one] = self._fresh[one] = replace(segment, total=found.total, model=found.model)

    def _record(self, segment: Segment) -> NewRecord:
        return segment_record(segment, self._sources.get(segment.id, ()))

    def _extend(self) -> None:
        """An answer tells what its page is about, and with it the segment."""
        for more in self._draft.extended:
            segment = self._fresh.get(more.page.parent or "")
            if segment is not None:
                self._segments[segment.id] = segment.told_more(more, self._draft.model)
                self._sources.setdefault(segment.id, []).extend(more.page.sources)

    def _file(self) -> None:
        draft = self._draft
        moved: dict[str, str] = {}
        gained: dict[str, int] = {}
        for filing in draft.filings:
            page = filing.page
            target = moved.get(filing.segment, filing.segment)
            segment = self._segments.get(target) or self._fresh.get(target)
            if segment is None:  # a new topic, or one that left meanwhile
                target = moved[filing.segment] = segment_id(page)
                segment = begun(page, target, draft.now)
            segment = segment.joined(page, draft.model)
            self._segments[target] = segment
            self._sources.setdefault(target, []).extend(page.places)
            self._pages.append(page_record(page, target, segment.pages, draft.model))
            gained[target] = gained.get(target, 0) + 1
        for target, pages in gained.items():
            kind = SegmentMerged if target in self._fresh else SegmentCreated
            self._events.append(kind(session_id=draft.session_id, block=draft.block, segment=target, pages=pages))

    def _heat(self, segment: Segment) -> float:
        return segment.parts(self._draft.visits.get(segment.id), self._draft.now, self._draft.weights).total

    def _heated(self) -> None:
        draft = self._draft
        for id_, segment in self._segments.items():
            before = self._fresh.get(id_)
            heat = self._heat(segment)
            if heat >= draft.threshold and (before is None or self._heat(before) < draft.threshold):
                self._events.append(
                    SegmentHeated(session_id=draft.session_id, block=draft.block, segment=id_, heat=heat)
                )

    def _promote(self, promotion: Promotion) -> None:
        """Apply an analysis, unless another session changed the segment or the profile since: then it is done again."""
        segment = self._segments.get(promotion.segment) or self._fresh.get(promotion.segment)
        if segment is None or (segment.pages, segment.analysed) != (promotion.pages, promotion.before):
            return
        if promotion.profile is not None and promotion.replaces != self._long.profile:
            return
        if promotion.profile is not None:
            self._long.take_profile(promotion.profile)
        learnt = sum([self._long.learn(note) for note in promotion.knowledge])
        self._segments[segment.id] = replace(
            segment, analysed=promotion.analysed, forgiven=promotion.visits, touched_at=self._draft.now
        )
        self._events.append(
            SegmentPromoted(
                session_id=self._draft.session_id,
                block=self._draft.block,
                segment=segment.id,
                pages=promotion.analysed - promotion.before,
                profile_version=version(promotion.profile) if promotion.profile is not None else None,
                knowledge=learnt,
            )
        )

    def _evict(self) -> list[str]:
        draft = self._draft
        there = (self._segments.get(id_) or self._fresh.get(id_) for id_ in draft.leaving)
        gone = [one.id for one in there if one is not None and not one.pinned][: draft.surplus]
        self._events += [
            SegmentEvicted(session_id=draft.session_id, block=draft.block, segment=id_, heat=draft.leaving[id_])
            for id_ in gone
        ]
        return gone

    def _metered(self) -> tuple[NewRecord, ...]:
        spent = self._draft.calls
        if not spent.calls:
            return ()
        known = self._meter.data if self._meter is not None else {}
        today = int(known.get("today", 0)) if known.get("day") == spent.day else 0
        data = {
            "day": spent.day,
            "today": today + spent.calls,
            "calls": int(known.get("calls", 0)) + spent.calls,
            "tokens": int(known.get("tokens", 0)) + spent.tokens,
        }
        return (NewRecord(id=spent.id, kind=METER, data=data),)
