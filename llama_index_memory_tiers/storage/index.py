"""One owner's records in memory: exact BM25 and dense search, kept up to date row by row."""

from __future__ import annotations

import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.errors import EmbeddingError
from llama_index_memory_tiers.records import Place, aware
from llama_index_memory_tiers.text import QUESTION, analyse, mentions, read_dates

_Array = NDArray[Any]
_Entries = tuple[_Array, _Array, _Array]  # terms, rows, counts: entry by entry

MAX_QUERY_TERMS = 64
"""Of a very long question the rarest terms are searched for, so that it costs no more than a long one."""
_MAX_READ_TERMS = 512
_DELTA_FLOOR = 16_384
"""Postings wait unsorted up to this many and an eighth of the sorted ones: 0.02 ms a term to look through."""
_GARBAGE_FLOOR = 1_024
_MAX_YEARS = 100
_FEW_GROUPS = 4  # so many are looked up one by one, 0.05 ms each in 100 000 rows
_MANY = 2**16
_CHUNK = 1_024  # rows whose half-precision vectors stay in the processor's cache while they are widened


class IndexRow(NamedTuple):
    """One record as read from SQL; a tuple, as an owner may have 100 000 of them.

    Args:
        id: Row id; ties are decided by it.
        rev: The owner's revision that wrote this state; a lower one than seen before is ignored.
        kind: Kind of record.
        block: Key of the block that wrote it.
        live: False removes the record.
        said_at: When it was said, epoch seconds.
        expires_at: From when on it is invisible, epoch seconds.
        sid: Session row of the message, or `None`.
        seq: Position in that session, or `None`.
        speaker: Who said it, or "".
        tokens: Size when shown.
        vector: See `encode_vector`, or `None`.
        terms: See `encode_terms`.
        counts: See `encode_terms`.
    """

    id: int
    rev: int
    kind: str
    block: str
    live: bool
    said_at: float | None
    expires_at: float | None
    sid: int | None
    seq: int | None
    speaker: str
    tokens: int
    vector: bytes | None
    terms: bytes
    counts: bytes


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
class Hit:
    """A record that has to do with the question.

    Args:
        id: Row id.
        score: Sum of its legs.
        legs: What each leg gave: `bm25`, `dense`, `speaker`, `date`, `question` (negative), `session`; zeros left out.
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


def encode_terms(terms: Mapping[str, int]) -> tuple[bytes, bytes]:
    """Make terms storable.

    Args:
        terms: Term → times it occurs.

    Returns:
        CRC-32 of each term, ascending, as little-endian uint32, and its counts as uint16. Among 50 000 terms of one
        owner 0.3 pairs share a number.
    """
    counts: dict[int, int] = {}
    for term, count in terms.items():
        if count > 0:
            number = _hash(term)
            counts[number] = counts.get(number, 0) + count
    order = sorted(counts)
    amounts = [min(counts[number], 0xFFFF) for number in order]
    return np.array(order, "<u4").tobytes(), np.array(amounts, "<u2").tobytes()


def _hash(term: str) -> int:
    return zlib.crc32(term.encode("utf-8", "surrogatepass"))


def _unit(vector: Sequence[float] | _Array) -> _Array:
    values = np.asarray(vector, dtype=np.float64)
    length = np.abs(values).max(initial=0) if values.ndim == 1 else 0
    if not np.isfinite(length) or length == 0:
        raise EmbeddingError(
            f"An embedding of shape {values.shape} with largest component {length} was given.",
            allowed="An embedding is one row of finite numbers that are not all zero.",
            remedy="Check the embedding model; texts it cannot embed may be stored without a vector.",
        )
    values = values / length  # first, so that squares neither overflow nor vanish
    unit: _Array = values / np.linalg.norm(values)
    return unit


def encode_vector(vector: Sequence[float]) -> bytes:
    """Make an embedding storable.

    Args:
        vector: Shape (dimensions,).

    Returns:
        Its direction, unit length, as little-endian float16.

    Raises:
        EmbeddingError: It is empty, zero, or not finite.
    """
    return _unit(vector).astype("<f2").tobytes()


class _Postings:
    """Which rows hold a term: sorted arrays, and a short unsorted tail of what came since."""

    def __init__(self) -> None:
        self._sorted: _Entries = (np.empty(0, np.uint32), np.empty(0, np.int32), np.empty(0, np.uint16))
        self._tail = self._sorted
        self._waiting = 0

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self._sorted, *self._tail))

    def add(self, terms: _Array, slots: _Array, counts: _Array) -> None:
        at = self._waiting
        if at + terms.size > _DELTA_FLOOR + self._sorted[0].size // 8:
            self._merge(terms, slots, counts)
            return
        tail = self._tail
        self._tail = (_put(tail[0], at, terms), _put(tail[1], at, slots), _put(tail[2], at, counts))
        self._waiting += terms.size

    def _merge(self, *new: _Array) -> None:
        parts = [(self._sorted[i], self._tail[i][: self._waiting], new[i]) for i in range(3)]
        terms, slots, counts = (np.concatenate(part) for part in parts)
        # Sorting (term, position) as one number is five times faster than argsort: 40 ms for 2.5 million.
        key = (terms.astype(np.uint64) << np.uint64(32)) | np.arange(terms.size, dtype=np.uint64)
        key.sort()
        order = (key & np.uint64(0xFFFFFFFF)).astype(np.int64)
        self._sorted = ((key >> np.uint64(32)).astype(np.uint32), slots[order], counts[order])
        self._tail = (self._tail[0][:0], self._tail[1][:0], self._tail[2][:0])
        self._waiting = 0

    def renumber(self, moved: _Array) -> None:
        """Follow rows to new places; -1 drops them."""
        self._merge(*(a[:0] for a in self._tail))
        terms, slots, counts = self._sorted
        kept = moved[slots] >= 0
        self._sorted = (terms[kept], moved[slots[kept]], counts[kept])

    def find(self, term: int) -> tuple[_Array, _Array]:
        terms, slots, counts = self._sorted
        number = np.uint32(term)
        lo, hi = np.searchsorted(terms, number), np.searchsorted(terms, number, "right")
        late = np.flatnonzero(self._tail[0][: self._waiting] == number)
        if not late.size:
            return slots[lo:hi], counts[lo:hi]
        return (
            np.concatenate((slots[lo:hi], self._tail[1][late])),
            np.concatenate((counts[lo:hi], self._tail[2][late])),
        )


def _total(vectors: _Array) -> _Array:
    """Sum of rows; summed in single precision, which is five times faster, and kept in double."""
    total: _Array = vectors.sum(axis=0, dtype=np.float32).astype(np.float64)
    return total


def _dots(vectors: _Array, vector: _Array) -> _Array:
    """Dot product of each row, on one thread.

    `@` lets BLAS start a thread for a job of 0.2 ms and waits 8 ms for it when all processors are busy; row by row
    takes 0.3 ms for 10 000 rows of 256 and 5.5 ms for 100 000 of 384, where `@` took 7.7 at best.
    """
    if hasattr(np, "vecdot"):
        dots: _Array = np.vecdot(vectors, vector)
    else:  # numpy 1.26
        dots = np.einsum("ij,j->i", vectors, vector)
    return dots


def _put(array: _Array, at: int, values: _Array) -> _Array:
    """Write at a position, growing by half when there is no room: amortised constant cost."""
    end = at + len(values)
    if not len(array) and values.flags.writeable:
        return values  # the first load is not copied
    if end > len(array):
        grown = np.zeros((max(end, len(array) * 3 // 2) if at else end, *values.shape[1:]), array.dtype)
        grown[:at] = array[:at]
        array = grown
    array[at:end] = values
    return array


@dataclass(slots=True)
class _Numbers:
    """Small numbers for names that repeat."""

    names: list[Any] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def of(self, values: Sequence[Any]) -> _Array:
        """The number of each name, shape (values,)."""
        known = self.known
        for name in set(values):
            if name not in known:
                known[name] = len(self.names)
                self.names.append(name)
        return np.fromiter(map(known.__getitem__, values), np.int64, len(values))

    def table(self, allowed: Iterable[Any]) -> _Array:
        """True at the numbers of what is allowed, shape (names + 1,); the last, which -1 reads, is false."""
        chosen = set(allowed)
        return np.array([*(name in chosen for name in self.names), False], dtype=bool)


_FIELDS = (
    "id", "kind", "block", "said_at", "expires_at", "sid", "seq", "speaker", "tokens", "vector", "terms", "counts",
)  # fmt: skip
_COLUMNS: Mapping[str, Any] = {
    "id": np.int64, "kind": np.int32, "block": np.int32, "speaker": np.int32, "session": np.int32,
    "group": np.int64, "sid": np.int64, "seq": np.int64, "said": np.float64, "expires": np.float64,
    "sitting": np.int32, "tokens": np.int64, "length": np.float32, "live": np.bool_, "embedded": np.bool_,
}  # fmt: skip


class OwnerIndex:
    """The searchable memory of one owner.

    Args:
        dimensions: Size of the embeddings; `None` takes it from the first one. Rows with another size are found by
            BM25 only and counted in `refused_vectors`.
        weights: What each leg adds to a score.
    """

    def __init__(self, *, dimensions: int | None = None, weights: scoring.Weights | None = None) -> None:
        self.rev = 0
        self.epoch = 0
        self.dimensions = dimensions
        self.refused_vectors = 0
        self._weights = weights or scoring.Weights()
        self._lock = threading.Lock()
        self._revs: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._names = {name: _Numbers() for name in ("kind", "block", "speaker", "session")}
        self._size = 0
        self._columns: dict[str, _Array] = {name: np.empty(0, kind) for name, kind in _COLUMNS.items()}
        self._vectors: _Array = np.empty((0, self.dimensions or 0), np.float32)
        self._postings = _Postings()
        self._before: _Array = np.empty(0, np.int64)
        self._after: _Array = np.empty(0, np.int64)
        self._near: tuple[list[tuple[float, _Array]], _Array] | None = None
        self._sum: _Array = np.zeros(self.dimensions or 0, np.float64)
        self._embedded = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, near enough for a cache."""
        arrays = (*self._columns.values(), self._vectors, self._before, self._after)
        # The structure that a search leaves behind: four columns of neighbours and one of lengths.
        norm = 0 if self._near is None else 36 * self._size
        # A dict entry with its two numbers takes about 100 bytes.
        python = 100 * (len(self._revs) + len(self._slots))
        return sum(a.nbytes for a in arrays) + norm + self._postings.nbytes + python

    def _column(self, name: str) -> _Array:
        return self._columns[name][: self._size]

    # ---- keeping up to date

    def update(self, rows: Iterable[IndexRow]) -> None:
        """Take in new, changed and removed records; repeating it, or another order, changes nothing.

        Args:
            rows: States of records; of several states of one record the one with the highest `rev` stays.
        """
        newest = list(rows)
        if len({row.id for row in newest}) < len(newest):
            newest = list({row.id: row for row in sorted(newest, key=attrgetter("rev"))}.values())
        with self._lock:
            revs = self._revs
            if revs:
                newest = [row for row in newest if revs.get(row.id, -1) < row.rev]
            revs.update(map(attrgetter("id", "rev"), newest))
            slots = self._slots
            gone = [slots.pop(row.id) for row in newest if row.id in slots] if slots else []
            live = [row for row in newest if row.live]
            touched = self._remove(gone) | self._append(live)
            if self._size - len(self._slots) > max(_GARBAGE_FLOOR, len(self._slots)):
                self._compact()
            elif newest:
                self._link(touched)

    def _remove(self, slots: list[int]) -> set[int]:
        if not slots:
            return set()
        self._column("live")[slots] = False
        if self.dimensions:
            self._sum -= _total(self._vectors[slots])
        self._embedded -= int(np.count_nonzero(self._column("embedded")[slots]))
        return set(self._column("group")[slots].tolist())

    def _append(self, rows: list[IndexRow]) -> set[int]:
        if not rows:
            return set()
        at, count = self._size, len(rows)
        # Attribute by attribute: one tuple per row would take 300 ms for 100 000 rows, most of it garbage collection.
        read = {name: list(map(attrgetter(name), rows)) for name in _FIELDS}
        terms, counts = np.frombuffer(b"".join(read["terms"]), "<u4"), np.frombuffer(b"".join(read["counts"]), "<u2")
        owner = np.repeat(np.arange(count, dtype=np.int32), np.fromiter(map(len, read["terms"]), np.int64) // 4)
        fresh = self._read_columns(read)
        fresh["length"] = np.bincount(owner, counts, count)
        vectors, fresh["embedded"] = self._read_vectors(read["vector"])
        for name, kind in _COLUMNS.items():
            self._columns[name] = _put(self._columns[name], at, np.array(fresh[name], kind))
        if self.dimensions:
            self._sum += _total(vectors)
            self._embedded += int(np.count_nonzero(fresh["embedded"]))
            self._vectors = _put(self._vectors, at, vectors)
        self._postings.add(terms, owner + np.int32(at), counts)
        self._size = at + count
        self._slots.update(zip(read["id"], range(at, self._size), strict=True))
        return set(np.unique(fresh["group"]).tolist())

    def _read_columns(self, read: Mapping[str, Any]) -> dict[str, Any]:
        fresh = {name: self._names[name].of(read[name]) for name in ("kind", "block", "speaker")}
        sid, seq, said, expires = (np.array(read[n], np.float64) for n in ("sid", "seq", "said_at", "expires_at"))
        homeless = np.isnan(sid) | np.isnan(seq)
        session = np.where(np.isnan(sid), -1, self._names["session"].of(read["sid"]))
        # Neighbours are messages of the same session, kind and block; of the latter two there are few.
        group = (session * _MANY + fresh["kind"]) * _MANY + fresh["block"]
        return fresh | {
            "id": read["id"],
            "session": session,
            "group": np.where(homeless, -1, group),
            "sitting": np.full(len(homeless), -1),
            "sid": np.nan_to_num(sid, nan=-1),
            "seq": np.nan_to_num(seq, nan=-1),
            "said": said,
            "expires": np.nan_to_num(expires, nan=np.inf, posinf=np.inf),
            "tokens": read["tokens"],
            "live": np.ones(len(homeless), bool),
        }

    def _read_vectors(self, stored: Sequence[bytes | None]) -> tuple[_Array, _Array]:
        if not self.dimensions:
            first = next(filter(None, stored), b"")
            if not first:
                return np.empty((len(stored), 0), np.float32), np.zeros(len(stored), bool)
            self.dimensions = len(first) // 2
            self._vectors = np.zeros((len(self._columns["id"]), self.dimensions), np.float32)
            self._sum = np.zeros(self.dimensions, np.float64)
        size, count = 2 * self.dimensions, len(stored)
        sizes = np.fromiter(map(len, [vector or b"" for vector in stored]), np.int64, count)
        fits = sizes == size
        if not fits.all():
            self.refused_vectors += int(np.count_nonzero(sizes)) - int(np.count_nonzero(fits))
            stored = [vector if fit else bytes(size) for vector, fit in zip(stored, fits.tolist(), strict=True)]
        vectors = np.empty((count, self.dimensions), np.float32)
        for start in range(0, count, _CHUNK):
            part = b"".join(filter(None, stored[start : start + _CHUNK]))
            vectors[start : start + _CHUNK] = np.frombuffer(part, "<f2").reshape(-1, self.dimensions)
        return vectors, fits

    def _link(self, touched: set[int]) -> None:
        """Find the neighbours and the sittings of the messages in the groups that changed."""
        self._near = None
        missing = len(self._columns["id"]) - len(self._before)
        if missing > 0:
            grown = np.full(missing, -1, np.int64)
            self._before, self._after = np.append(self._before, grown), np.append(self._after, grown)
        touched.discard(-1)
        group = self._column("group")
        if len(touched) > _FEW_GROUPS:
            slots = np.flatnonzero(group >= 0)
        elif touched:
            slots = np.concatenate([np.flatnonzero(group == number) for number in touched])
        else:
            return
        self._before[slots] = self._after[slots] = -1
        slots = slots[self._column("live")[slots]]
        slots = slots[np.lexsort((self._column("id")[slots], self._column("seq")[slots], group[slots]))]
        same = np.flatnonzero(group[slots[1:]] == group[slots[:-1]])
        self._after[slots[same]] = slots[same + 1]
        self._before[slots[same + 1]] = slots[same]
        if slots.size:
            self._column("sitting")[slots] = self._sittings(slots, group)

    def _sittings(self, slots: _Array, group: _Array) -> _Array:
        """Number each message's sitting by the place of its first one; slots in the order of groups and messages."""
        said = self._column("said")[slots]
        silent = np.abs(np.diff(said)) > scoring.SITTING_GAP_SECONDS
        starts = np.flatnonzero(np.r_[True, silent | (group[slots[1:]] != group[slots[:-1]])])
        return slots[np.repeat(starts, np.diff(np.r_[starts, slots.size]))]

    def _compact(self) -> None:
        """Give up the places of removed rows."""
        kept = np.flatnonzero(self._column("live"))
        moved = np.full(self._size, -1, np.int32)
        moved[kept] = np.arange(kept.size)
        self._columns = {name: values[kept] for name, values in self._columns.items()}
        self._vectors = self._vectors[kept]
        self._sum = _total(self._vectors)
        self._postings.renumber(moved)
        self._before, self._after = np.empty(0, np.int64), np.empty(0, np.int64)
        self._size = kept.size
        self._slots = dict(zip(self._columns["id"].tolist(), range(kept.size), strict=True))
        self._link(set(self._columns["group"].tolist()))

    def _structure(self) -> tuple[list[tuple[float, _Array]], _Array]:
        """Neighbours, each with the share it takes of a row's counts, and the length part of BM25."""
        if self._near is None:
            size = self._size
            lengths = np.append(np.where(self._column("live"), self._column("length"), 0), np.float32(0))
            near, total, share = [], lengths[:size].copy(), np.ones(size, np.float32)
            before, after = self._before[:size], self._after[:size]
            # A search hands a row's counts to its neighbours: the one before it takes them as from its after.
            for step, inward, outward in (
                (before, scoring.WINDOW_BEFORE, scoring.WINDOW_AFTER),
                (after, scoring.WINDOW_AFTER, scoring.WINDOW_BEFORE),
            ):
                reached = step
                for taken, given in zip(inward, outward, strict=True):
                    near.append((given, reached))
                    total += np.float32(taken) * lengths[reached]
                    share += np.float32(taken) * (reached >= 0)
                    reached = np.where(reached >= 0, step[reached], -1)
            norm = scoring.length_norm(total, share).astype(np.float32)
            self._near = near, np.append(norm, np.float32(1))
        return self._near

    # ---- search

    def search(self, query: IndexQuery) -> list[Hit]:
        """Find what has to do with a question.

        Args:
            query: What, and where.

        Returns:
            Best first, ties by id: every record that shares a term with the question, stands beside or in a session
            with one that does, or, with a vector, has one. Nothing when the question says nothing.

        Raises:
            EmbeddingError: The question's vector has another size than the records' vectors, or is no vector.
        """
        terms = list(analyse(query.text))[:_MAX_READ_TERMS]
        with self._lock:
            vector = self._query_vector(query)
            silent = not terms and (vector is None or not re.search(r"\w", query.text))
            if silent or query.limit <= 0 or not self._slots:
                return []
            visible = self._column("live") & (self._column("expires") > aware(query.now).timestamp())
            among = self._among(query, visible)
            legs, evidence = self._legs(query, terms, vector, visible, among)
            if not evidence.any():
                return []
            score = np.sum(list(legs.values()), axis=0, dtype=np.float32)
            best = np.where(evidence, score, np.float32(0))
            prior = np.float32(self._weights.session) * scoring.session_prior(best, self._column("sitting"))
            legs["session"] = prior
            score += prior
            rows = np.flatnonzero(among & (evidence | (prior > 0)))
            return self._hits(scoring.best_first(score, self._column("id"), rows, query.limit), score, legs, vector)

    def _query_vector(self, query: IndexQuery) -> _Array | None:
        if query.vector is None:
            return None
        vector = _unit(query.vector).astype(np.float32)
        if self.dimensions and vector.size != self.dimensions:
            raise EmbeddingError(
                f"A question's embedding has {vector.size} dimensions, the stored ones have {self.dimensions}.",
                allowed="Question and records need the same embedding model.",
                remedy="Use the model that the records were stored with, or embed them again.",
            )
        return vector if self.dimensions else None

    def _among(self, query: IndexQuery, visible: _Array) -> _Array:
        """Rows that pass the filters, shape (rows,)."""
        among: _Array = visible.copy()
        for name, allowed in (("kind", query.kinds), ("block", query.blocks)):
            if allowed is not None:
                among &= self._names[name].table(allowed)[self._column(name)]
        if query.since is not None:
            among &= self._column("said") >= aware(query.since).timestamp()
        if query.until is not None:
            among &= self._column("said") < aware(query.until).timestamp()
        if query.sessions is not None:
            among &= self._names["session"].table(query.sessions)[self._column("session")]
        shown: dict[int, list[int]] = {}
        for sid, seq in query.exclude:
            shown.setdefault(sid, []).append(seq)
        for sid, seqs in shown.items():
            rows = np.flatnonzero(self._column("sid") == sid)
            among[rows[np.isin(self._column("seq")[rows], seqs)]] = False
        return among

    def _legs(
        self, query: IndexQuery, terms: list[str], vector: _Array | None, visible: _Array, among: _Array
    ) -> tuple[dict[str, _Array], _Array]:
        """What each leg gives each row, and which rows have evidence of their own, each of shape (rows,)."""
        weights, zero = self._weights, np.float32(0)
        legs = {"bm25": np.float32(weights.bm25) * scoring.of_max(self._bm25(terms, visible), among)}
        evidence = legs["bm25"] > 0
        if vector is not None:
            embedded = among & self._column("embedded")
            evidence |= embedded
            moved = scoring.off_centre(vector, self._sum, self._embedded).astype(np.float32)
            cosines = _dots(self._vectors[: self._size], moved)
            legs["dense"] = np.float32(weights.dense) * scoring.min_max(cosines, embedded)
        spoken = self._named(query, visible)
        if spoken is not None:
            legs["speaker"] = np.where(spoken[self._column("speaker")] & among, np.float32(weights.speaker), zero)
        dated = self._dated(query)
        if dated is not None:
            legs["date"] = np.where(dated & among, np.float32(weights.date), zero)
        legs["question"] = np.zeros(self._size, np.float32)
        legs["question"][self._postings.find(_hash(QUESTION))[0]] = -weights.question
        return legs, evidence

    def _bm25(self, terms: list[str], visible: _Array) -> _Array:
        """BM25 over windows of messages, shape (rows,)."""
        found = []
        for term in terms:
            slots, counts = self._postings.find(_hash(term))
            seen = visible[slots]
            if seen.any():
                found.append((slots[seen], counts[seen].astype(np.float32)))
        found.sort(key=lambda pair: pair[0].size)  # stable: equally rare terms in the order of the question
        size, total_rows = self._size, int(np.count_nonzero(visible))
        near, norm = self._structure()
        total, window = np.zeros(size + 1, np.float32), np.zeros(size + 1, np.float32)
        for slots, counts in found[:MAX_QUERY_TERMS]:
            weight = np.float32(scoring.idf(total_rows, slots.size))
            window[slots] += counts
            reached = [slots]
            for share, neighbour in near:
                # No row is the same neighbour of two rows, so that plain addition counts each; -1 is the spare place.
                reached.append(neighbour[slots])
                window[reached[-1]] += np.float32(share) * counts
            touched: Any = np.concatenate(reached) if slots.size * len(reached) < size else slice(None)
            # A place that is touched twice is written twice with the same value.
            total[touched] = total[touched] + weight * scoring.saturate(window[touched], norm[touched])
            window[touched] = 0
        return total[:size]

    def _named(self, query: IndexQuery, visible: _Array) -> _Array | None:
        """True at the numbers of the speakers whom the question names, if it names some and not all."""
        names = self._names["speaker"]
        heard = np.bincount(self._column("speaker")[visible], minlength=len(names.names)) > 0
        speakers = [name for name, is_heard in zip(names.names, heard.tolist(), strict=True) if is_heard and name]
        named = mentions(query.text, speakers)
        return names.table(named) if named and len(named) < len(speakers) else None

    def _dated(self, query: IndexQuery) -> _Array | None:
        """Which rows were said at a time that the question names, shape (rows,)."""
        hints = read_dates(query.text, query.now)
        said = self._column("said")
        known = said[~np.isnan(said)] if hints else said[:0]
        if not known.size:
            return None
        first, last = (datetime.fromtimestamp(t, aware(query.now).tzinfo).year for t in (known.min(), known.max()))
        dated = np.zeros(self._size, bool)
        for hint in hints:
            for since, until in hint.spans(max(first, last - _MAX_YEARS), last):
                dated |= (said >= since.timestamp()) & (said < until.timestamp())
        return dated

    def _hits(self, rows: _Array, score: _Array, legs: dict[str, _Array], vector: _Array | None) -> list[Hit]:
        columns = [self._column(n)[rows].tolist() for n in ("id", "sid", "seq", "tokens", "said", "speaker")]
        cosines: list[float | None] = [None] * rows.size
        if vector is not None:
            has = self._column("embedded")[rows].tolist()
            raw = _dots(self._vectors[rows], vector).tolist()
            cosines = [cosine if there else None for cosine, there in zip(raw, has, strict=True)]
        parts = [(name, values[rows].tolist()) for name, values in legs.items()]
        names = self._names["speaker"].names
        return [
            Hit(
                id=id_,
                score=total,
                legs={name: values[i] for name, values in parts if values[i]},
                place=(sid, seq) if sid >= 0 and seq >= 0 else None,
                tokens=tokens,
                said_at=said if said == said else None,  # noqa: PLR0124 # NaN is the absent time
                speaker=names[speaker],
                similarity=cosines[i],
            )
            for i, (id_, sid, seq, tokens, said, speaker, total) in enumerate(
                zip(*columns, score[rows].tolist(), strict=True)
            )
        ]


class IndexCache:
    """The owners used last, within a memory bound; safe to use from several threads.

    Args:
        max_bytes: Most memory that all indexes may hold together; a single larger one is kept while it is the newest.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, OwnerIndex] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> OwnerIndex | None:
        """Look up an index and make it the newest.

        Args:
            key: What it was put under.

        Returns:
            The index, or `None`.
        """
        with self._lock:
            index = self._held.get(key)
            if index is not None:
                self._held.move_to_end(key)
            return index

    def drop(self, key: Hashable) -> None:
        """Let an index go; nothing happens when it is not held."""
        with self._lock:
            if self._held.pop(key, None) is not None:
                self._total -= self._sizes.pop(key)

    def held(self) -> list[Hashable]:
        """Keys of what is held."""
        with self._lock:
            return list(self._held)

    def put(self, key: Hashable, index: OwnerIndex) -> None:
        """Keep an index as the newest, dropping old ones that no longer fit; put again whenever it has grown.

        Args:
            key: Owner, and whatever else tells two indexes apart.
            index: It replaces another one of that key.
        """
        size = index.nbytes
        with self._lock:
            self._held[key] = index
            self._held.move_to_end(key)
            self._total += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            while self._total > self.max_bytes and len(self._held) > 1:
                oldest, _ = self._held.popitem(last=False)
                self._total -= self._sizes.pop(oldest)
