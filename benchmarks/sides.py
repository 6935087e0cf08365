"""The two that are compared, each as its documentation sets it up, with the same embedding model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from llama_index.core.memory import Memory
from llama_index.core.memory import VectorMemoryBlock as StockVectorMemoryBlock
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import AsyncQdrantClient
from qdrant_client.models import Distance, VectorParams
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.testing import WordLlamaEmbedding

POOL = 5  # connections of either side


class Side(Protocol):
    """Memories of many sessions in one process, over one database."""

    name: str

    async def open(self) -> None:
        """Make what is asked before anything is stored."""
        ...

    def memory(self, session: str, **limits: Any) -> Memory:
        """The memory of a session, which belongs to a user of its own."""
        ...

    async def settle(self) -> None:
        """Wait until everything that runs in the background has ended."""
        ...

    async def close(self) -> None:
        """Close the database."""
        ...


class Ours:
    """`TieredMemory` with a `VectorMemoryBlock` that absorbs each turn in the background.

    Args:
        address: A path or a URI.
        vectors: Whether there is such a block.
    """

    name = "TieredMemory"

    def __init__(self, address: str | Path, *, vectors: bool) -> None:
        self._storage = Storage(address, pool_size=POOL)
        self._blocks = [VectorMemoryBlock(embed_model=WordLlamaEmbedding())] if vectors else []
        self._made: dict[str, TieredMemory] = {}
        self._first: dict[str, TieredMemory] = {}

    async def open(self) -> None:
        await self._storage.aopen()

    def memory(self, session: str, **limits: Any) -> TieredMemory:
        first = self._first.get(repr(limits))
        if first is None:
            first = TieredMemory(
                storage=self._storage, user_id="first", session_id="first", memory_blocks=self._blocks, **limits
            )
            self._first[repr(limits)] = first
        made = self._made[session] = first.for_session(session, user_id=session)
        return made

    async def settle(self) -> None:
        for memory in self._made.values():
            assert (await memory.aflush()).complete

    async def close(self) -> None:
        for memory in self._first.values():
            await memory.aclose()
        await self._storage.aclose()


class Stock:
    """`Memory` over `SQLAlchemyChatStore`, with `VectorMemoryBlock` on Qdrant's local mode, which keeps a folder.

    Args:
        uri: Of the database.
        directory: Of Qdrant.
        vectors: Whether there is such a block.
    """

    name = "stock Memory"

    def __init__(self, uri: str, directory: Path, *, vectors: bool) -> None:
        self._vectors = vectors
        self._engine: AsyncEngine = create_async_engine(uri, pool_size=POOL, max_overflow=0)
        self._client = AsyncQdrantClient(path=str(directory))
        self._model = WordLlamaEmbedding()

    async def open(self) -> None:
        size = len(self._model.get_text_embedding("size"))
        # Not left to the first flush: until then a question is an error.
        await self._client.create_collection("memories", VectorParams(size=size, distance=Distance.COSINE))
        self._store = QdrantVectorStore("memories", aclient=self._client)

    def memory(self, session: str, **limits: Any) -> Memory:
        # A block of its own: one that is shared keeps the filter of the first session that asked.
        vectors = [StockVectorMemoryBlock(vector_store=self._store, embed_model=self._model)] if self._vectors else []
        return Memory.from_defaults(
            session_id=session, async_engine=self._engine, table_name="stock", memory_blocks=vectors, **limits
        )

    async def settle(self) -> None:
        """Stock does everything within its calls."""

    async def close(self) -> None:
        await self._client.close()
        await self._engine.dispose()


def pair(directory: Path, name: str, postgres: str | None = None, *, vectors: bool = True) -> Sequence[Side]:
    """Both sides on databases of their own.

    Args:
        directory: For files.
        name: Of the run.
        postgres: URI of a server instead of SQLite files.
        vectors: Whether both have a block of vectors.
    """
    qdrant = directory / f"{name}-qdrant"
    ours, stock = (postgres, postgres) if postgres is not None else (directory / f"{name}-ours.db", "")
    stock = stock or f"sqlite+aiosqlite:///{directory / f'{name}-stock.db'}"
    return Ours(ours, vectors=vectors), Stock(stock, qdrant, vectors=vectors)
