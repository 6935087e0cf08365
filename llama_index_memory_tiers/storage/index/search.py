"""Exact BM25 and dense search over one owner's rows."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Self

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.dates import read_dates
from llama_index_memory_tiers.errors import embedding_mismatch
from llama_index_memory_tiers.moments import aware
from llama_index_memory_tiers.records import Place
from llama_index_memory_tiers.storage.index.pack import pack, unpack
from llama_index_memory_tiers.storage.index.rows import Array, IndexColumns, IndexRow, term_number, unit
from llama_index_memory_tiers.storage.index.sought import Sought, sought
from llama_index_memory_tiers.storage.index.table import OwnerTable
from llama_index_memory_tiers.text import QUESTION, mentions
from llama_index_memory_tiers.wanted import wanted_by

MAX_QUERY_TERMS = 64
"""Of a very long question the rarest terms are searched for, so that it costs no more than a long one."""
_MAX_READ_TERMS = 512
_MAX_YEARS = 100


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What to look for, and where.

    Args:
        text: The question.
        now: The moment of asking: hides what has expired; its zone reads dates. Naive is UTC.
        vector: The question's embedding, shape (dimensions,), or `None` for BM25 alone.
        kinds: Kinds to search, `None` for all.
        blocks: Blocks to search, `None` for all.
        since: Said at or after; records without a time are left out.
        until: Said before; records without a time are left out.
        sessions: Session rows to search, `None` for all.
        exclude: Messages that are shown already.
        limit: At most this many hits.
    """

    text: str
    now: datetime
    vector: Sequence[float] | None = None
    kinds: frozenset[str] | None = None
    blocks: frozenset[str] | None = None
    since: datetime | None = None
    until: datetime | None = None
    sessions: frozenset[int] | None = None
    exclude: frozenset[Place] = frozenset()
    limit: int = 50


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is known of all rows of an owner where only candidates and what stands around them are at hand.

    Args:
        candidates: Ids of rows that may be hits; the others only stand beside them.
        rows: How many rows are visible.
        found: Numbers of terms that count as one → how many visible rows hold one of them.
        speakers: Who is heard in them.
        embedded: How many live rows have an embedding.
        total: Sum of these embeddings, shape (dimensions,), or `None` for none.
        lowest: The lowest value of the dense leg among the rows that pass the filters.
    """

    candidates: frozenset[int]
    rows: int
    found: Mapping[tuple[int, ...], int]
    speakers: tuple[str, ...] = ()
    embedded: int = 0
    total: Array | None = None
    lowest: float = math.inf


class Hit(NamedTuple):
    """A record that has to do with the question; a tuple, as a question has hundreds of them.

    Args:
        id: Row id.
        score: Sum of its legs.
        legs: What each leg gave: `bm25`, `dense`, `speaker`, `date`, `question` (negative), `answer`, `session`;
            zeros left out.
        place: Session row and position, when it is a message.
        tokens: Size when shown.
        said_at: When it was said, epoch seconds.
        speaker: Who said it, or "".
        similarity: Cosine of the embeddings, -1 to 1, when both exist.
    """

    id: int
    score: float
    legs: Mapping[str, float]
    place: Place | None
    tokens: int
    said_at: float | None
    speaker: str
    similarity: float | None = None


class OwnerIndex:
    """The searchable memory of one owner; safe to use from several threads.

    Args:
        dimensions: Size of the embeddings; `None` takes it from the first one. Rows with another size are found by
            BM25 only and counted in `refused_vectors`.
        weights: What each leg adds to a score.
    """

    def __init__(self, *, dimensions: int | None = None, weights: scoring.Weights | None = None) -> None:
        self.rev = 0
        self.epoch = 0
        self.compared = False  # whether somebody has looked for embeddings of another model
        self._weights = weights or scoring.Weights()
        self._lock = threading.Lock()
        self._rows = OwnerTable(dimensions)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def dimensions(self) -> int | None:
        """Size of the embeddings, once it is known."""
        return self._rows.dimensions

    @property
    def speakers(self) -> tuple[str, ...]:
        """Who was ever heard in the records, names or roles."""
        with self._lock:
            return tuple(name for name in self._rows.names["speaker"].names if name)

    @property
    def embedded(self) -> int:
        """How many rows have an embedding of that size."""
        return self._rows.embedded

    @property
    def refused_vectors(self) -> int:
        """Embeddings of another size."""
        return self._rows.refused_vectors

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, near enough for a cache."""
        return self._rows.nbytes

    def update(self, rows: Iterable[IndexRow]) -> None:
        """Take in new, changed and removed records; repeating it, or another order, changes nothing.

        Args:
            rows: States of records; of several states of one record the one with the highest `rev` stays.
        """
        values = list(zip(*rows, strict=True))
        if values:
            self.take(dict(zip(IndexRow._fields, values, strict=True)))

    def take(self, columns: IndexColumns) -> None:
        """Take in records like `update`, field by field."""
        with self._lock:
            self._rows.update(columns)

    def packed(self) -> tuple[int, int, bytes]:
        """Epoch, revision, and all that is known up to it, as bytes for `unpacked`; a revision seen in full only."""
        with self._lock:
            epoch, rev, state = self.epoch, self.rev, self._rows.state()
        return epoch, rev, pack(state)

    @classmethod
    def unpacked(cls, epoch: int, rev: int, body: bytes) -> Self:
        """The index that was packed; raises `ValueError` when the bytes are damaged."""
        index = cls()
        index.epoch, index.rev, index._rows = epoch, rev, OwnerTable.of(unpack(body))
        return index

    def search(self, query: IndexQuery, corpus: Corpus | None = None) -> list[Hit]:
        """Find what has to do with a question.

        Args:
            query: What, and where.
            corpus: What is known of the owner when these are not all of its rows.

        Returns:
            Best first, ties by id: every record that shares a term with the question, stands beside or in a session
            with one that does, or, with a vector, has one. Nothing when the question says nothing.

        Raises:
            EmbeddingMismatchError: The question's vector has another size than the records' vectors.
            EmbeddingError: It is no vector.
        """
        terms = sought(query.text, _MAX_READ_TERMS)
        with self._lock:
            vector = self._query_vector(query)
            silent = not terms and (vector is None or not re.search(r"\w", query.text))
            if silent or query.limit <= 0 or not len(self._rows):
                return []
            visible = self._rows.column("live") & (self._rows.column("expires") > aware(query.now).timestamp())
            among = self._among(query, visible)
            if corpus is not None:
                among &= np.isin(self._rows.column("id"), list(corpus.candidates))
            legs, evidence = self._legs(query, terms, vector, visible, among, corpus)
            if not evidence.any():
                return []
            score = np.sum(list(legs.values()), axis=0, dtype=np.float32)
            best = np.where(evidence, score, np.float32(0))
            prior = np.float32(self._weights.session) * scoring.session_prior(best, self._rows.column("sitting"))
            legs["session"] = prior
            score += prior
            rows = np.flatnonzero(among & (evidence | (prior > 0)))
            return self._hits(
                scoring.best_first(score, self._rows.column("id"), rows, query.limit), score, legs, vector
            )

    def _query_vector(self, query: IndexQuery) -> Array | None:
        if query.vector is None:
            return None
        vector = unit(query.vector).astype(np.float32)
        if self._rows.dimensions and vector.size != self._rows.dimensions:
            raise embedding_mismatch(stored_dimensions=self._rows.dimensions, asked_dimensions=int(vector.size))
        return vector if self._rows.dimensions else None

    def _among(self, query: IndexQuery, visible: Array) -> Array:
        """Rows that pass the filters, shape (rows,)."""
        among: Array = visible.copy()
        for name, allowed in (("kind", query.kinds), ("block", query.blocks)):
            if allowed is not None:
                among &= self._rows.names[name].table(allowed)[self._rows.column(name)]
        if query.since is not None:
            among &= self._rows.column("said") >= aware(query.since).timestamp()
        if query.until is not None:
            among &= self._rows.column("said") < aware(query.until).timestamp()
        if query.sessions is not None:
            among &= self._rows.names["session"].table(query.sessions)[self._rows.column("session")]
        shown: dict[int, list[int]] = {}
        for sid, seq in query.exclude:
            shown.setdefault(sid, []).append(seq)
        for sid, seqs in shown.items():
            rows = np.flatnonzero(self._rows.column("sid") == sid)
            among[rows[np.isin(self._rows.column("seq")[rows], seqs)]] = False
        return among

    def _legs(
        self,
        query: IndexQuery,
        terms: Sequence[Sought],
        vector: Array | None,
        visible: Array,
        among: Array,
        corpus: Corpus | None,
    ) -> tuple[dict[str, Array], Array]:
        """What each leg gives each row, and which rows have evidence of their own, each of shape (rows,)."""
        weights, zero = self._weights, np.float32(0)
        legs = {"bm25": np.float32(weights.bm25) * scoring.of_max(self._bm25(terms, visible, corpus), among)}
        evidence = legs["bm25"] > 0
        if vector is not None:
            embedded = among & self._rows.column("embedded")
            evidence |= embedded
            moved = self._moved(vector, corpus)
            cosines = scoring.dots(self._rows.vectors[: self._rows.size], moved)
            lowest = math.inf if corpus is None else corpus.lowest
            legs["dense"] = np.float32(weights.dense) * scoring.min_max(cosines, embedded, lowest)
        spoken = self._named(query, visible, corpus)
        if spoken is not None:
            legs["speaker"] = np.where(spoken[self._rows.column("speaker")] & among, np.float32(weights.speaker), zero)
        dated = self._dated(query)
        if dated is not None:
            legs["date"] = np.where(dated & among, np.float32(weights.date), zero)
        legs["question"] = self._marked((QUESTION,), -weights.question)
        if kinds := wanted_by(query.text):
            legs["answer"] = self._marked(kinds, weights.answer)
        return legs, evidence

    def _marked(self, terms: Sequence[str], weight: float) -> Array:
        """The weight at rows that hold one of these terms, shape (rows,)."""
        leg = np.zeros(self._rows.size, np.float32)
        leg[self._rows.postings.find_any([term_number(term) for term in terms])[0]] = weight
        return leg

    def _moved(self, vector: Array, corpus: Corpus | None) -> Array:
        if corpus is None:
            return scoring.off_centre(vector, self._rows.sum, self._rows.embedded).astype(np.float32)
        if corpus.total is None:
            return vector
        return scoring.off_centre(vector, corpus.total, corpus.embedded).astype(np.float32)

    def _bm25(self, terms: Sequence[Sought], visible: Array, corpus: Corpus | None) -> Array:
        """BM25 over windows of messages, shape (rows,)."""
        found = []
        for term in terms:
            slots, counts = self._rows.postings.find_any(term.numbers)
            seen = visible[slots]
            if seen.any():
                slots = slots[seen]
                rows = slots.size if corpus is None else max(slots.size, corpus.found.get(term.numbers, 0))
                found.append((rows, term.weight, slots, counts[seen].astype(np.float32)))
        found.sort(key=lambda entry: entry[0])  # stable: equally rare terms in the order of the question
        size, total_rows = self._rows.size, int(np.count_nonzero(visible))
        if corpus is not None:
            total_rows = max(total_rows, corpus.rows)
        near, norm = self._rows.structure()
        total, window = np.zeros(size + 1, np.float32), np.zeros(size + 1, np.float32)
        for rows, share_of_word, slots, counts in found[:MAX_QUERY_TERMS]:
            weight = np.float32(share_of_word * scoring.idf(total_rows, rows))
            window[slots] += counts
            if slots.size * len(near) >= size:
                # Most places are touched: taking from neighbours takes half the time of handing to them.
                summed = window.copy()
                for beside in near:
                    summed[:size] += np.float32(beside.share) * window[beside.whose]  # -1 is the spare place: it is 0
                total += weight * scoring.saturate(summed, norm)
                window[slots] = 0
                continue
            reached = [slots]
            for beside in near:
                # No row is the same neighbour of two rows, so that plain addition counts each; -1 is the spare place.
                reached.append(beside.of[slots])
                window[reached[-1]] += np.float32(beside.share) * counts
            touched: Any = np.concatenate(reached)
            # A place that is touched twice is written twice with the same value.
            total[touched] = total[touched] + weight * scoring.saturate(window[touched], norm[touched])
            window[touched] = 0
        return total[:size]

    def _named(self, query: IndexQuery, visible: Array, corpus: Corpus | None) -> Array | None:
        """True at the numbers of the speakers whom the question names, if it names some and not all."""
        names = self._rows.names["speaker"]
        heard = np.bincount(self._rows.column("speaker")[visible], minlength=len(names.names)) > 0
        speakers = [name for name, is_heard in zip(names.names, heard.tolist(), strict=True) if is_heard and name]
        if corpus is not None:
            speakers = list(dict.fromkeys([*speakers, *corpus.speakers]))
        named = mentions(query.text, speakers)
        return names.table(named) if named and len(named) < len(speakers) else None

    def _dated(self, query: IndexQuery) -> Array | None:
        """Which rows were said at a time that the question names, shape (rows,)."""
        hints = read_dates(query.text, query.now)
        said = self._rows.column("said")
        known = said[~np.isnan(said)] if hints else said[:0]
        if not known.size:
            return None
        first, last = (datetime.fromtimestamp(t, aware(query.now).tzinfo).year for t in (known.min(), known.max()))
        dated = np.zeros(self._rows.size, bool)
        for hint in hints:
            for since, until in hint.spans(max(first, last - _MAX_YEARS), last):
                dated |= (said >= since.timestamp()) & (said < until.timestamp())
        return dated

    def _hits(self, rows: Array, score: Array, legs: dict[str, Array], vector: Array | None) -> list[Hit]:
        columns = [self._rows.column(n)[rows].tolist() for n in ("id", "sid", "seq", "tokens", "said", "speaker")]
        cosines: list[float | None] = [None] * rows.size
        if vector is not None:
            has = self._rows.column("embedded")[rows].tolist()
            raw = scoring.dots(self._rows.vectors[rows], vector).tolist()
            cosines = [cosine if there else None for cosine, there in zip(raw, has, strict=True)]
        parts = [(name, values[rows].tolist()) for name, values in legs.items()]
        names = self._rows.names["speaker"].names
        return [
            Hit(
                id_,
                total,
                {name: values[i] for name, values in parts if values[i]},
                (sid, seq) if sid >= 0 and seq >= 0 else None,
                tokens,
                said if said == said else None,  # noqa: PLR0124 # NaN is the absent time
                names[speaker],
                cosines[i],
            )
            for i, (id_, sid, seq, tokens, said, speaker, total) in enumerate(
                zip(*columns, score[rows].tolist(), strict=True)
            )
        ]
