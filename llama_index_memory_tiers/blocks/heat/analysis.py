"""What models are asked about pages: topics and chains of a batch, promotion of hot segments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from llama_index.core.llms import LLM

from llama_index_memory_tiers.blocks.heat.filing import Filing
from llama_index_memory_tiers.blocks.heat.pages import KIND, Page, Vector, page_terms
from llama_index_memory_tiers.blocks.heat.promotion import (
    KNOWLEDGE,
    PROFILE,
    Promotion,
    knowledge_records,
    profile_record,
)
from llama_index_memory_tiers.blocks.heat.segments import Likeness, Probe, Segment, Volume, probe_of
from llama_index_memory_tiers.blocks.outages import is_outage
from llama_index_memory_tiers.errors import ModelCallsUnavailableError
from llama_index_memory_tiers.extraction.facts import spoken
from llama_index_memory_tiers.extraction.insight import (
    INSIGHT_VERSION,
    Meter,
    Note,
    PageInsight,
    extract_knowledge,
    index_pages,
    update_profile,
)
from llama_index_memory_tiers.records import NewRecord, Record, StoredMessage
from llama_index_memory_tiers.storage import OwnerReader
from llama_index_memory_tiers.text import analyse

_CHAIN_GAP_SECONDS = 1800.0
_CHAIN_LIKENESS = 0.3
_META_CHARACTERS = 300
# Of what is known the newest is shown, so that it need not be found again.
_KNOWN_TO_MODEL = 50

Failed = Callable[[Exception], None]


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """The page in front of a batch.

    Args:
        record: Of it.
        vector: Its embedding.
        messages: Behind it.
    """

    record: Record
    vector: Vector | None = None
    messages: tuple[StoredMessage, ...] = ()


async def told_pages(
    llm: LLM | None, pages: Sequence[Page], before: Before | None, measure: Likeness, meter: Meter, *,
    seconds: float, failed: Failed,
) -> list[Page]:  # fmt: skip
    """Give pages their topics, keywords and chains: by one call when there is a model, else by their own words.

    Args:
        llm: The model, if there is one.
        pages: In order.
        before: The page in front of them.
        measure: Compares neighbours.
        meter: Counts the call.
        seconds: Bound of the call.
        failed: Told when the answer could not be used; then the pages are described by their own words.

    Returns:
        The pages.

    Raises:
        Exception: The model cannot be reached, or may not be called: the batch waits.
    """
    insights: Sequence[PageInsight | None] = [None] * len(pages)
    if llm is not None and pages:
        meta = str(before.record.data.get("meta", "")) if before is not None else ""
        lines = spoken(before.messages) if before is not None else ()
        shown = [spoken(page.messages) for page in pages]
        try:
            insights = await index_pages(llm, shown, before=lines, summary=meta, meter=meter, seconds=seconds)
        except ModelCallsUnavailableError:
            raise
        except Exception as error:
            if is_outage(error):
                raise
            failed(error)
    return _chained(pages, insights, before, measure)


def _chained(
    pages: Sequence[Page], insights: Sequence[PageInsight | None], before: Before | None, measure: Likeness
) -> list[Page]:
    chained: list[Page] = []
    for page, insight in zip(pages, insights, strict=True):
        link = _Link.to(chained[-1]) if chained else _Link.to_record(before) if before is not None else None
        told = page if insight is None else _told(page, insight)
        follows = link is not None and (insight.continues if insight is not None else _continues(link, page, measure))
        if link is not None and follows:
            meta = insight.summary if insight is not None and insight.summary else _rolled(link.meta, page.title)
            chained.append(replace(told, chain=link.chain, meta=meta))
        else:
            meta = insight.summary if insight is not None and insight.summary else page.title
            chained.append(replace(told, chain=page.id, meta=meta))
    return chained


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """The end of a chain."""

    chain: str
    meta: str
    said_at: datetime | None
    probe: Probe

    @classmethod
    def to(cls, page: Page) -> _Link:
        return cls(page.chain, page.meta, page.said_at, probe_of(page))

    @classmethod
    def to_record(cls, before: Before) -> _Link:
        data: Mapping[str, Any] = before.record.data
        keys = tuple(map(str, data.get("keys", ())))
        probe = Probe(page_terms(before.record), keys, before.vector)
        chain = str(data.get("chain") or before.record.id)
        return cls(chain, str(data.get("meta", "")), before.record.said_at, probe)


def _continues(link: _Link, page: Page, measure: Likeness) -> bool:
    begun = min(stored.created_at for stored in page.messages)
    if link.said_at is None or (begun - link.said_at).total_seconds() > _CHAIN_GAP_SECONDS:
        return False
    here = probe_of(page)
    there = Volume("", link.probe.terms, link.probe.keys, link.probe.vector)
    return page.thin or measure.filing(here, there) >= _CHAIN_LIKENESS


def _told(page: Page, insight: PageInsight) -> Page:
    keys = tuple(analyse(" ".join(insight.keywords))) or page.keys
    return replace(page, title=insight.topic, keywords=insight.keywords or page.keywords, keys=keys, told=True)


def _rolled(meta: str, title: str) -> str:
    """A summary without a model: the titles so far, the oldest left out when it grows too long."""
    parts = [part for part in meta.split(" · ") if part]
    if not parts or parts[-1] != title:
        parts.append(title)
    while len(" · ".join(parts)) > _META_CHARACTERS and len(parts) > 1:
        parts.pop(1 if len(parts) > 2 else 0)  # noqa: PLR2004  # the first says how it began
    return " · ".join(parts)[:_META_CHARACTERS]


# --- promotion ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Analyst:
    """Turns hot segments into long-term memory: two calls each, at the same time.

    Args:
        llm: The model.
        model: Its name.
        reader: The owner's records.
        meter: Counts the calls.
        count: Measures texts.
        new_id: Makes public ids.
        agent: Whose agent knowledge it is.
        tokens: Bound of what one analysis is shown.
        seconds: Bound of one call.
        until: Time of the loop from which on no other segment is begun.
        failed: Told when an analysis brought nothing; the segment stays as it is.
    """

    llm: LLM
    model: str
    reader: OwnerReader
    meter: Meter
    count: Callable[[str], int]
    new_id: Callable[[], str]
    agent: str | None
    tokens: int
    seconds: float
    until: float
    failed: Failed

    async def promote(
        self, hot: Sequence[Segment], filings: Sequence[Filing], visits: Mapping[str, int], now: datetime
    ) -> list[Promotion]:
        """Analyse segments, the hottest first; one that fails does not stop the others.

        Args:
            hot: With unanalysed pages, as they will be once the batch is filed.
            filings: Of the batch.
            visits: How often each was ever shown.
            now: The clock.

        Returns:
            What can be merged.
        """
        if not hot:
            return []
        profiles = await self.reader.light(PROFILE)
        profile: Record | NewRecord | None = profiles[-1] if profiles else None
        known = [record.text for record in await self.reader.light(KNOWLEDGE)][-_KNOWN_TO_MODEL:]
        promotions: list[Promotion] = []
        for segment in hot:
            if not self.meter.allows(2) or asyncio.get_running_loop().time() > self.until:
                break
            pages = await self._pages(segment, filings)
            if not pages:
                continue
            found = await self._analyse(profile.text if profile is not None else "", known, pages)
            if found is None:
                continue
            text, notes = found
            promotion = self._promotion(segment, pages, text, notes, profile, visits.get(segment.id, 0), now)
            promotions.append(promotion)
            profile = promotion.profile or profile
            known += [note.text for note in notes]
        return promotions

    async def _pages(self, segment: Segment, filings: Sequence[Filing]) -> list[list[StoredMessage]]:
        """Messages of the unanalysed pages, oldest first, as many as may be shown at once."""
        fresh = [filing.page for filing in filings if filing.segment == segment.id]
        stored: list[list[StoredMessage]] = []
        if segment.unanalysed > len(fresh):
            records = await self.reader.parts_of([segment.id], KIND)
            waiting = [record for record in records if int(record.data.get("n", 0)) > segment.analysed]
            messages = await self.reader.messages_behind([record.id for record in waiting])
            stored = [messages.get(record.id, []) for record in waiting]
            if len(stored) + len(fresh) != segment.unanalysed:
                return []  # another session was faster: next time
        chosen: list[list[StoredMessage]] = []
        left = self.tokens
        for page in [*stored, *(list(page.messages) for page in fresh)]:
            left -= sum(stored_message.tokens for stored_message in page)
            if chosen and left < 0:
                break
            chosen.append(page)
        return chosen

    async def _analyse(
        self, profile: str, known: Sequence[str], pages: Sequence[Sequence[StoredMessage]]
    ) -> tuple[str, tuple[Note, ...]] | None:
        shown = [spoken(page) for page in pages]
        text, notes = await asyncio.gather(
            update_profile(self.llm, profile, shown, meter=self.meter, seconds=self.seconds),
            extract_knowledge(self.llm, known, shown, meter=self.meter, seconds=self.seconds),
            return_exceptions=True,
        )
        for result in (text, notes):
            if isinstance(result, BaseException):
                if not isinstance(result, Exception):
                    raise result
                self.failed(result)
        if isinstance(text, BaseException) or isinstance(notes, BaseException):
            return None
        return text, notes

    def _promotion(
        self,
        segment: Segment,
        pages: Sequence[Sequence[StoredMessage]],
        text: str,
        notes: Sequence[Note],
        profile: Record | NewRecord | None,
        visits: int,
        now: datetime,
    ) -> Promotion:
        places = [[stored.place for stored in page] for page in pages]
        times = [max((stored.created_at for stored in page), default=now) for page in pages]
        every = (place for page in places for place in page)
        about = {"segment": segment.id, "model": self.model, "prompt": INSIGHT_VERSION}
        new: NewRecord | None = None
        if profile is None or profile.text != text:
            new = profile_record(text, profile, every, now, data=about, new_id=self.new_id, count=self.count)
        known = knowledge_records(
            notes, places, times, agent=self.agent, about=about, new_id=self.new_id, count=self.count
        )
        return Promotion(
            segment=segment.id,
            pages=segment.pages,
            analysed=segment.analysed + len(pages),
            before=segment.analysed,
            visits=visits,
            profile=new,
            replaces=profile.id if profile is not None else None,
            knowledge=tuple(known),
        )
