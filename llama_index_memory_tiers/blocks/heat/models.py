"""What a heat block asks its models: embeddings on one scale, language calls within their cap."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import LLM
from pydantic import Field, PrivateAttr

from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock
from llama_index_memory_tiers.blocks.embedding import embed_texts, question_vector
from llama_index_memory_tiers.blocks.heat.calibration import scale_of, unit
from llama_index_memory_tiers.blocks.heat.merging import METER, Calls
from llama_index_memory_tiers.blocks.heat.pages import Page, Vector
from llama_index_memory_tiers.blocks.heat.promotion import Promotion
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.embeddings import embed_model_of_settings
from llama_index_memory_tiers.errors import EmbeddingError
from llama_index_memory_tiers.events import BlockFailed, emit
from llama_index_memory_tiers.extraction.insight import Meter
from llama_index_memory_tiers.extraction.models import llm_of_settings
from llama_index_memory_tiers.heat import RAW, Policy, Scale
from llama_index_memory_tiers.records import NewRecord, Scope
from llama_index_memory_tiers.storage import OwnerReader, codec

_logger = logging.getLogger(__name__)


class ModelledBlock(TieredMemoryBlock):
    """A block with a language model and an embedding model, each of which it can do without.

    Args:
        llm: The language model; default that of `Settings` if you have set it.
        embed_model: The embedding model; default that of `Settings` if you have set it.
        policy: With `memoryos` cosines are taken as they are.
        model_seconds: Bound of one model call; default 30.
        max_calls_a_day: Model calls per owner and day (UTC).
    """

    llm: LLM | None = Field(default_factory=llm_of_settings)
    embed_model: BaseEmbedding | None = Field(default_factory=embed_model_of_settings)
    policy: Policy = "heat"
    model_seconds: float = Field(default=30.0, gt=0)
    max_calls_a_day: int | None = Field(default=None, ge=0)
    _scale: Scale | None = PrivateAttr(default=None)
    _unsettled: dict[tuple[str, str], int] = PrivateAttr(default_factory=dict)

    @property
    def _model(self) -> str:
        return "" if self.embed_model is None else self.embed_model.model_name

    def _meter_id(self, owner: str) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{owner}/{self.key}/{METER}"))

    async def _meter(self, reader: OwnerReader, calls: Calls, counter: TokenCounter) -> Meter:
        """What may be spent now: what other batches of the day have paid is on record, what failed here is not."""
        left = None
        if self.max_calls_a_day is not None and self.llm is not None:
            known = await reader.by_ids([calls.id])
            data = known[0].data if known else {}
            spent = int(data.get("today", 0)) if data.get("day") == calls.day else 0
            left = max(0, self.max_calls_a_day - spent - self._unsettled.get((reader.owner, calls.day), 0))
        return Meter(left, counter.text)

    def _unsettle(self, owner: str, day: str, calls: int) -> None:
        """Remember calls that were paid for nothing: no merge writes them down."""
        today = {key: count for key, count in self._unsettled.items() if key[1] == day}
        today[owner, day] = today.get((owner, day), 0) + calls
        self._unsettled = today

    async def _scaled(self) -> Scale:
        if self.embed_model is None or self.policy == "memoryos":
            return RAW
        if self._scale is None:
            self._scale = await scale_of(self.embed_model)
        return self._scale

    async def _vectors(self, texts: Sequence[str], scope: Scope) -> list[Vector | None]:
        if self.embed_model is None or not texts:
            return [None] * len(texts)
        # Some models refuse texts without any.
        asked = {at: clean for at, text in enumerate(texts) if (clean := codec.embedded_text(text)).strip()}
        rows = await embed_texts(self.embed_model, list(asked.values())) if asked else []
        vectors = {at: unit(row) for at, row in zip(asked, rows, strict=True)}
        if any(vector is None for vector in vectors.values()):
            emit(BlockFailed(session_id=scope.session_id, block=self.key, error=EmbeddingError.__name__))
        return [vectors.get(at) for at in range(len(texts))]

    async def _embedded(self, pages: Sequence[Page], scope: Scope) -> list[Page]:
        vectors = await self._vectors([page.text for page in pages], scope)
        return [replace(page, vector=vector) for page, vector in zip(pages, vectors, strict=True)]

    async def _with_vectors(self, promotions: Sequence[Promotion], scope: Scope) -> list[Promotion]:
        """Knowledge is found by meaning as well."""
        if self.embed_model is None:
            return list(promotions)
        notes = [note for promotion in promotions for note in promotion.knowledge]
        vectors = dict(
            zip((note.id for note in notes), await self._vectors([n.text for n in notes], scope), strict=True)
        )

        def found(note: NewRecord) -> NewRecord:
            vector = vectors[note.id]
            if vector is None:
                return note
            return replace(note, vector=tuple(map(float, vector)), model=self._model)

        return [replace(one, knowledge=tuple(map(found, one.knowledge))) for one in promotions]

    def _failed(self, scope: Scope, error: Exception) -> None:
        about = {"block": self.key, "session_id": scope.session_id, "error": type(error).__name__}
        _logger.warning("block %s goes on without a model's answer (%s)", self.key, type(error).__name__, extra=about)
        emit(BlockFailed(session_id=scope.session_id, block=self.key, error=type(error).__name__))

    async def _scaled_quietly(self, query: Query) -> Scale:
        try:
            return await self._scaled()
        except Exception as error:  # noqa: BLE001  # providers raise what they like; words still find pages
            self._failed(query.scope, error)
            return RAW

    async def _query_vector(self, text: str, query: Query) -> Vector | None:
        asked = codec.embedded_text(text)
        vector = await question_vector(self.embed_model, asked, block=self.key, scope=query.scope)
        return None if vector is None else unit(vector)
