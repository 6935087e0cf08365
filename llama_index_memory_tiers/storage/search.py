"""Search among one owner's records: the index in RAM, or one outside the database."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.errors import embedding_mismatch
from llama_index_memory_tiers.events import EmbeddingMismatch, emit
from llama_index_memory_tiers.storage.catch_up import OwnerIndexes
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.index import (
    Hit,
    IndexQuery,
    OwnerIndex,
)
from llama_index_memory_tiers.storage.schema import UNFINISHED, Tables

_logger = logging.getLogger(__name__)


class Outside(Protocol):
    """An index outside the database; see `OutsideSearch`."""

    async def search(self, owner: str, model: str, query: IndexQuery) -> list[Hit] | None:
        """Candidates, or `None` when the owner index is to answer."""
        ...

    async def speakers(self, owner: str, model: str) -> tuple[str, ...] | None:
        """Who is heard in an owner's records, or `None` when the owner index is to answer."""
        ...

    def soon(self, owner: str) -> None:
        """Something about this owner has changed."""
        ...

    def drop(self, owners: Collection[str]) -> None:
        """Let what is held of owners go."""
        ...


@dataclass(frozen=True, slots=True)
class StoredModel:
    """An embedding model as its vectors show it: name and dimensions."""

    model: str
    dimensions: int


class OwnerSearch:
    """Finds candidates; texts come from `RecordStore`.

    Args:
        database: Where.
        tables: The tables.
        indexes: The owner indexes.
    """

    def __init__(self, database: Database, tables: Tables, indexes: OwnerIndexes) -> None:
        self._database = database
        self._tables = tables
        self._indexes = indexes
        self.outside: Outside | None = None

    def tell(self, owner: str) -> None:
        """Something about this owner has changed: the index outside is to know."""
        if self.outside is not None:
            self.outside.soon(owner)

    def drop(self, owners: Collection[str]) -> None:
        """Let the indexes of owners go, and what is held of the index outside."""
        self._indexes.drop(owners)
        if self.outside is not None:
            self.outside.drop(owners)

    async def search_all(self, owner: str, model: str, queries: Iterable[IndexQuery]) -> list[list[Hit]]:
        """Several searches of one state of the records, which is looked up once.

        Args:
            owner: Whose; nobody else's rows are near.
            model: Name of the embedding model whose vectors count; '' for none.
            queries: What to look for.

        Returns:
            For each query candidates, best first.

        Raises:
            EmbeddingMismatchError: The records were embedded with another model.
        """
        found: list[list[Hit]] = []
        index: OwnerIndex | None = None
        for query in queries:
            hits = None if self.outside is None else await self.outside.search(owner, model, query)
            if hits is None:
                index = await self._indexes.up_to_date(owner, model) if index is None else index
                if query.vector is not None and index.embedded < len(index) and not index.compared:
                    await self._compare(index, owner, model, query)
                hits = index.search(query)
            found.append(hits)
        return found

    async def speakers(self, owner: str, model: str) -> tuple[str, ...]:
        """Who is heard in an owner's records; without a statement when they were searched before, as of then.

        Args:
            owner: Whose records.
            model: Name of the embedding model whose vectors count; '' for none.

        Returns:
            Names, and roles of those without one.
        """
        outside = None if self.outside is None else await self.outside.speakers(owner, model)
        if outside is not None:
            return outside
        index = self._indexes.known(owner, model)
        return (await self._indexes.up_to_date(owner, model) if index is None else index).speakers

    async def _compare(self, index: OwnerIndex, owner: str, model: str, query: IndexQuery) -> None:
        """Find out at the first question whether records were embedded with another model.

        Raises:
            EmbeddingMismatchError: All that were embedded.
        """
        other = await self.stored_with(owner, blocks=query.blocks, but=model)
        if other is not None:
            size = len(query.vector or ())
            mismatch = embedding_mismatch(
                stored_dimensions=other.dimensions,
                asked_dimensions=size,
                stored_model=other.model,
                asked_model=model,
            )
            _logger.warning(
                "memories were embedded with %r and are asked with %r: areindex() embeds them again",
                other.model,
                model,
                extra={"stored": other.model, "asked": model},
            )
            if not index.embedded:
                raise mismatch
            emit(
                EmbeddingMismatch(
                    block=next(iter(query.blocks or ()), ""),
                    error=type(mismatch).__name__,
                    stored_dimensions=other.dimensions,
                    asked_dimensions=size,
                    stored_model=other.model,
                    asked_model=model,
                    remedy=mismatch.remedy,
                )
            )
        index.compared = True

    async def stored_with(
        self, owner: str, *, blocks: frozenset[str] | None = None, but: str | None = None
    ) -> StoredModel | None:
        """The embedding model of an owner's newest embedded record.

        Args:
            owner: Whose.
            blocks: Of these blocks' records, `None` for all.
            but: Look for any other model than this one.

        Returns:
            Name and size, or `None`.
        """
        r, e = self._tables.records, self._tables.embeddings
        query = (
            select(e.c.model, func.length(e.c.vec).label("bytes"))
            .join_from(e, r, r.c.id == e.c.record_id)
            .where(r.c.owner == owner, ~e.c.model.startswith(UNFINISHED, autoescape=True))
            .order_by(r.c.rev.desc())
            .limit(1)
        )
        if blocks is not None:
            query = query.where(r.c.block.in_(sorted(blocks)))
        if but is not None:
            query = query.where(e.c.model != but)

        async def work(connection: AsyncConnection) -> StoredModel | None:
            row = (await connection.execute(query)).first()
            return None if row is None else StoredModel(row.model, row.bytes // 2)

        return await self._database.read(work)
