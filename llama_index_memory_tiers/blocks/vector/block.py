"""VectorMemoryBlock: every message is recallable, by its words and by its meaning."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.memory.memory_blocks.vector import (
    DEFAULT_RETRIEVED_TEXT_TEMPLATE,
)
from llama_index.core.memory.memory_blocks.vector import (
    VectorMemoryBlock as _CoreVectorMemoryBlock,
)
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock
from llama_index_memory_tiers.blocks.desk import Desk
from llama_index_memory_tiers.blocks.embedding import embed_texts, question_vector, search, usable
from llama_index_memory_tiers.blocks.taking_back import take_back
from llama_index_memory_tiers.blocks.vector.own_store import OwnStore, fused
from llama_index_memory_tiers.blocks.vector.recollections import (
    KINDS,
    MESSAGE,
    NOTE,
    Found,
    checked_note,
    distinct,
    measure,
    note_line,
    read_found,
    said_in,
    speaker_of,
    within_quotas,
)
from llama_index_memory_tiers.budget import Item, TokenCounter
from llama_index_memory_tiers.embeddings import embed_model_of_settings
from llama_index_memory_tiers.errors import ConfigurationError, EmbeddingError
from llama_index_memory_tiers.events import BlockFailed, emit
from llama_index_memory_tiers.extraction.classes import classify
from llama_index_memory_tiers.extraction.rewriting import rewrite_question
from llama_index_memory_tiers.partitions import Partition, WritePolicy, checked_partitions, classify_by_rule, place
from llama_index_memory_tiers.records import (
    Batch,
    Changes,
    Forgotten,
    NewRecord,
    Recollection,
    Record,
    Scope,
)
from llama_index_memory_tiers.scoring import age_decay
from llama_index_memory_tiers.storage import Hit, IndexQuery, OwnerReader, codec
from llama_index_memory_tiers.text import message_terms, without_names

# Candidates beyond what fits, so that packing has a choice of lengths.
_SURPLUS = 1.3
_FEWEST_HITS = 50
_MOST_HITS = 3200
_TOKENS_A_MESSAGE = 16  # a guess to begin with
_DAY_SECONDS = 86_400
_MESSAGES_FOR_REWRITING = 6


class VectorMemoryBlock(TieredMemoryBlock, _CoreVectorMemoryBlock):
    """Remembers every message and recalls those that matter for the current request.

    Hybrid search with an embedding model, BM25 alone without one; no model is asked for that was not given. The
    arguments of LlamaIndex's block of the same name work; here each message is an item of its own, so that a
    context is filled by the message.

    Args:
        vector_store: A LlamaIndex vector store of your own for the dense leg, which must filter by metadata. Texts,
            words for BM25 and all that decides what is recalled stay in our storage; the store gets ids, vectors and
            whose they are. While it cannot be asked, words find messages; while it takes nothing, new ones wait.
        embed_model: Default: `Settings.embed_model` if you have set it; `None` is BM25 alone.
        similarity_top_k: At most so many messages; default `None`: as many as the token budget holds.
        retrieval_context_window: How many of the newest messages make the query; default 1, the request itself.
        format_template: Applied to each message; variable `text`.
        node_postprocessors: Filter, rerank or rewrite what was found, such as a reranker.
        query_kwargs: For the vector store.
        partitions: Parts with a quota and a retention each, such as `Partition.survey()`; default none.
        classifier: Says which partition a text belongs to: a function of the text, sync or async, or an LLM, which is
            asked once a batch; default by the survey's word lists. What fails or is unknown is a conversation.
        write_policy: Which messages are kept, such as `WritePolicy.survey()`; default all.
        query_llm: Writes each question so that it can be understood alone before it is looked up: one call per context.
            Default none; a call that fails or takes longer than `query_seconds` leaves the question as it is.
        query_seconds: Bound of that call, in seconds; default 5.
        recall_when: Says from the messages of the window, the newest last, whether anything is looked up for a context;
            such as `lambda messages: messages[-1].role == "user"`. Default always.
        decay_rate: A score is multiplied by exp(-rate · days); .01 halves it in 69.3 days. Default 0.
    """

    name: str = "RetrievedMessages"
    priority: int = Field(default=2, ge=0)
    vector_store: BasePydanticVectorStore | None = None  # type: ignore[assignment]  # optional here
    embed_model: BaseEmbedding | None = Field(default_factory=embed_model_of_settings)  # type: ignore[assignment]  # optional here
    similarity_top_k: int | None = Field(default=None, ge=1)  # type: ignore[assignment]  # optional here
    retrieval_context_window: int = Field(default=1, ge=1)
    partitions: tuple[Partition, ...] = ()
    classifier: Any = Field(default=classify_by_rule, exclude=True)
    write_policy: WritePolicy | None = Field(default=None, exclude=True)
    query_llm: LLM | None = Field(default=None, exclude=True)
    query_seconds: float = Field(default=5.0, gt=0)
    recall_when: Callable[[Sequence[ChatMessage]], bool] | None = Field(default=None, exclude=True)
    decay_rate: float = Field(default=0.0, ge=0)

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

    @field_validator("partitions")
    @classmethod
    def _told_apart(cls, value: tuple[Partition, ...]) -> tuple[Partition, ...]:
        return checked_partitions(value)

    @field_validator("classifier")
    @classmethod
    def _classifies(cls, value: Any) -> Any:
        if callable(value) or isinstance(value, LLM):
            return value
        raise ConfigurationError(
            f"classifier={value!r:.100} was given.",
            allowed="It is a function of a text, or a LlamaIndex LLM.",
            remedy="Pass one of these, or leave it out: word lists decide then.",
        )

    # -- absorbing -------------------------------------------------------------------------------------------

    async def prepare(
        self,
        batch: Batch,
        reader: OwnerReader,  # noqa: ARG002  # it needs no records
        counter: TokenCounter,
    ) -> tuple[NewRecord, ...] | None:
        """Analyse and embed each message."""
        told = [(stored, text) for stored in batch.messages if (text := said_in(stored)) and self._keeps(text)]
        if not told:
            return None
        texts = [text for _, text in told]
        vectors = await self._embed(
            [codec.embedded_message(text, stored.role, stored.meta.sent_from) for stored, text in told], batch.scope
        )
        parts = await self._classified(texts, batch.scope)
        measured = await measure(told, counter)
        records = tuple(
            NewRecord(
                id=self._record_id(batch.sid, stored.seq, stored.id),
                kind=MESSAGE,
                data={} if part is None else {"partition": part.name},
                said_at=stored.created_at,
                expires_at=None if part is None else part.expires_at(stored.created_at),
                sources=(stored.place,),
                terms=terms,
                speaker=speaker_of(stored),
                tokens=tokens,
                vector=vector if self.vector_store is None else None,
                model=self._model,
            )
            for (stored, _), (terms, tokens), vector, part in zip(told, measured, vectors, parts, strict=True)
        )
        if self._store is not None:
            # Ids name the message, so that a repeated delivery overwrites; SQL decides what is recalled.
            await self._store.add(batch.owner, zip((one.id for one in records), vectors, strict=True))
        return records

    def _keeps(self, text: str) -> bool:
        return self.write_policy is None or self.write_policy.kept(text)

    async def _classified(self, texts: Sequence[str], scope: Scope) -> list[Partition | None]:
        """The partition of each text; a classifier that fails delays nothing and loses nothing."""
        if not self.partitions:
            return [None] * len(texts)
        names: Sequence[object]
        try:
            names = await self._names_of(texts)
        except Exception as error:  # noqa: BLE001  # the user's function, or a model
            emit(BlockFailed(session_id=scope.session_id, block=self.key, error=type(error).__name__))
            names = [None] * len(texts)
        return [place(self.partitions, name) for name in names]

    async def _names_of(self, texts: Sequence[str]) -> Sequence[object]:
        if isinstance(self.classifier, LLM):
            return await classify(self.classifier, texts, [partition.name for partition in self.partitions])
        named = [self.classifier(text) for text in texts]
        return [await name if isinstance(name, Awaitable) else name for name in named]

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
    def _store(self) -> OwnStore | None:
        """The user's vector store."""
        return None if self.vector_store is None else OwnStore(self.vector_store, self.key, self.query_kwargs)

    @property
    def _model(self) -> str:
        if self.embed_model is None or self.vector_store is not None:
            return ""
        return self.embed_model.model_name

    def _record_id(self, sid: int, seq: int, uid: str) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.key}/{sid}/{seq}/{uid}"))

    @property
    def holds_external_data(self) -> bool:
        """Whether the vectors are in a store of yours."""
        return self.vector_store is not None

    async def forget(self, forgotten: Forgotten) -> None:
        """Delete nodes from the vector store, those as well whose records were never merged."""
        if self._store is not None:
            await self._store.delete(
                [*forgotten.records, *(self._record_id(*message) for message in forgotten.messages)]
            )

    # -- recall ----------------------------------------------------------------------------------------------

    async def recall(self, query: Query, reader: OwnerReader) -> list[Item]:
        """Offer messages and notes, the most valuable per token first."""
        text = codec.storable(self._asked(query))
        if not text.strip() or (self.recall_when is not None and not self.recall_when(query.messages)):
            return []
        if self.query_llm is not None:
            text = await self._rewritten(self.query_llm, text, query)
        found = await self._found(text, query, reader)
        shown = await self._postprocessed(found, text)
        return [one.item(self._formatted(line)) for one, line in shown]

    async def _found(self, text: str, query: Query, reader: OwnerReader) -> list[Found]:
        """What fills the allowance, best first."""
        limit = max(_FEWEST_HITS, query.allowance // _TOKENS_A_MESSAGE)
        known: dict[int, Found] = {}
        asked = IndexQuery(text, query.now, await self._query_vector(text, reader, query.scope), exclude=query.visible)
        near = await self._near(asked, reader, query.scope)
        while True:
            hits = await self._candidates(replace(asked, limit=limit), near, reader, query.scope)
            if self.partitions:
                return within_quotas(distinct(await read_found(reader, hits)), self.partitions)[: self.similarity_top_k]
            found = await self._enough(hits, query.allowance, reader, known)
            # Where most are short, or say the same words again and again, more of them are looked at.
            enough = self.similarity_top_k is not None and len(found) >= self.similarity_top_k
            full = enough or _tokens(found) >= query.allowance
            if full or len(hits) < limit or limit >= _MOST_HITS:
                return found[: self.similarity_top_k]
            limit *= 4

    async def _rewritten(self, llm: LLM, text: str, query: Query) -> str:
        """The question with a second form of it that can be understood alone."""
        said = [message.content or "" for message in query.messages if message.content != text]
        try:
            asking = rewrite_question(llm, text, said[-_MESSAGES_FOR_REWRITING:], today=f"{query.now:%Y-%m-%d}")
            alone = await asyncio.wait_for(asking, self.query_seconds)
        except Exception as error:  # noqa: BLE001  # models raise what they like; the question is there already
            emit(BlockFailed(session_id=query.scope.session_id, block=self.key, error=type(error).__name__))
            return text
        return codec.storable(f"{text}\n{alone}")

    async def _candidates(
        self, asked: IndexQuery, near: Sequence[Hit] | None, reader: OwnerReader, scope: Scope
    ) -> list[Hit]:
        """The best by words and by meaning; meaning is what the user's own store found near, when there is one."""
        vector = asked.vector if near is None else None
        here = replace(asked, vector=vector, kinds=KINDS, blocks=frozenset({self.key}))
        hits = await search(reader, here, self._model, self._unusable(scope))
        if near is not None:
            hits = fused(near, hits, asked.limit)
        return [*sorted(self._decayed(hits, asked.now), key=lambda hit: -hit.score)] if self.decay_rate else hits

    def _decayed(self, hits: Sequence[Hit], now: datetime) -> Iterable[Hit]:
        for hit in hits:
            days = 0.0 if hit.said_at is None else (now.timestamp() - hit.said_at) / _DAY_SECONDS
            # What counts against a record does not fade.
            yield hit._replace(score=hit.score * age_decay(days, self.decay_rate)) if hit.score > 0 else hit

    # -- by hand ---------------------------------------------------------------------------------------------

    async def remember(
        self, desk: Desk, content: str, metadata: Mapping[str, Any] | None = None, partition: str | None = None
    ) -> str:
        """Store a note of one's own beside the messages; see `TieredMemory.aremember`."""
        text = desk.redacted(content) if isinstance(content, str) else ""
        checked_note(content, metadata, partition, self.partitions)
        kept, now = desk.redacted_fields(metadata or {}), desk.now()
        (vector,) = await self._embed([codec.embedded_text(text)], desk.scope)
        part = place(self.partitions, partition) if partition else (await self._classified([text], desk.scope))[0]
        record = NewRecord(
            id=desk.new_id(),
            kind=NOTE,
            text=text,
            data={"metadata": kept} | ({} if part is None else {"partition": part.name}),
            said_at=now,
            expires_at=None if part is None else part.expires_at(now),
            terms=message_terms(text, speaker="", when=now),
            tokens=desk.counter.text(note_line(text) + "\n"),
            vector=vector if self.vector_store is None else None,
            model=self._model,
        )
        if self._store is not None:
            await self._remember_outside(desk, self._store, record, vector)
        else:
            await desk.change(lambda _: Changes(add=(record,)))
        return record.id

    async def _remember_outside(
        self, desk: Desk, store: OwnStore, record: NewRecord, vector: tuple[float, ...] | None
    ) -> None:
        """Write a note's vector and then its record; without the record nobody would know the id of the vector."""
        owner = await desk.owner()
        try:
            await store.add(owner, [(record.id, vector)])
            await desk.change(lambda _: Changes(add=(record,)))
        except BaseException:  # cancelled as well
            noting = desk.storage.forgetting.note_missing(self.key, desk.scope.user_id or "", [record.id])
            await take_back(desk.storage, self, noting)
            raise

    async def find(
        self,
        desk: Desk,
        query: str,
        top_k: int,
        partitions: Collection[str] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002  # the field's word for it
    ) -> list[Recollection]:
        """Look messages and notes up; see `TieredMemory.arecall`."""
        text, reader, limit = codec.storable(query), await desk.reader(), max(_FEWEST_HITS, 2 * top_k)
        # Equal secrets have equal placeholders, so that a note is found by what its metadata held.
        wanted = None if filter is None else desk.redacted_fields(filter)
        asked = IndexQuery(text, desk.now(), await self._query_vector(text, reader, desk.scope))
        near = await self._near(asked, reader, desk.scope)
        while True:
            hits = await self._candidates(replace(asked, limit=limit), near, reader, desk.scope)
            found = [one for one in await read_found(reader, hits) if one.passes(partitions, wanted)]
            # Filters come before the count: with too few left, more candidates are looked at.
            if len(found) >= top_k or len(hits) < limit:
                return [one.recollection() for one in found[:top_k]]
            limit *= 4

    def _asked(self, query: Query) -> str:
        if self.retrieval_context_window == 1:
            return query.text
        recent = [message.content or "" for message in query.messages[-self.retrieval_context_window :]]
        return "\n".join(dict.fromkeys([*recent, query.text]))

    async def _query_vector(self, text: str, reader: OwnerReader, scope: Scope) -> tuple[float, ...] | None:
        if self.embed_model is None:
            return None
        # Messages are embedded without the names of who said them.
        meant = without_names(codec.embedded_text(text), await reader.speakers(model=self._model))
        return await question_vector(self.embed_model, meant, block=self.key, scope=scope)

    async def _near(self, asked: IndexQuery, reader: OwnerReader, scope: Scope) -> list[Hit] | None:
        """What the user's own store finds, `None` without one; when it fails, words still find messages."""
        if self._store is None:
            return None
        if asked.vector is None:
            return []
        try:
            scores = await self._store.nearest(
                asked.text, asked.vector, owner=reader.owner, top_k=self.similarity_top_k
            )
            hits = await reader.hits_of(scores)
        except Exception as error:  # noqa: BLE001  # stores raise what they like
            emit(BlockFailed(session_id=scope.session_id, block=self.key, error=type(error).__name__))
            return []
        return [hit for hit in hits if hit.place is None or hit.place not in asked.exclude]

    async def _enough(
        self, hits: Sequence[Hit], allowance: int, reader: OwnerReader, known: dict[int, Found]
    ) -> list[Found]:
        """What fills the allowance, and a little more so that packing has a choice; the same words once.

        What is read is put into `known`, so that a longer list of candidates reads only what is new in it.
        """
        # A message that can never fit must not stand in the way of those that do.
        waiting = [hit for hit in hits if hit.tokens <= allowance]
        found: list[Found] = []
        most, tokens, at, top_k = allowance * _SURPLUS, 0.0, 0, self.similarity_top_k or len(hits)
        while at < len(waiting) and tokens <= most and len(found) < top_k:
            part: list[Hit] = []
            while at < len(waiting) and tokens <= most and len(part) < top_k:
                part.append(waiting[at])
                tokens += waiting[at].tokens
                at += 1
            known |= {one.hit.id: one for one in await read_found(reader, [hit for hit in part if hit.id not in known])}
            found = distinct([*found, *(known[hit.id].by(hit) for hit in part if hit.id in known)])
            tokens = _tokens(found)
        return found

    async def _postprocessed(self, found: Sequence[Found], text: str) -> list[tuple[Found, str]]:
        if not self.node_postprocessors or not found:
            return [(one, one.line) for one in found]
        by_id = {one.record_id: one for one in found}
        nodes = [NodeWithScore(node=TextNode(id_=one.record_id, text=one.line), score=one.hit.score) for one in found]
        for postprocessor in self.node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_str=text)
        return [(by_id[node.node.node_id], node.node.get_content()) for node in nodes if node.node.node_id in by_id]

    def _formatted(self, line: str) -> str:
        return self.format_template.format(text=line) if self._formats else line

    @property
    def _formats(self) -> bool:
        # Pydantic copies defaults, so that identity tells nothing; rendering a template takes 3 ms.
        template = self.format_template
        return getattr(template, "template_str", None) != DEFAULT_RETRIEVED_TEXT_TEMPLATE.template_str


def _tokens(found: Iterable[Found]) -> float:
    return float(sum(one.hit.tokens for one in found))
