"""Qdrant as an index: one collection per embedding model, tenants told apart by owner in every request."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from qdrant_client import AsyncQdrantClient, models

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.dates import read_dates
from llama_index_memory_tiers.moments import aware
from llama_index_memory_tiers.records import Place
from llama_index_memory_tiers.storage.index.rows import term_number
from llama_index_memory_tiers.storage.index.seam import Candidates, Point, Space, Wanted
from llama_index_memory_tiers.storage.index.search import IndexQuery
from llama_index_memory_tiers.text import mentions
from llama_index_memory_tiers.wanted import wanted_by

_DENSE, _WORDS = "dense", "words"
_NEVER = 1e15  # epoch seconds: JSON has no infinity
_PAGE_POINTS = 1000
_MOST_SPEAKERS = 1000
_MOST_RUNS = 64
_MOST_YEARS = 100
_INDEXES: Mapping[str, Any] = {
    "owner": models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True),
    "kind": models.PayloadSchemaType.KEYWORD,
    "block": models.PayloadSchemaType.KEYWORD,
    "speaker": models.PayloadSchemaType.KEYWORD,
    "sid": models.PayloadSchemaType.INTEGER,
    "seq": models.PayloadSchemaType.INTEGER,
    "terms": models.PayloadSchemaType.INTEGER,
    "said": models.PayloadSchemaType.FLOAT,
    "expires": models.PayloadSchemaType.FLOAT,
}


class QdrantIndex:
    """Points in a Qdrant server or cluster; the client is the user's, who closes it.

    BM25's weights are made here, with the owner's own document frequencies: they do not depend on other tenants.

    Args:
        client: Used from the event loop that it belongs to.
    """

    def __init__(self, client: AsyncQdrantClient) -> None:
        self._client = client
        self._prepared: set[str] = set()

    async def prepare(self, space: Space) -> None:
        """Make the collection with its payload indexes; two processes at once make one."""
        there = await self._client.collection_exists(space.name)
        if there and space.name in self._prepared:
            return
        if not there:
            dense = {_DENSE: models.VectorParams(size=space.dimensions, distance=models.Distance.DOT)}
            try:
                await self._client.create_collection(
                    space.name,
                    vectors_config=dense if space.dimensions else {},
                    sparse_vectors_config={_WORDS: models.SparseVectorParams()},
                )
            except Exception:
                if not await self._client.collection_exists(space.name):
                    raise
        for name, schema in _INDEXES.items():
            await self._client.create_payload_index(space.name, name, schema, wait=True)
        self._prepared.add(space.name)

    async def put(self, space: Space, points: Sequence[Point]) -> None:
        """See `VectorIndex.put`."""
        if points:
            await self._client.upsert(space.name, [_struct(point, space) for point in points], wait=True)

    async def drop(self, space: Space, ids: Sequence[str]) -> None:
        """See `VectorIndex.drop`."""
        if ids and await self._client.collection_exists(space.name):
            # Numbers are not ours, and go as well.
            named: list[Any] = [int(name) if name.isdecimal() else name for name in ids]
            await self._client.delete(space.name, models.PointIdsList(points=named), wait=True)

    async def held(self, space: Space, owner: str, after: str | None) -> tuple[list[str], str | None]:
        """See `VectorIndex.held`."""
        if not await self._client.collection_exists(space.name):
            return [], None
        points, following = await self._client.scroll(
            space.name,
            models.Filter(must=[_is("owner", owner)]),
            limit=_PAGE_POINTS,
            offset=after,
            with_payload=False,
        )
        return [str(point.id) for point in points], None if following is None else str(following)

    async def candidates(self, space: Space, owner: str, wanted: Wanted) -> Candidates:
        """Best by meaning and by words, also among whom and when the question names."""
        visible = [_is("owner", owner), _after("expires", aware(wanted.query.now).timestamp())]
        (rows, *counts), speakers = await asyncio.gather(
            self._counts(space, [visible, *([*visible, _any("terms", term.numbers)] for term in wanted.terms)]),
            self._speakers(space, visible),
        )
        found = {term.numbers: count for term, count in zip(wanted.terms, counts, strict=True) if count}
        requests = _requests(space, _filter(visible, wanted.query), wanted, rows, found, speakers)
        answers = await self._client.query_batch_points(space.name, requests) if requests else []
        lowest = None
        if wanted.vector is not None and space.dimensions and answers:
            worst = answers.pop().points
            lowest = -worst[0].score if worst else None
        records = {point.payload["record"] for answer in answers for point in answer.points if point.payload}
        return Candidates(frozenset(records), rows, found, speakers, lowest)

    async def _counts(self, space: Space, filters: Sequence[Sequence[models.Condition]]) -> list[int]:
        count = self._client.count
        asked = [count(space.name, models.Filter(must=list(must)), exact=True) for must in filters]
        return [counted.count for counted in await asyncio.gather(*asked)]

    async def _speakers(self, space: Space, must: Sequence[models.Condition]) -> tuple[str, ...]:
        found = await self._client.facet(
            space.name, "speaker", facet_filter=models.Filter(must=list(must)), limit=_MOST_SPEAKERS, exact=True
        )
        return tuple(str(hit.value) for hit in found.hits if hit.value)


def _struct(point: Point, space: Space) -> models.PointStruct:
    order = sorted(point.terms)
    counts = np.array([point.terms[term] for term in order], np.float32)
    weights = scoring.saturate(counts, scoring.length_norm(counts.sum(keepdims=True)))
    vector: dict[str, Any] = {}
    if order:
        vector[_WORDS] = models.SparseVector(indices=order, values=weights.tolist())
    if point.vector is not None and point.vector.size == space.dimensions:
        vector[_DENSE] = point.vector.tolist()
    payload = {
        "owner": point.owner,
        "record": point.record,
        "kind": point.kind,
        "block": point.block,
        "speaker": point.speaker,
        "said": point.said_at,
        "expires": _NEVER if point.expires_at is None else point.expires_at,
        "terms": order,
    }
    if point.sid is not None and point.seq is not None:
        payload |= {"sid": point.sid, "seq": point.seq}
    return models.PointStruct(id=point.id, vector=vector, payload=payload)


def _requests(
    space: Space,
    among: models.Filter,
    wanted: Wanted,
    rows: int,
    found: Mapping[tuple[int, ...], int],
    speakers: Sequence[str],
) -> list[models.QueryRequest]:
    """All legs under the same filter; the last one asks for the worst by meaning, as the best is scored against it."""
    legs: list[tuple[str, Any]] = []
    if wanted.vector is not None and space.dimensions:
        legs.append((_DENSE, wanted.vector.tolist()))
    if found:
        weights: defaultdict[int, float] = defaultdict(float)
        for term in wanted.terms:
            for number in term.numbers if term.numbers in found else ():
                weights[number] += term.weight * scoring.idf(rows, found[term.numbers])
        legs.append(
            (_WORDS, models.SparseVector(indices=sorted(weights), values=[weights[n] for n in sorted(weights)]))
        )
    requests = [
        _request(name, vector, part, wanted.limit)
        for part in (among, *_narrowed(among, wanted.query, speakers))
        for name, vector in legs
    ]
    if wanted.vector is not None and space.dimensions:
        requests.append(_request(_DENSE, (-wanted.vector).tolist(), among, 1))
    return requests


def _request(name: str, vector: Any, among: models.Filter, limit: int) -> models.QueryRequest:
    return models.QueryRequest(query=vector, using=name, filter=among, limit=limit, with_payload=["record"])


def _narrowed(among: models.Filter, query: IndexQuery, speakers: Sequence[str]) -> Iterable[models.Filter]:
    """The same filter for whom, for when and for what the question names, which count beside the other legs."""
    must = [*_conditions(among.must)]
    named = mentions(query.text, speakers)
    if named and len(named) < len(speakers):
        yield models.Filter(must=[*must, _any("speaker", named)], must_not=among.must_not)
    if kinds := wanted_by(query.text):
        yield models.Filter(must=[*must, _any("terms", map(term_number, kinds))], must_not=among.must_not)
    year = aware(query.now).year
    hints = read_dates(query.text, query.now)
    spans = [span for hint in hints for span in hint.spans(max(1, year - _MOST_YEARS), min(9998, year + 1))]
    if spans:
        dated = models.Filter(should=[_between("said", since.timestamp(), until.timestamp()) for since, until in spans])
        yield models.Filter(must=[*must, dated], must_not=among.must_not)


def _conditions(given: Any) -> list[models.Condition]:
    return list(given) if isinstance(given, list) else []


def _filter(visible: Sequence[models.Condition], query: IndexQuery) -> models.Filter:
    must: list[models.Condition] = list(visible)
    if query.kinds is not None:
        must.append(_any("kind", query.kinds))
    if query.blocks is not None:
        must.append(_any("block", query.blocks))
    if query.sessions is not None:
        must.append(_any("sid", query.sessions))
    if query.since is not None or query.until is not None:
        since = -math.inf if query.since is None else aware(query.since).timestamp()
        until = math.inf if query.until is None else aware(query.until).timestamp()
        must.append(_between("said", since, until))
    shown = [
        models.Filter(must=[_is("sid", sid), models.FieldCondition(key="seq", range=models.Range(gte=first, lte=last))])
        for sid, first, last in _runs(query.exclude)[:_MOST_RUNS]
    ]
    return models.Filter(must=must, must_not=[*shown] or None)


def _runs(places: Iterable[Place]) -> list[tuple[int, int, int]]:
    """Places as session, first and last position of what follows without a gap; the longest first."""
    runs: list[tuple[int, int, int]] = []
    for sid, seq in sorted(places):
        if runs and runs[-1][0] == sid and runs[-1][2] == seq - 1:
            runs[-1] = (sid, runs[-1][1], seq)
        else:
            runs.append((sid, seq, seq))
    return sorted(runs, key=lambda run: run[1] - run[2])


def _is(key: str, value: str | int) -> models.FieldCondition:
    return models.FieldCondition(key=key, match=models.MatchValue(value=value))


def _any(key: str, values: Iterable[Any]) -> models.FieldCondition:
    return models.FieldCondition(key=key, match=models.MatchAny(any=sorted(values)))


def _after(key: str, value: float) -> models.FieldCondition:
    return models.FieldCondition(key=key, range=models.Range(gt=value))


def _between(key: str, since: float, until: float) -> models.FieldCondition:
    low = None if math.isinf(since) else since
    high = None if math.isinf(until) else until
    return models.FieldCondition(key=key, range=models.Range(gte=low, lt=high))
