"""An embedding that needs no model."""

from __future__ import annotations

import math
from hashlib import blake2b

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import ConfigDict, Field

from llama_index_memory_tiers.text import analyse


class HashEmbedding(BaseEmbedding):
    """Embeds a text as its stemmed words, each hashed to a place and a sign: equal in every process, without a model.

    Args:
        dims: Dimensions of the vectors, 2 or more; 128 unless given.
    """

    model_config = ConfigDict(extra="forbid")  # a misspelt name is no silent default
    model_name: str = "hash"
    dims: int = Field(default=128, ge=2)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return "HashEmbedding"

    def _get_text_embedding(self, text: str) -> list[float]:
        terms = analyse(text) or {text: 1}  # emoji and function words alone have no terms
        vector = [0.0] * self.dims
        for term, count in terms.items():
            place, sign = divmod(_hash(term), 2)
            vector[place % self.dims] += (1 + math.log(count)) * (1 if sign else -1)
        length = math.sqrt(sum(number * number for number in vector))
        if length == 0:  # all words met their opposites
            vector[_hash(text) % self.dims] = length = 1.0
        return [number / length for number in vector]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embedding(text)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
