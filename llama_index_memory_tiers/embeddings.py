"""Embeddings from any LlamaIndex model, without holding up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.settings import Settings

MOST_CHARACTERS = 8000
"""Embedding models read a few hundred words; the rest of a long text is found by BM25."""
_Asked = dict[tuple[int, int, str], "asyncio.Future[list[float]]"]
_asked: ContextVar[_Asked | None] = ContextVar("_asked", default=None)


def embed_model_of_settings() -> BaseEmbedding | None:
    """The model of `Settings`, if the user has set one; `Settings.embed_model` would look for OpenAI's."""
    return Settings._embed_model  # noqa: SLF001  # the public property resolves a default


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


@contextlib.contextmanager
def one_context() -> Iterator[None]:
    """Within it each model embeds a question once, however many blocks ask with it."""
    asked: _Asked = {}
    before = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(before)
        here, answers = asyncio.get_running_loop(), list(asked.values())
        asked.clear()  # what a block goes on with later asks anew
        for answer in answers:
            if answer.get_loop() is here:
                answer.cancel()  # no block had the patience


async def embed_query(model: BaseEmbedding, text: str) -> list[float]:
    """Embed a question; see `embed_texts` and `one_context`."""
    asked = _asked.get()
    if asked is None:
        return await _embed_query(model, text)
    # A block may ask from another thread, whose loop cannot wait for a future of this one.
    key = (id(asyncio.get_running_loop()), id(model), text)
    if key not in asked:
        asked[key] = asyncio.ensure_future(_embed_query(model, text))
        asked[key].add_done_callback(lambda done: done.cancelled() or done.exception())  # read, whoever still waits
    return await asyncio.shield(asked[key])  # one block's time-out is not that of the others


async def _embed_query(model: BaseEmbedding, text: str) -> list[float]:
    if _synchronous(model):
        return await asyncio.to_thread(model.get_query_embedding, text)
    return await model.aget_query_embedding(text)


def has_direction(vector: Sequence[float]) -> bool:
    """Whether a vector can be compared: neither empty, nor all zero, nor beyond what is finite."""
    return any(vector) and all(map(math.isfinite, vector))


def _synchronous(model: BaseEmbedding) -> bool:
    kind = type(model)
    own = kind._aget_text_embedding is not BaseEmbedding._aget_text_embedding  # noqa: SLF001  # nothing public tells
    batches = kind._aget_text_embeddings is not BaseEmbedding._aget_text_embeddings  # noqa: SLF001  # nothing public tells
    return not (own or batches)
