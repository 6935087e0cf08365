"""One owner's rows as columns: kept up to date row by row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Self

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.storage.index.postings import Postings, put
from llama_index_memory_tiers.storage.index.rows import Array, IndexColumns

_GARBAGE_FLOOR = 1_024
_FEW_GROUPS = 4  # so many are looked up one by one, 0.05 ms each in 100 000 rows
_MANY = 2**16
_CHUNK = 1_024  # rows whose half-precision vectors stay in the processor's cache while they are widened


def _total(vectors: Array) -> Array:
    """Sum of rows; summed in single precision, which is five times faster, and kept in double."""
    total: Array = vectors.sum(axis=0, dtype=np.float32).astype(np.float64)
    return total


@dataclass(slots=True)
class Numbers:
    """Small numbers for names that repeat."""

    names: list[Any] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def of(self, values: Sequence[Any]) -> Array:
        """The number of each name, shape (values,)."""
        known = self.known
        for name in set(values):
            if name not in known:
                known[name] = len(self.names)
                self.names.append(name)
        return np.fromiter(map(known.__getitem__, values), np.int64, len(values))

    def table(self, allowed: Iterable[Any]) -> Array:
        """True at the numbers of what is allowed, shape (names + 1,); the last, which -1 reads, is false."""
        chosen = set(allowed)
        return np.array([*(name in chosen for name in self.names), False], dtype=bool)


COLUMNS: Mapping[str, Any] = {
    "id": np.int64, "kind": np.int32, "block": np.int32, "speaker": np.int32, "session": np.int32,
    "group": np.int64, "sid": np.int64, "seq": np.int64, "said": np.float64, "expires": np.float64,
    "sitting": np.int32, "tokens": np.int64, "length": np.float32, "live": np.bool_, "embedded": np.bool_,
}  # fmt: skip


_KEPT_COLUMNS = tuple(name for name in COLUMNS if name not in {"live", "sitting"})  # the others are made from these


class TableState(NamedTuple):
    """A table as plain arrays.

    Args:
        names: Names that repeat, by column, in the order of their numbers.
        arrays: Columns of shape (rows,), and terms, slots and counts of shape (entries,).
        vectors: Half-precision embeddings of the rows that have one, shape (embedded rows, dimensions).
    """

    names: Mapping[str, list[Any]]
    arrays: Mapping[str, Array]
    vectors: Array


class Neighbours(NamedTuple):
    """One kind of neighbour of all rows.

    Args:
        share: Of a row's counts that its neighbour takes.
        of: Which row that is, -1 for none, shape (rows,).
        whose: Which row it is the neighbour of, -1 for none, shape (rows,).
    """

    share: float
    of: Array
    whose: Array


class OwnerTable:
    """Columns, vectors, postings and neighbours of one owner's records; whoever holds it takes care of locking.

    Args:
        dimensions: Size of the embeddings; `None` takes it from the first one.
    """

    def __init__(self, dimensions: int | None = None) -> None:
        self.dimensions = dimensions
        self.refused_vectors = 0
        self._revs: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self.names = {name: Numbers() for name in ("kind", "block", "speaker", "session")}
        self.size = 0
        self._columns: dict[str, Array] = {name: np.empty(0, kind) for name, kind in COLUMNS.items()}
        self.vectors: Array = np.empty((0, self.dimensions or 0), np.float32)
        self.postings = Postings()
        self._before: Array = np.empty(0, np.int64)
        self._after: Array = np.empty(0, np.int64)
        self._near: tuple[list[Neighbours], Array] | None = None
        self.sum: Array = np.zeros(self.dimensions or 0, np.float64)
        self.embedded = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, near enough for a cache."""
        arrays = (*self._columns.values(), self.vectors, self._before, self._after)
        # The structure that a search leaves behind: two columns of neighbours' neighbours and one of lengths.
        norm = 0 if self._near is None else 20 * self.size
        # A dict entry with its two numbers takes about 100 bytes.
        python = 100 * (len(self._revs) + len(self._slots))
        return sum(a.nbytes for a in arrays) + norm + self.postings.nbytes + python

    def column(self, name: str) -> Array:
        """One column, shape (rows,)."""
        return self._columns[name][: self.size]

    def update(self, columns: IndexColumns) -> None:
        """Take in new, changed and removed records; repeating it, or another order, changes nothing.

        Args:
            columns: States of records; of several states of one record the one with the highest `rev` stays.
        """
        ids, revs, alive, slots = columns["id"], columns["rev"], columns["live"], self._slots
        newest = self._newest(ids, revs)
        self._revs.update((ids[i], revs[i]) for i in newest)
        gone = [slots.pop(ids[i]) for i in newest if ids[i] in slots] if slots else []
        live = [i for i in newest if alive[i]]
        if len(live) < len(ids):
            columns = {name: [values[i] for i in live] for name, values in columns.items()}
        touched = self._remove(gone) | (self._append(columns) if live else set())
        if self.size - len(slots) > max(_GARBAGE_FLOOR, len(slots)):
            self._compact()
        elif newest:
            self._link(touched)

    def _newest(self, ids: Sequence[int], revs: Sequence[int]) -> Sequence[int]:
        """Where the states are that were not known yet."""
        places: Sequence[int] = range(len(ids))
        if len(set(ids)) < len(ids):
            places = list({ids[i]: i for i in sorted(places, key=revs.__getitem__)}.values())
        known = self._revs
        return [i for i in places if known.get(ids[i], -1) < revs[i]] if known else places

    def _remove(self, slots: list[int]) -> set[int]:
        if not slots:
            return set()
        self.column("live")[slots] = False
        if self.dimensions:
            self.sum -= _total(self.vectors[slots])
        self.embedded -= int(np.count_nonzero(self.column("embedded")[slots]))
        return set(self.column("group")[slots].tolist())

    def _append(self, read: IndexColumns) -> set[int]:
        at, count = self.size, len(read["id"])
        terms, counts = np.frombuffer(b"".join(read["terms"]), "<u4"), np.frombuffer(b"".join(read["counts"]), "<u2")
        owner = np.repeat(np.arange(count, dtype=np.int32), np.fromiter(map(len, read["terms"]), np.int64) // 4)
        fresh = self._read_columns(read)
        fresh["length"] = np.bincount(owner, counts, count)
        vectors, fresh["embedded"] = self._read_vectors(read["vector"])
        for name, kind in COLUMNS.items():
            self._columns[name] = put(self._columns[name], at, np.array(fresh[name], kind))
        if self.dimensions:
            self.sum += _total(vectors)
            self.embedded += int(np.count_nonzero(fresh["embedded"]))
            self.vectors = put(self.vectors, at, vectors)
        self.postings.add(terms, owner + np.int32(at), counts)
        self.size = at + count
        self._slots.update(zip(read["id"], range(at, self.size), strict=True))
        return set(np.unique(fresh["group"]).tolist())

    def _read_columns(self, read: IndexColumns) -> dict[str, Any]:
        fresh = {name: self.names[name].of(read[name]) for name in ("kind", "block", "speaker")}
        sid, seq, said, expires = (np.array(read[n], np.float64) for n in ("sid", "seq", "said_at", "expires_at"))
        homeless = np.isnan(sid) | np.isnan(seq)
        session = np.where(np.isnan(sid), -1, self.names["session"].of(read["sid"]))
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

    def _read_vectors(self, stored: Sequence[bytes | None]) -> tuple[Array, Array]:
        if not self.dimensions:
            first = next(filter(None, stored), b"")
            if not first:
                return np.empty((len(stored), 0), np.float32), np.zeros(len(stored), bool)
            self.dimensions = len(first) // 2
            self.vectors = np.zeros((len(self._columns["id"]), self.dimensions), np.float32)
            self.sum = np.zeros(self.dimensions, np.float64)
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
        group = self.column("group")
        if len(touched) > _FEW_GROUPS:
            slots = np.flatnonzero(group >= 0)
        elif touched:
            slots = np.concatenate([np.flatnonzero(group == number) for number in touched])
        else:
            return
        self._before[slots] = self._after[slots] = -1
        slots = slots[self.column("live")[slots]]
        slots = slots[np.lexsort((self.column("id")[slots], self.column("seq")[slots], group[slots]))]
        same = np.flatnonzero(group[slots[1:]] == group[slots[:-1]])
        self._after[slots[same]] = slots[same + 1]
        self._before[slots[same + 1]] = slots[same]
        if slots.size:
            self.column("sitting")[slots] = self._sittings(slots, group)

    def _sittings(self, slots: Array, group: Array) -> Array:
        """Number each message's sitting by the place of its first one; slots in the order of groups and messages."""
        said = self.column("said")[slots]
        silent = np.abs(np.diff(said)) > scoring.SITTING_GAP_SECONDS
        starts = np.flatnonzero(np.r_[True, silent | (group[slots[1:]] != group[slots[:-1]])])
        return slots[np.repeat(starts, np.diff(np.r_[starts, slots.size]))]

    def _compact(self) -> None:
        """Give up the places of removed rows."""
        kept = np.flatnonzero(self.column("live"))
        moved = np.full(self.size, -1, np.int32)
        moved[kept] = np.arange(kept.size)
        self._columns = {name: values[kept] for name, values in self._columns.items()}
        self.vectors = self.vectors[kept]
        self.sum = _total(self.vectors)
        self.postings.renumber(moved)
        self._before, self._after = np.empty(0, np.int64), np.empty(0, np.int64)
        self.size = kept.size
        self._slots = dict(zip(self._columns["id"].tolist(), range(kept.size), strict=True))
        self._link(set(self._columns["group"].tolist()))

    # ---- as a whole

    def state(self) -> TableState:
        """What makes an equal table: live rows only."""
        kept = np.flatnonzero(self.column("live"))
        moved = np.full(self.size + 1, -1, np.int32)
        moved[kept] = np.arange(kept.size, dtype=np.int32)
        columns = {name: self.column(name)[kept] for name in _KEPT_COLUMNS}
        revs = np.fromiter(map(self._revs.__getitem__, columns["id"].tolist()), np.int64, kept.size)
        terms, slots, counts = self.postings.entries(moved)
        embedded = kept[columns["embedded"]]
        return TableState(
            {name: list(numbers.names) for name, numbers in self.names.items()},
            {**columns, "rev": revs, "terms": terms, "slots": slots, "counts": counts},
            self.vectors[embedded].astype("<f2"),
        )

    @classmethod
    def of(cls, state: TableState) -> Self:
        """The table that gave this state."""
        arrays, count = state.arrays, len(state.arrays["id"])
        table = cls(state.vectors.shape[1] or None)
        for name, names in state.names.items():
            table.names[name] = Numbers(list(names), {known: number for number, known in enumerate(names)})
        made = {"live": np.ones(count, bool), "sitting": np.full(count, -1, np.int32)}
        table._columns = {name: made[name] if name in made else arrays[name] for name in COLUMNS}
        ids = arrays["id"].tolist()
        table._revs = dict(zip(ids, arrays["rev"].tolist(), strict=True))
        table._slots = dict(zip(ids, range(count), strict=True))
        table.postings = Postings.of((arrays["terms"], arrays["slots"], arrays["counts"]))
        table.size, table.embedded = count, len(state.vectors)
        if table.embedded == count:
            table.vectors = state.vectors.astype(np.float32)
        else:
            table.vectors = np.zeros((count, state.vectors.shape[1]), np.float32)
            table.vectors[arrays["embedded"]] = state.vectors
        table.sum = _total(table.vectors)
        table._link(set(np.unique(arrays["group"]).tolist()))
        return table

    def structure(self) -> tuple[list[Neighbours], Array]:
        """Neighbours of each kind, and the length part of BM25 with one place to spare."""
        if self._near is None:
            size = self.size
            lengths = np.append(np.where(self.column("live"), self.column("length"), 0), np.float32(0))
            before, after = (_twice(step[:size]) for step in (self._before, self._after))
            near, total, share = [], lengths[:size].copy(), np.ones(size, np.float32)
            # A search hands a row's counts to its neighbours: the one before it takes them as from its after.
            for reached, opposite, inward, outward in (
                (before, after, scoring.WINDOW_BEFORE, scoring.WINDOW_AFTER),
                (after, before, scoring.WINDOW_AFTER, scoring.WINDOW_BEFORE),
            ):
                for to, whose, taken, given in zip(reached, opposite, inward, outward, strict=True):
                    near.append(Neighbours(given, to, whose))
                    total += np.float32(taken) * lengths[to]
                    share += np.float32(taken) * (to >= 0)
            norm = scoring.length_norm(total, share).astype(np.float32)
            self._near = near, np.append(norm, np.float32(1))
        return self._near


def _twice(step: Array) -> tuple[Array, Array]:
    """The next row in a direction, and the one after that; -1 for none."""
    return step, np.where(step >= 0, step[step], -1)
