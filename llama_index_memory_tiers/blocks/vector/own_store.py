"""A LlamaIndex vector store of the user's own as the dense leg, beside the words in our storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.storage import Hit

_STORE_HITS = 100


def store_node(record_id: str, owner: str, block: str, vector: Sequence[float]) -> TextNode:
    """A record as the store keeps it: the text stays in our storage; a store that wants one gets the id."""
    node = TextNode(id_=record_id, text=record_id, metadata={"owner": owner, "block": block})
    node.embedding = list(vector)
    return node


async def search_store(
    store: BasePydanticVectorStore,
    text: str,
    vector: Sequence[float],
    *,
    owner: str,
    block: str,
    top_k: int | None,
    settings: Mapping[str, Any],
) -> dict[str, float]:
    """Ask a store for what is near.

    Args:
        store: Which.
        text: The question.
        vector: Its embedding, shape (dimensions,).
        owner: Whose nodes.
        block: Of which block.
        top_k: At most so many; default 100.
        settings: For the store's query; its `filters` are added to ours.

    Returns:
        Id of a record → similarity, as the store measures it.
    """
    mine: list[Any] = [MetadataFilter(key="owner", value=owner), MetadataFilter(key="block", value=block)]
    given = settings.get("filters")
    found = await store.aquery(
        VectorStoreQuery(
            query_str=text,
            query_embedding=list(vector),
            similarity_top_k=top_k or _STORE_HITS,
            filters=MetadataFilters(filters=[*mine, given] if given is not None else mine),
            **{name: value for name, value in settings.items() if name != "filters"},
        )
    )
    ids = found.ids or [node.node_id for node in found.nodes or []]
    # A store without scores keeps its order.
    scores = found.similarities or [1.0 / (rank + 1) for rank in range(len(ids))]
    return dict(zip(ids, scores, strict=False))


def fused(near: Sequence[Hit], worded: Sequence[Hit], limit: int) -> list[Hit]:
    """Hits of a store and hits by words as one list.

    Args:
        near: From the store, with its similarities as scores.
        worded: From our own search, by words alone.
        limit: At most so many.

    Returns:
        Best first. Similarities are brought to 0 to 1 and added to what words give, as the dense leg of our own
        search is.
    """
    scores = np.array([hit.score for hit in near], np.float64)
    shares = scoring.min_max(scores, np.ones(len(near), bool)) * scoring.Weights().dense
    found = {hit.id: hit for hit in worded}
    for hit, share in zip(near, shares.tolist(), strict=True):
        known = found.get(hit.id)
        legs = {**({} if known is None else known.legs), "store": hit.score}
        found[hit.id] = hit._replace(score=share + (0.0 if known is None else known.score), legs=legs)
    return sorted(found.values(), key=lambda hit: (-hit.score, hit.id))[:limit]
