"""Filing: which segment a page belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from llama_index_memory_tiers.blocks.heat.library import Library
from llama_index_memory_tiers.blocks.heat.pages import Page
from llama_index_memory_tiers.blocks.heat.segments import (
    Likeness,
    Segment,
    begun,
    probe_of,
    segment_id,
    volume_of,
)
from llama_index_memory_tiers.heat import Scale


@dataclass(frozen=True, slots=True)
class Filing:
    """Where a page goes.

    Args:
        page: Which.
        segment: Id of the segment.
        score: How well it belongs there; 0 where a new segment begins, or one goes on.
    """

    page: Page
    segment: str
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class FilingRules:
    """How pages are filed.

    Args:
        threshold: A page joins the best segment from this score on.
        model: Name of the embedding model; '' for none.
        scale: What its cosines mean.
        most_pages: A segment with so many takes no more; `None` is no bound.
        follow: A page that says too little goes along with the one before it.
    """

    threshold: float
    model: str
    scale: Scale
    most_pages: int | None
    follow: bool = True


def file_pages(
    pages: Sequence[Page], library: Library, rules: FilingRules, now: datetime, before: str | None = None
) -> tuple[list[Filing], dict[str, Segment]]:
    """Decide which segment each page belongs to: the best from the threshold on, else a new one.

    Args:
        pages: In order, with their chains.
        library: All segments that are there.
        rules: How.
        now: The clock.
        before: Segment of the page in front of the first.

    Returns:
        One filing per page, and the segments that changed, as they are afterwards.
    """
    measure = Likeness(rules.scale, library.weights)
    changed: dict[str, Segment] = {}
    filings = []
    for page in pages:
        best, score = _best(page, library, changed, measure, rules)
        continues = page.chain != page.id
        known = before in changed or before in library.segments
        if best is None and rules.follow and page.thin and continues and known:
            best = before
        segment = begun(page, segment_id(page), now) if best is None else changed.get(best) or library.segments[best]
        segment = segment.joined(page, rules.model)
        changed[segment.id] = segment
        filings.append(Filing(page, segment.id, score))
        before = segment.id
    return filings, changed


def _best(
    page: Page, library: Library, changed: Mapping[str, Segment], measure: Likeness, rules: FilingRules
) -> tuple[str | None, float]:
    """The best segment, if it is good enough; of equals the one that comes first."""
    probe = probe_of(page)
    near = library.nearest(
        probe, rules.scale, least=rules.threshold, most_pages=rules.most_pages, without=changed.keys()
    )
    rivals = {one: library.segments[one] for one in near}
    rivals |= {
        one: segment for one, segment in changed.items() if rules.most_pages is None or segment.pages < rules.most_pages
    }
    best, best_score = None, 0.0
    for one in sorted(rivals, key=library.place):
        score = measure.filing(probe, volume_of(rivals[one], rules.model))
        if score > best_score:
            best, best_score = one, score
    return (best, best_score) if best_score >= rules.threshold else (None, 0.0)
