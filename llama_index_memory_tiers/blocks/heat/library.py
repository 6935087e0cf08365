"""Library: an owner's segments as columns, so that two thousand of them are looked through in a millisecond."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.blocks.heat.pages import KIND as PAGE
from llama_index_memory_tiers.blocks.heat.segments import (
    KIND,
    LEXICAL,
    Likeness,
    Probe,
    Segment,
    Volume,
    ranked,
    read_segment,
    volume_of,
)
from llama_index_memory_tiers.heat import Scale
from llama_index_memory_tiers.records import Record
from llama_index_memory_tiers.storage import OwnerReader

Numbers = NDArray[np.int32]
Floats = NDArray[np.float64]

# How far a score by columns may be from the exact one: vectors are single precision.
_SLACK = 1e-3
# Pages of so many segments are kept.
_OPEN = 64
_THREAD_RECORDS = 100


class _Words:
    """Numbers for words, from 1; grows only, shared by all states of a library."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def numbered(self, words: Iterable[str]) -> list[int]:
        """The number of each word; new words get one."""
        with self._lock:
            return [self._numbers.setdefault(word, len(self._numbers) + 1) for word in words]

    def known(self, word: str) -> int:
        """The number of a word, 0 for a new one."""
        return self._numbers.get(word, 0)

    @property
    def size(self) -> int:
        """One more than the largest number."""
        return len(self._numbers) + 1


class _Rarity(Mapping[str, float]):
    """Weights of words as `heat.rarity` gives them, looked up one by one."""

    def __init__(self, words: _Words, counts: Numbers, total: int) -> None:
        self._words, self._counts, self._total = words, counts, total

    def __getitem__(self, word: str) -> float:
        number = self._words.known(word)
        if not number or number >= len(self._counts) or not self._counts[number]:
            raise KeyError(word)
        return math.log1p(self._total / int(self._counts[number]))

    def __iter__(self) -> Iterator[str]:
        raise TypeError("weights are looked up one by one")

    def __len__(self) -> int:
        return int(np.count_nonzero(self._counts))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What segments are compared by, one row each, filled up with zeros.

    Args:
        words: Numbers of words.
        terms: Numbers of the terms, shape (segments, most terms).
        counts: How often each occurs, likewise.
        keys: Numbers of the keywords' terms, shape (segments, most keywords).
        vectors: Unit embeddings, shape (segments, dimensions).
        dimensions: Of each; 0 for a segment without one.
    """

    words: _Words
    terms: Numbers
    counts: Floats
    keys: Numbers
    vectors: NDArray[np.float32]
    dimensions: Numbers


class Library:
    """Segments and what they are compared by; a new state is a new library.

    Args:
        model: Name of the embedding model; '' for none.
        segments: In order.
        before: The state before: rows of segments that are the same objects are taken from it.
        directed: Ids of those whose direction is not on record: it was computed from their pages.
    """

    def __init__(
        self,
        model: str,
        segments: Iterable[Segment],
        before: Library | None = None,
        directed: Collection[str] = (),
    ) -> None:
        self.model = model
        self.directed = frozenset(directed)
        self.segments = {segment.id: segment for segment in segments}
        self.order = list(self.segments.values())
        old = {} if before is None else {id(segment): row for row, segment in enumerate(before.order)}
        stay = [(row, old[id(segment)]) for row, segment in enumerate(self.order) if id(segment) in old]
        self.columns: Columns = _columns(self.order, model, stay, None if before is None else before.columns)
        self.pages: dict[str, list[Volume]] = {}
        if before is not None:
            same = {self.order[row].id for row, _ in stay}
            self.pages = {one: pages for one, pages in list(before.pages.items()) if one in same}

    def with_changed(
        self, changed: Sequence[Segment], gone: Collection[str], directed: Collection[str] = ()
    ) -> Library:
        """The next state.

        Args:
            changed: Segments as they are now; new ones come last.
            gone: Ids of those that left.
            directed: Ids of the changed ones whose direction is not on record.

        Returns:
            Another library.
        """
        found = {**self.segments, **{segment.id: segment for segment in changed}}
        for one in gone:
            found.pop(one, None)
        same = self.directed.difference(gone, (segment.id for segment in changed))
        return Library(self.model, found.values(), self, same.union(directed))

    def lacking(self, changed: Collection[str], most: int) -> dict[str, Segment]:
        """Segments whose records lack their direction: all that a batch changes, and others up to `most`."""
        first = sorted(self.directed, key=lambda one: (one not in changed, one))
        return {one: self.segments[one] for one in first[: max(most, len(self.directed.intersection(changed)))]}

    def keep_pages(self, pages: Mapping[str, list[Volume]]) -> None:
        """Remember the pages of segments, those of the newest look-ups."""
        self.pages.update(pages)
        for one in list(self.pages)[: max(0, len(self.pages) - _OPEN)]:
            self.pages.pop(one, None)

    # -- looking through -------------------------------------------------------------------------------------

    @cached_property
    def _in(self) -> Numbers:
        """In how many segments each word occurs."""
        counts: Numbers = np.bincount(self.columns.terms.ravel(), minlength=self.columns.words.size).astype(np.int32)
        counts[0] = 0
        return counts

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """Rarity of every word of the segments."""
        return _Rarity(self.columns.words, self._in, len(self.order))

    @cached_property
    def _weighted(self) -> tuple[Floats, Floats]:
        """Weight of each word of each segment, and their lengths."""
        rare = np.zeros(len(self._in))
        used = self._in > 0
        rare[used] = np.log1p(len(self.order) / self._in[used])
        with np.errstate(divide="ignore"):
            often = np.where(self.columns.counts > 0, 1 + np.log(self.columns.counts), 0.0)
        weighted = often * rare[self.columns.terms]
        return weighted, np.sqrt((weighted * weighted).sum(axis=1))

    def nearest(
        self, probe: Probe, scale: Scale, *, least: float, most_pages: int | None, without: Collection[str]
    ) -> list[str]:
        """The segments that may be the best for a page; `Likeness.filing` tells which of them is.

        Args:
            probe: The page.
            scale: Of the embedding model.
            least: Nothing below counts.
            most_pages: Segments with so many pages are full.
            without: Ids that do not count.

        Returns:
            Ids, in order; empty when there is none.
        """
        if not self.order:
            return []
        scores = self._similar(probe, scale) + self._jaccard(probe.keys)
        scores[[self._rows[one] for one in without if one in self._rows]] = -1.0
        if most_pages is not None:
            scores[self._sizes >= most_pages] = -1.0
        bound = max(least, float(scores.max())) - _SLACK
        return [self.order[row].id for row in np.flatnonzero(scores >= bound)]

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {segment.id: row for row, segment in enumerate(self.order)}

    def place(self, segment: str) -> int:
        """Where a segment stands; new ones stand last."""
        return self._rows.get(segment, len(self.order))

    @cached_property
    def _sizes(self) -> Numbers:
        return np.fromiter((segment.pages for segment in self.order), np.int32, len(self.order))

    def about(self, asked: Probe, scale: Scale, *, least: float, most: int, literal: bool) -> list[tuple[str, float]]:
        """The segments that a question is about, best first; equals `ranked` over all of them.

        Args:
            asked: The question.
            scale: Of the embedding model.
            least: From this score on.
            most: At most so many.
            literal: See `Likeness.answering`.

        Returns:
            Ids and scores.
        """
        if not self.order:
            return []
        if literal:
            measure = Likeness(scale, self.weights)
            scores = self._similar(asked, scale) + self._jaccard(asked.keys)
        else:
            total = len(self.order)
            rare = {term: math.log1p(total / max(1, self._number_with(term))) for term in asked.terms}
            measure = Likeness(scale, rare)
            scores = self._dense(asked, scale) + self._covered(rare)
        bound = least
        if len(scores) > most:
            bound = max(least, float(np.partition(scores, -most)[-most]))
        rows = np.flatnonzero(scores >= bound - _SLACK)
        volumes = [volume_of(self.order[row], self.model) for row in rows]
        return ranked(asked, volumes, measure, least=least, most=most, literal=literal)

    def _number_with(self, term: str) -> int:
        number = self.columns.words.known(term)
        return int(self._in[number]) if 0 < number < len(self._in) else 0

    def _marked(self, weights: Mapping[str, float]) -> Floats:
        """Weights by the number of the word; of words that no segment has there is none."""
        marked = np.zeros(len(self._in))
        for word, weight in weights.items():
            if 0 < (number := self.columns.words.known(word)) < len(marked):
                marked[number] = weight
        return marked

    def _covered(self, rare: Mapping[str, float]) -> Floats:
        total = sum(rare.values())
        covered: Floats = self._marked(rare)[self.columns.terms].sum(axis=1)
        return covered / total if total else covered

    def _jaccard(self, keys: Iterable[str]) -> Floats:
        wanted = set(keys)
        marked = self._marked(dict.fromkeys(wanted, 1.0))
        shared: Floats = marked[self.columns.keys].sum(axis=1)
        either = np.count_nonzero(self.columns.keys, axis=1) + len(wanted) - shared
        found: Floats = np.divide(shared, either, out=np.zeros(len(shared)), where=either > 0)
        return found

    def _with_vector(self, probe: Probe) -> NDArray[np.bool_]:
        if probe.vector is None:
            return np.zeros(len(self.order), np.bool_)
        alike: NDArray[np.bool_] = self.columns.dimensions == len(probe.vector)
        return alike

    def _dense(self, probe: Probe, scale: Scale) -> Floats:
        alike = self._with_vector(probe)
        if probe.vector is None or not alike.any():
            return np.zeros(len(self.order))
        found = scale.of_all(scoring.dots(self.columns.vectors[:, : len(probe.vector)], probe.vector))
        found[~alike] = 0.0
        return found

    def _similar(self, probe: Probe, scale: Scale) -> Floats:
        """By embeddings where both have one, else by words."""
        alike = self._with_vector(probe)
        found = self._dense(probe, scale)
        if not alike.all():
            mine = {
                term: (1 + math.log(count)) * self.weights.get(term, 1.0)
                for term, count in probe.terms.items()
                if count > 0
            }
            weighted, lengths = self._weighted
            size = math.sqrt(sum(weight * weight for weight in mine.values())) * lengths
            shared = (self._marked(mine)[self.columns.terms] * weighted).sum(axis=1)
            cosines = np.divide(shared, size, out=np.zeros(len(size)), where=size > 0)
            found[~alike] = LEXICAL.of_all(cosines)[~alike]
        return found


async def library_of(reader: OwnerReader, model: str) -> Library:
    """The segments of an owner, brought up to date with those that have changed.

    Args:
        reader: The owner's records.
        model: Name of the embedding model; '' for none.

    Returns:
        The library; shared.
    """

    async def take(before: Library | None, records: Sequence[Record]) -> Library:
        many = len(records) > _THREAD_RECORDS
        live = await asyncio.to_thread(_live, records) if many else _live(records)
        lacking = [one for one, segment in live.items() if segment.lacks(model)]
        # After a change of the embedding model their pages have new vectors, and nobody has added them up.
        means = await reader.means(lacking, PAGE, model) if lacking else {}
        live |= {one: live[one].directed(mean, model) for one, mean in means.items()}
        known = Library(model, ()) if before is None else before
        gone = [record.id for record in records if not record.live]
        arguments = (list(live.values()), gone, means.keys())
        return await asyncio.to_thread(known.with_changed, *arguments) if many else known.with_changed(*arguments)

    found: Library = await reader.followed(f"library/{model}", (KIND,), take)
    return found


def _live(records: Iterable[Record]) -> dict[str, Segment]:
    return {record.id: read_segment(record) for record in records if record.live}


def _columns(order: Sequence[Segment], model: str, stay: Sequence[tuple[int, int]], before: Columns | None) -> Columns:
    """Columns of segments; rows that stay, new and old number, are copied."""
    words = _Words() if before is None else before.words
    kept = {row for row, _ in stay}
    fresh = {row: segment for row, segment in enumerate(order) if row not in kept}
    directions = {row: segment.vector if segment.model == model else None for row, segment in fresh.items()}
    vectors: dict[int, Any] = {row: () if found is None else found for row, found in directions.items()}
    terms = {row: words.numbered(segment.terms) for row, segment in fresh.items()}
    counts = {row: list(segment.terms.values()) for row, segment in fresh.items()}
    keys = {row: words.numbered(segment.keys) for row, segment in fresh.items()}
    sizes = {row: [len(vector)] for row, vector in vectors.items()}
    in_place = before is not None and len(order) >= len(before.terms) and all(row == was for row, was in stay)

    def column(values: Mapping[int, Sequence[Any]], old: NDArray[Any] | None, kind: Any) -> NDArray[Any]:
        width = max([1, *map(len, values.values()), 0 if old is None else old.shape[1]])
        made = np.zeros((len(order), width), kind)
        if old is not None and in_place:  # as a rule: nobody left, so nobody moves
            made[: len(old), : old.shape[1]] = old
        elif old is not None and stay:
            made[[row for row, _ in stay], : old.shape[1]] = old[[was for _, was in stay]]
        for row, numbers in values.items():
            made[row] = 0
            made[row, : len(numbers)] = numbers
        return made

    return Columns(
        words=words,
        terms=column(terms, None if before is None else before.terms, np.int32),
        counts=column(counts, None if before is None else before.counts, np.float64),
        keys=column(keys, None if before is None else before.keys, np.int32),
        vectors=column(vectors, None if before is None else before.vectors, np.float32),
        dimensions=column(sizes, None if before is None else before.dimensions[:, None], np.int32)[:, 0],
    )
