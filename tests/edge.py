"""The engine of the Qdrant server in this process, behind the calls that our index makes: a stricter twin of local mode.

Ties among sparse vectors come in another order than in local mode. Points are changed by id only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import qdrant_edge as edge
from qdrant_client import models


class EdgeClient:
    """What `QdrantIndex` calls of an `AsyncQdrantClient`, on one shard per collection.

    Args:
        directory: For the shards.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shards: dict[str, Any] = {}

    async def close(self) -> None:
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()

    async def collection_exists(self, name: str) -> bool:
        return name in self._shards

    async def create_collection(self, name: str, *, vectors_config: Any, sparse_vectors_config: Any) -> None:
        dense = {
            key: edge.EdgeVectorParams(size=params.size, distance=edge.Distance.Dot)
            for key, params in vectors_config.items()
        }
        sparse = {key: edge.EdgeSparseVectorParams() for key in sparse_vectors_config}
        path = self._directory / name
        path.mkdir(parents=True)
        self._shards[name] = edge.EdgeShard.create(str(path), edge.EdgeConfig(vectors=dense, sparse_vectors=sparse))

    async def create_payload_index(self, name: str, field: str, schema: Any, *, wait: bool) -> None:
        assert wait
        kind = "keyword" if isinstance(schema, models.KeywordIndexParams) else schema.value
        known = getattr(edge.PayloadSchemaType, kind.capitalize())
        self._shards[name].update(edge.UpdateOperation.create_field_index(field, known))

    async def upsert(self, name: str, points: Sequence[models.PointStruct], *, wait: bool) -> None:
        assert wait
        made = [edge.Point(point.id, _vectors(point.vector), point.payload) for point in points]
        self._shards[name].update(edge.UpdateOperation.upsert_points(made))

    async def delete(self, name: str, selector: models.PointIdsList, *, wait: bool) -> None:
        assert wait
        self._shards[name].update(edge.UpdateOperation.delete_points(list(selector.points)))

    async def scroll(
        self, name: str, among: models.Filter, *, limit: int, offset: Any, with_payload: bool
    ) -> tuple[list[Any], Any]:
        asked = edge.ScrollRequest(offset=offset, limit=limit, filter=_filter(among), with_payload=with_payload)
        points, following = self._shards[name].scroll(asked)
        return list(points), following

    async def count(self, name: str, among: models.Filter, *, exact: bool) -> Any:
        found = self._shards[name].count(edge.CountRequest(exact=exact, filter=_filter(among)))
        return SimpleNamespace(count=found)

    async def facet(self, name: str, key: str, *, facet_filter: models.Filter, limit: int, exact: bool) -> Any:
        asked = edge.FacetRequest(key=key, limit=limit, exact=exact, filter=_filter(facet_filter))
        return self._shards[name].facet(asked)

    async def query_batch_points(self, name: str, requests: Sequence[models.QueryRequest]) -> list[Any]:
        shard = self._shards[name]
        return [SimpleNamespace(points=shard.query(_request(request))) for request in requests]


def _vectors(given: Any) -> dict[str, Any]:
    return {name: _vector(vector) for name, vector in given.items()}


def _vector(given: Any) -> Any:
    if isinstance(given, models.SparseVector):
        return edge.SparseVector(given.indices, given.values)
    return given


def _request(given: models.QueryRequest) -> Any:
    return edge.QueryRequest(
        limit=given.limit,
        query=edge.Query.Nearest(_vector(given.query), using=given.using),
        filter=_filter(given.filter),
        with_payload=True,
    )


def _filter(given: Any) -> Any:
    parts = {
        name: [_condition(one) for one in part]
        for name in ("must", "should", "must_not")
        if (part := getattr(given, name))
    }
    return edge.Filter(**parts)


def _condition(given: Any) -> Any:
    if isinstance(given, models.Filter):
        return _filter(given)
    match, span = given.match, given.range
    if isinstance(match, models.MatchValue):
        match = edge.MatchValue(match.value)
    elif isinstance(match, models.MatchAny):
        match = edge.MatchAny(match.any)
    if span is not None:
        span = edge.RangeFloat(gte=span.gte, gt=span.gt, lte=span.lte, lt=span.lt)
    return edge.FieldCondition(given.key, match=match, range=span)
