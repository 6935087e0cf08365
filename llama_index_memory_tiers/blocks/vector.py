"""VectorMemoryBlock: every message is recallable, by its words and by its meaning."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import MessageRole
from llama_index.core.memory.memory_blocks.vector import (
    DEFAULT_RETRIEVED_TEXT_TEMPLATE,
)
from llama_index.core.memory.memory_blocks.vector import (
    VectorMemoryBlock as _CoreVectorMemoryBlock,
)
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.settings import Settings
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock
from llama_index_memory_tiers.blocks.embedding import embed_query, embed_texts, search, usable
from llama_index_memory_tiers.budget import Item, TokenCounter
from llama_index_memory_tiers.errors import ConfigurationError, EmbeddingError
from llama_index_memory_tiers.events import BlockFailed, emit
from llama_index_memory_tiers.instructions import NOT_AN_INSTRUCTION, looks_like_instruction
from llama_index_memory_tiers.records import Batch, Changes, NewRecord, Record, Scope, StoredMessage
from llama_index_memory_tiers.storage import Hit, IndexQuery, OwnerReader, RecalledMessage, codec
from llama_index_memory_tiers.text import day_label, escape, message_terms

_KIND = "message"
_RECALLED_ROLES = frozenset({MessageRole.USER, MessageRole.ASSISTANT, MessageRole.TOOL, MessageRole.FUNCTION})
# Embedding models read a few hundred words; the rest of a long message is found by BM25.
_EMBEDDED_CHARACTERS = 8000
# Larger batches are analysed and counted in a thread: 5 million characters take 1.5 s.
_THREAD_CHARACTERS = 100_000
# An instruction that a text hides is looked for in this much of it.
_JUDGED_CHARACTERS = 20_000
# Candidates beyond what fits, so that packing has a choice of lengths.
_SURPLUS = 1.3
_FEWEST_HITS = 50
_TOKENS_A_MESSAGE = 10  # few are shorter, so that the candidates fill any allowance
_STORE_HITS = 100


def _embed_model_of_settings() -> BaseEmbedding | None:
    # Settings.embed_model would resolve OpenAI's when nothing is set.
    return Settings._embed_model  # noqa: SLF001


class VectorMemoryBlock(TieredMemoryBlock, _CoreVectorMemoryBlock):
    """Remembers every message and recalls those that matter for the current request.

    Hybrid search with an embedding model, BM25 alone without one; no model is asked for that was not given. The
    arguments of LlamaIndex's block of the same name work; here each message is an item of its own, so that a
    context is filled by the message.

    Args:
        vector_store: A LlamaIndex vector store of your own for the dense leg; texts still come from our storage.
        embed_model: Default: `Settings.embed_model` if you have set it; `None` is BM25 alone.
        similarity_top_k: At most so many messages; default `None`: as many as the token budget holds.
        retrieval_context_window: How many of the newest messages make the query; default 1, the request itself.
        format_template: Applied to each message; variable `text`.
        node_postprocessors: Filter, rerank or rewrite what was found, such as a reranker.
        query_kwargs: For the vector store.
    """

    name: str = "RetrievedMessages"
    priority: int = Field(default=2, ge=0)
    vector_store: BasePydanticVectorStore | None = None  # type: ignore[assignment]  # optional here
    embed_model: BaseEmbedding | None = Field(default_factory=_embed_model_of_settings)  # type: ignore[assignment]  # optional here
    similarity_top_k: int | None = Field(default=None, ge=1)  # type: ignore[assignment]  # optional here
    retrieval_context_window: int = Field(default=1, ge=1)

    @field_validator("vector_store", mode="before")
    @classmethod
    def validate_vector_store(cls, v: Any) -> Any:
        """A vector store is optional here, and need not store text."""
        return v

    @model_validator(mode="after")
    def _embeds(self) -> Self:
        if self.vector_store is not None and self.embed_model is None:
            raise ConfigurationError(
                "vector_store was given without embed_model.",
                allowed="A vector store holds embeddings.",
                remedy="Pass embed_model=… as well, or leave vector_store out: our own search needs neither.",
            )
        return self

    # -- absorbing -------------------------------------------------------------------------------------------

    async def prepare(
        self,
        batch: Batch,
        reader: OwnerReader,  # noqa: ARG002  # it needs no records
        counter: TokenCounter,
    ) -> tuple[NewRecord, ...] | None:
        """Analyse and embed each message."""
        told = [(stored, text) for stored in batch.messages if (text := _said(stored))]
        if not told:
            return None
        vectors = await self._embed([_dense_key(stored, text) for stored, text in told], batch.scope)
        if sum(len(text) for _, text in told) > _THREAD_CHARACTERS:
            measured = await asyncio.to_thread(_measured, told, counter)
        else:
            measured = _measured(told, counter)
        records = tuple(
            NewRecord(
                id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.key}/{batch.sid}/{stored.seq}/{stored.id}")),
                kind=_KIND,
                said_at=stored.created_at,
                sources=(stored.place,),
                terms=terms,
                speaker=_speaker(stored),
                tokens=tokens,
                vector=vector if self.vector_store is None else None,
                model=self._model,
            )
            for (stored, _), (terms, tokens), vector in zip(told, measured, vectors, strict=True)
        )
        if self.vector_store is not None:
            # Ids name the message, so that a repeated delivery overwrites; SQL decides what is recalled.
            pairs = zip(records, vectors, strict=True)
            nodes = [self._node(record.id, batch.owner, vector) for record, vector in pairs if vector is not None]
            if nodes:
                await self.vector_store.async_add(nodes)
        return records

    def merge(self, draft: tuple[NewRecord, ...], records: Sequence[Record]) -> Changes:  # noqa: ARG002
        """Write one reference per message."""
        return Changes(add=draft)

    async def _embed(self, texts: list[str], scope: Scope) -> list[tuple[float, ...] | None]:
        if self.embed_model is None:
            return [None] * len(texts)
        return usable(await embed_texts(self.embed_model, texts), self._unusable(scope))

    def _unusable(self, scope: Scope) -> BlockFailed:
        return BlockFailed(session_id=scope.session_id, block=self.key, error=EmbeddingError.__name__)

    @property
    def _model(self) -> str:
        if self.embed_model is None or self.vector_store is not None:
            return ""
        return self.embed_model.model_name

    def _node(self, record_id: str, owner: str, vector: Sequence[float]) -> TextNode:
        # The text stays in our storage; a store that wants one gets the id.
        node = TextNode(id_=record_id, text=record_id, metadata={"owner": owner, "block": self.key})
        node.embedding = list(vector)
        return node

    # -- recall ----------------------------------------------------------------------------------------------

    async def recall(self, query: Query, reader: OwnerReader) -> list[Item]:
        """Offer messages, the most valuable per token first."""
        text = codec.storable(self._asked(query))
        if not text.strip():
            return []
        vector = await self._query_vector(text, query)
        if self.vector_store is not None and vector is not None:
            hits = await self._from_store(text, vector, query, reader)
        else:
            hits = await search(
                reader,
                IndexQuery(
                    text=text,
                    now=query.now,
                    vector=vector,
                    kinds=frozenset({_KIND}),
                    blocks=frozenset({self.key}),
                    exclude=query.visible,
                    limit=max(_FEWEST_HITS, query.allowance // _TOKENS_A_MESSAGE),
                ),
                self._model,
                self._unusable(query.scope),
            )
        found = await reader.messages_of(self._enough(hits, query.allowance))
        shown = await self._postprocessed([(message, _line(message.message)) for message in found], text)
        return [self._item(message, line, len(shown) - rank) for rank, (message, line) in enumerate(shown)]

    def _asked(self, query: Query) -> str:
        if self.retrieval_context_window == 1:
            return query.text
        recent = [message.content or "" for message in query.messages[-self.retrieval_context_window :]]
        return "\n".join(dict.fromkeys([*recent, query.text]))

    async def _query_vector(self, text: str, query: Query) -> tuple[float, ...] | None:
        if self.embed_model is None:
            return None
        try:
            vector = await embed_query(self.embed_model, text[:_EMBEDDED_CHARACTERS])
        except Exception as error:  # noqa: BLE001  # providers raise what they like; words still find messages
            emit(BlockFailed(session_id=query.scope.session_id, block=self.key, error=type(error).__name__))
            return None
        return usable([vector], self._unusable(query.scope))[0]

    async def _from_store(self, text: str, vector: Sequence[float], query: Query, reader: OwnerReader) -> list[Hit]:
        assert self.vector_store is not None  # noqa: S101  # asked by the caller
        mine: list[Any] = [
            MetadataFilter(key="owner", value=reader.owner),
            MetadataFilter(key="block", value=self.key),
        ]
        settings: dict[str, Any] = {**self.query_kwargs}
        given = settings.pop("filters", None)
        found = await self.vector_store.aquery(
            VectorStoreQuery(
                query_str=text,
                query_embedding=list(vector),
                similarity_top_k=self.similarity_top_k or _STORE_HITS,
                filters=MetadataFilters(filters=[*mine, given] if given is not None else mine),
                **settings,
            )
        )
        ids = found.ids or [node.node_id for node in found.nodes or []]
        # A store without scores keeps its order.
        scores = found.similarities or [1.0 / (rank + 1) for rank in range(len(ids))]
        hits = await reader.hits_of(dict(zip(ids, scores, strict=False)))
        return [hit for hit in hits if hit.place not in query.visible]

    def _enough(self, hits: Sequence[Hit], allowance: int) -> list[Hit]:
        chosen: list[Hit] = []
        tokens = 0.0
        for hit in hits[: self.similarity_top_k]:
            if tokens > allowance * _SURPLUS:
                break
            if hit.tokens <= allowance:  # a message that can never fit must not stand in the way of those that do
                tokens += hit.tokens
                chosen.append(hit)
        return chosen

    async def _postprocessed(
        self, found: list[tuple[RecalledMessage, str]], text: str
    ) -> list[tuple[RecalledMessage, str]]:
        if not self.node_postprocessors or not found:
            return found
        by_id = {message.record_id: message for message, _ in found}
        nodes = [
            NodeWithScore(node=TextNode(id_=message.record_id, text=line), score=message.hit.score)
            for message, line in found
        ]
        for postprocessor in self.node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_str=text)
        return [(by_id[node.node.node_id], node.node.get_content()) for node in nodes if node.node.node_id in by_id]

    @property
    def _formats(self) -> bool:
        # Pydantic copies defaults, so that identity tells nothing; rendering a template takes 3 ms.
        template = self.format_template
        return getattr(template, "template_str", None) != DEFAULT_RETRIEVED_TEXT_TEMPLATE.template_str

    def _item(self, found: RecalledMessage, line: str, rank: int) -> Item:
        stored = found.message
        if self._formats:
            line = self.format_template.format(text=line)
        day = day_label(stored.created_at)
        return Item(
            text=line,
            score=found.hit.score or float(rank),
            group=f"{stored.session_id}/{day}",
            header=f"<session date='{day}'>",
            footer="</session>",
            order=(stored.created_at.timestamp(), float(stored.seq)),
            sources=frozenset({stored.place}),
            legs=found.hit.legs,
            record_id=found.record_id,
        )


def _said(stored: StoredMessage) -> str:
    return stored.text.strip() if stored.role in _RECALLED_ROLES else ""


def _line(stored: StoredMessage) -> str:
    """One message as it is shown: by its speaker's name when that is known, else as LlamaIndex shows it."""
    said = stored.text.strip()
    text = escape(said)
    suspect = looks_like_instruction(said[:_JUDGED_CHARACTERS])
    if stored.meta.sent_from and not suspect:
        return f"{escape(stored.meta.sent_from)}: {text}"
    if not suspect:
        return f"<message role='{stored.role.value}'>{text}</message>"
    who = escape(stored.meta.sent_from or stored.role.value).replace("'", "&#39;")
    return f"<message role='{who}' note='{NOT_AN_INSTRUCTION}'>{text}</message>"


def _measured(told: Sequence[tuple[StoredMessage, str]], counter: TokenCounter) -> list[tuple[Mapping[str, int], int]]:
    """What each message is found by, and the size of what will be shown."""
    return [
        (
            message_terms(text, speaker=_speaker(stored), when=stored.created_at),
            counter.text(_line(stored) + "\n"),
        )
        for stored, text in told
    ]


def _dense_key(stored: StoredMessage, text: str) -> str:
    speaker = stored.meta.sent_from
    # Tokenizers and HTTP clients refuse lone surrogates.
    return codec.storable(f"{speaker}: {text}" if speaker else text)[:_EMBEDDED_CHARACTERS]


def _speaker(stored: StoredMessage) -> str:
    return stored.meta.sent_from or stored.role.value
