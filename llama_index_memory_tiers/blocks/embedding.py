"""Embeddings from any LlamaIndex model, without holding up the event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_memory_tiers.errors import EmbeddingError
from llama_index_memory_tiers.events import BlockFailed, emit
from llama_index_memory_tiers.storage import Hit, IndexQuery, OwnerReader


async def embed_texts(model: BaseEmbedding, texts: Sequence[str]) -> list[list[float]]:
    """Embed texts to be stored.

    Args:
        model: Any; one without an async side of its own works in a thread, as LlamaIndex would run it on the loop.
        texts: At least one.

    Returns:
        One row per text, shape (texts, dimensions).
    """
    if _synchronous(model):
        return await asyncio.to_thread(model.get_text_embedding_batch, list(texts))
    return await model.aget_text_embedding_batch(list(texts))


async def embed_query(model: BaseEmbedding, text: str) -> list[float]:
    """Embed a question; see `embed_texts`."""
    if _synchronous(model):
        return await asyncio.to_thread(model.get_query_embedding, text)
    return await model.aget_query_embedding(text)


def usable(vectors: Sequence[Sequence[float]], failed: BlockFailed) -> list[tuple[float, ...] | None]:
    """Keep what has a direction; a text whose embedding has none is found by its words.

    Args:
        vectors: One per text, shape (texts, dimensions).
        failed: Emitted once when some have none.

    Returns:
        Each vector, or `None` where it is empty, all zero or not finite.
    """
    found = [tuple(vector) if any(vector) and all(map(math.isfinite, vector)) else None for vector in vectors]
    if None in found:
        emit(failed)
    return found


async def search(reader: OwnerReader, query: IndexQuery, model: str, failed: BlockFailed) -> list[Hit]:
    """Search by meaning and by words, or by words alone when the question's vector does not go with the stored ones.

    Args:
        reader: Where.
        query: What to look for.
        model: Name of the embedding model; '' for none.
        failed: Emitted when the vector was refused.

    Returns:
        Candidates, best first.
    """
    try:
        return await reader.search(query, model=model)
    except EmbeddingError:
        emit(failed)
        return await reader.search(replace(query, vector=None), model=model)


def _synchronous(model: BaseEmbedding) -> bool:
    kind = type(model)
    own = kind._aget_text_embedding is not BaseEmbedding._aget_text_embedding  # noqa: SLF001  # nothing public tells
    batches = kind._aget_text_embeddings is not BaseEmbedding._aget_text_embeddings  # noqa: SLF001  # nothing public tells
    return not (own or batches)
