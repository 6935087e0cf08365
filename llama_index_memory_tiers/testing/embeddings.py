"""A small real embedding model that needs neither key nor network."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import ConfigDict

from llama_index_memory_tiers.errors import MissingExtraError


@lru_cache(maxsize=1)
def _model() -> Any:
    try:
        import wordllama  # noqa: PLC0415  # optional
    except ImportError:
        raise MissingExtraError(
            "WordLlamaEmbedding was used, but wordllama is not installed.",
            allowed="Its weights come inside a package of 33 MB.",
            remedy="Run: pip install 'wordllama==0.4.0.post1', or use another embedding model.",
        ) from None
    # The wheel ships its files beside the module, where load() looks only when told.
    return wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)


class WordLlamaEmbedding(BaseEmbedding):
    """256 dimensions, static, English first, 0.03 ms a text; for tests, demos and small machines.

    Raises:
        MissingExtraError: `wordllama` is not installed.
    """

    model_config = ConfigDict(extra="forbid")  # a misspelt name is no silent default
    model_name: str = "wordllama-256"

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        # A lone surrogate is no text to its tokenizer.
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        return [[float(number) for number in row] for row in _model().embed(clean, norm=True)]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embedding(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
