"""A LlamaIndex vector store of the user's own as the dense leg, beside the words in our storage."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from llama_index_memory_tiers.errors import StorageError, StorageUnavailableError
from llama_index_memory_tiers.storage import Hit

_STORE_HITS = 100


@dataclass(frozen=True, slots=True)
class OwnStore:
    """A vector store as one block uses it: it holds ids, vectors and whose they are.

    Args:
        store: Which.
        block: Key of the block; it sees only what it has written.
        settings: For the store's query; its `filters` are added to ours.
    """

    store: BasePydanticVectorStore
    block: str
    settings: Mapping[str, Any]

    async def add(self, owner: str, vectors: Iterable[tuple[str, Sequence[float] | None]]) -> None:
        """Write vectors by the ids of their records; what has no vector is left out, a known id is overwritten.

        Args:
            owner: Whose.
            vectors: Id of a record, and its vector of shape (dimensions,).

        Raises:
            StorageUnavailableError: The store took them not, whatever it raised; no text is at fault for that, so
                the block waits.
        """
        nodes = [self._node(record_id, owner, vector) for record_id, vector in vectors if vector is not None]
        if not nodes:
            return
        try:
            await self.store.async_add(nodes)
        except Exception as error:
            raise StorageUnavailableError(
                f"The vector store of {self.block} did not take {len(nodes)} nodes ({type(error).__name__}).",
                allowed="A vector store takes ids, vectors and metadata.",
                remedy="Check the store: messages wait until it takes them, a note is to be written again.",
            ) from error

    def _node(self, record_id: str, owner: str, vector: Sequence[float]) -> TextNode:
        # A store that wants a text gets the id: texts stay in our storage.
        node = TextNode(id_=record_id, text=record_id, metadata={"owner": owner, "block": self.block})
        node.embedding = list(vector)
        return node

    async def delete(self, ids: Iterable[str]) -> None:
        """Delete by the ids of records, and look whether they are gone.

        Args:
            ids: Those that the store does not hold are passed over.

        Raises:
            StorageError: Some are still there.
        """
        nodes = list(dict.fromkeys(ids))
        await self.store.adelete_nodes(nodes)
        with contextlib.suppress(NotImplementedError):  # not every store can be read by id
            if left := await self.store.aget_nodes(nodes):
                raise StorageError(
                    f"The vector store of {self.block} still holds {len(left)} of {len(nodes)} deleted nodes.",
                    allowed="A deleted node is gone.",
                    remedy="The deletion is tried again at the next start; check the store.",
                )

    async def nearest(self, text: str, vector: Sequence[float], *, owner: str, top_k: int | None) -> dict[str, float]:
        """Ask for what is near.

        Args:
            text: The question.
            vector: Its embedding, shape (dimensions,).
            owner: Whose nodes.
            top_k: At most so many; default 100.

        Returns:
            Id of a record → similarity, as the store measures it; where it tells no number, a share by rank.
        """
        mine: list[Any] = [MetadataFilter(key="owner", value=owner), MetadataFilter(key="block", value=self.block)]
        given = self.settings.get("filters")
        found = await self.store.aquery(
            VectorStoreQuery(
                query_str=text,
                query_embedding=list(vector),
                similarity_top_k=top_k or _STORE_HITS,
                filters=MetadataFilters(filters=[*mine, given] if given is not None else mine),
                **{name: value for name, value in self.settings.items() if name != "filters"},
            )
        )
        ids = found.ids or [node.node_id for node in found.nodes or []]
        told: Sequence[Any] = found.similarities or [None] * len(ids)
        return {one: _score(score, rank) for rank, (one, score) in enumerate(zip(ids, told, strict=False))}


def _score(told: Any, rank: int) -> float:
    """What a store tells about one hit as a number; a store without scores keeps its order."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(score := float(told)):
            return score
    return 1.0 / (rank + 1)


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
