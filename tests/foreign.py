"""Stores and blocks as third parties write them, for tests of what we do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.schema import BaseNode
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult
from pydantic import Field


class DictStore(AsyncDBChatStore):
    """The least that a custom chat store needs: dicts of lists, which hand out the very objects they keep."""

    active: dict[str, list[ChatMessage]] = Field(default_factory=dict)
    old: dict[str, list[ChatMessage]] = Field(default_factory=dict)

    def _rows(self, key: str, status: MessageStatus | None) -> list[ChatMessage]:
        if status is None:
            return [*self.old.get(key, []), *self.active.get(key, [])]
        return (self.active if status is MessageStatus.ACTIVE else self.old).setdefault(key, [])

    async def get_messages(
        self,
        key: str,
        status: MessageStatus | None = MessageStatus.ACTIVE,
        limit: int | None = None,
        offset: int | None = None,
    ) -> list[ChatMessage]:
        first = offset or 0
        return self._rows(key, status)[first : None if limit is None else first + limit]

    async def count_messages(self, key: str, status: MessageStatus | None = MessageStatus.ACTIVE) -> int:
        return len(self._rows(key, status))

    async def add_message(self, key: str, message: ChatMessage, status: MessageStatus = MessageStatus.ACTIVE) -> None:
        self._rows(key, status).append(message)

    async def add_messages(
        self, key: str, messages: list[ChatMessage], status: MessageStatus = MessageStatus.ACTIVE
    ) -> None:
        self._rows(key, status).extend(messages)

    async def set_messages(
        self, key: str, messages: list[ChatMessage], status: MessageStatus = MessageStatus.ACTIVE
    ) -> None:
        self._rows(key, status)[:] = messages

    async def delete_message(self, key: str, idx: int) -> ChatMessage | None:
        return self._rows(key, MessageStatus.ACTIVE).pop(idx)

    async def delete_messages(self, key: str, status: MessageStatus | None = None) -> None:
        for one in (MessageStatus.ACTIVE, MessageStatus.ARCHIVED) if status is None else (status,):
            self._rows(key, one).clear()

    async def delete_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
        rows = self._rows(key, MessageStatus.ACTIVE)
        gone, rows[:] = rows[:n], rows[n:]
        return gone

    async def archive_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
        gone = await self.delete_oldest_messages(key, n)
        self._rows(key, MessageStatus.ARCHIVED).extend(gone)
        return gone

    async def get_keys(self) -> list[str]:
        return sorted({*self.active, *self.old})


class Says(BaseMemoryBlock[Any]):
    """Answers with its content, or with `shade` when the caller passes one; writes down what it is given."""

    name: str = "Says"
    content: Any = None
    heard: list[str | None] = Field(default_factory=list)

    async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> Any:
        return kwargs.get("shade", self.content)

    async def _aput(self, messages: list[ChatMessage]) -> None:
        self.heard.extend(message.content for message in messages)


class ListStore(BasePydanticVectorStore):
    """A vector store that finds everything, in the order in which it came; without `scores` it tells none."""

    stores_text: bool = True
    is_embedding_query: bool = True
    kept: dict[str, BaseNode] = Field(default_factory=dict)
    asked: list[Any] = Field(default_factory=list)
    scores: bool = True

    @property
    def client(self) -> Any:
        return self

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        self.kept.update({node.node_id: node for node in nodes})
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        self.kept.pop(ref_doc_id, None)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        self.asked.append(query.model_copy(deep=True) if hasattr(query, "model_copy") else query)
        nodes = list(self.kept.values())[: query.similarity_top_k]
        scores = [0.9 - 0.1 * rank for rank in range(len(nodes))] if self.scores else None
        return VectorStoreQueryResult(nodes=nodes, similarities=scores, ids=[node.node_id for node in nodes])
