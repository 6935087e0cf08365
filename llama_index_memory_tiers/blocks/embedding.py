"""What blocks do with embeddings: keep usable ones, and search by words when a vector does not go with the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_memory_tiers.embeddings import embed_query, embed_texts, has_direction
from llama_index_memory_tiers.errors import EmbeddingError, EmbeddingMismatchError
from llama_index_memory_tiers.events import BlockFailed, EmbeddingMismatch, emit
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.storage import Hit, IndexQuery, OwnerReader

__all__ = ["embed_texts", "question_vector", "search", "usable"]


def usable(vectors: Sequence[Sequence[float]], failed: BlockFailed) -> list[tuple[float, ...] | None]:
    """Keep what has a direction; a text whose embedding has none is found by its words.

    Args:
        vectors: One per text, shape (texts, dimensions).
        failed: Emitted once when some have none.

    Returns:
        Each vector, or `None` where it is empty, all zero or not finite.
    """
    found = [tuple(vector) if has_direction(vector) else None for vector in vectors]
    if None in found:
        emit(failed)
    return found


async def question_vector(
    model: BaseEmbedding | None, text: str, *, block: str, scope: Scope
) -> tuple[float, ...] | None:
    """Embed a question; whatever happens to the model, words still find.

    Args:
        model: The model; `None` for none.
        text: The question; storable.
        block: Key of the block that asks, told when the model fails.
        scope: Whose question.

    Returns:
        Shape (dimensions,); `None` without a model or text, when the model fails, or when the vector has no direction.
    """
    if model is None or not text.strip():
        return None
    try:
        vector = await embed_query(model, text)
    except Exception as error:  # noqa: BLE001  # providers raise what they like
        emit(BlockFailed(session_id=scope.session_id, block=block, error=type(error).__name__))
        return None
    return usable([vector], BlockFailed(session_id=scope.session_id, block=block, error=EmbeddingError.__name__))[0]


async def search(reader: OwnerReader, query: IndexQuery, model: str, failed: BlockFailed) -> list[Hit]:
    """Search by meaning and by words, or by words alone when the question's vector does not go with the stored ones.

    Args:
        reader: Where.
        query: What to look for.
        model: Name of the embedding model; '' for none.
        failed: Emitted when the vector was refused; when the stored ones are another model's, with both sizes.

    Returns:
        Candidates, best first.
    """
    try:
        return await reader.search(query, model=model)
    except EmbeddingError as error:
        emit(_with_sizes(failed, error, model) if isinstance(error, EmbeddingMismatchError) else failed)
        return await reader.search(replace(query, vector=None), model=model)


def _with_sizes(failed: BlockFailed, error: EmbeddingMismatchError, model: str) -> EmbeddingMismatch:
    return EmbeddingMismatch(
        session_id=failed.session_id,
        block=failed.block,
        error=failed.error,
        stored_dimensions=error.stored_dimensions,
        asked_dimensions=error.asked_dimensions,
        stored_model=error.stored_model or model,  # two models of one name, or one that was set otherwise
        asked_model=error.asked_model or model,
        remedy=error.remedy,
    )
