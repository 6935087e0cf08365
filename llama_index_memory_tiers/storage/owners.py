"""The read-only view of one owner that blocks are given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from llama_index_memory_tiers.moments import from_microseconds
from llama_index_memory_tiers.records import (
    Record,
    StoredMessage,
)
from llama_index_memory_tiers.storage.index import (
    Hit,
    IndexQuery,
)
from llama_index_memory_tiers.storage.made import Take
from llama_index_memory_tiers.storage.owner_keys import agent_key
from llama_index_memory_tiers.storage.parts import Vector, Visits
from llama_index_memory_tiers.storage.records import RecalledMessage, RecordStore


class OwnerReader:
    """Read-only view of one owner's memories, as blocks are given it.

    Args:
        store: Where.
        owner: Whose.
        block: Key of the block that reads.
    """

    def __init__(self, store: RecordStore, owner: str, block: str) -> None:
        self._store = store
        self.owner = owner
        self._block = block

    async def records(self, *kinds: str, limit: int | None = None, past: bool = False) -> list[Record]:
        """Live records that this block wrote, oldest first; with a limit the newest of them, with `past` all."""
        return await self._store.records(self.owner, kinds=kinds, block=self._block, limit=limit, past=past)

    async def search(self, query: IndexQuery, *, model: str = "") -> list[Hit]:
        """Candidates, best first; see `RecordStore.search`."""
        return await self._store.search(self.owner, model, query)

    async def speakers(self, *, model: str = "") -> tuple[str, ...]:
        """Who is heard in this owner's records; see `OwnerSearch.speakers`."""
        return await self._store.finder.speakers(self.owner, model)

    async def search_all(self, queries: Iterable[IndexQuery], *, model: str = "") -> list[list[Hit]]:
        """Several searches of one state of the records; see `RecordStore.search_all`."""
        return await self._store.search_all(self.owner, model, queries)

    async def hits_of(self, scores: Mapping[str, float]) -> list[Hit]:
        """Candidates of another index; see `RecordStore.hits_of`."""
        return await self._store.hits_of(self.owner, scores)

    async def messages_of(self, hits: Sequence[Hit]) -> list[RecalledMessage]:
        """Messages behind candidates; see `RecordStore.messages_of`."""
        return await self._store.messages_of(self.owner, hits)

    async def records_of(self, hits: Sequence[Hit]) -> list[Record]:
        """Records behind candidates; see `RecordStore.records_of`."""
        return await self._store.records_of(self.owner, hits)

    async def records_by_hit(self, hits: Sequence[Hit]) -> dict[int, Record]:
        """Records behind candidates by the id of the hit; see `RecordStore.records_by_hit`."""
        return await self._store.records_by_hit(self.owner, hits)

    async def remembered(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """What was made from the owner's records, made anew whenever they have changed.

        Args:
            name: What it is.
            make: Makes it by reading this owner's records only.

        Returns:
            The newest one; shared, so not to be changed by its readers but in ways that all of them may see.
        """
        return await self._store.made.remembered((self.owner, self._block, name), make)

    async def followed(self, name: str, kinds: Sequence[str], take: Take) -> Any:
        """What was made from the owner's records, brought up to date with those that have changed.

        Args:
            name: What it is.
            kinds: The kinds of records that it is made from; none of them may expire.
            take: Gets the value so far, or `None`, and the records that have changed since, those that left among
                them, oldest first and without their sources; answers a new value.

        Returns:
            The newest one; shared, so not to be changed.
        """
        return await self._store.made.followed((self.owner, self._block, name), kinds, take)

    def now(self) -> datetime:
        """The storage's clock."""
        return from_microseconds(self._store.now())

    async def light(self, *kinds: str) -> list[Record]:
        """Live records that this block wrote, oldest first, without their sources."""
        return await self._store.parts.of_kinds(self.owner, self._block, kinds)

    async def history(self, *kinds: str) -> list[Record]:
        """All records that this block wrote, superseded and put aside ones too, oldest first, without their sources."""
        return await self._store.parts.of_kinds(self.owner, self._block, kinds, live=False)

    async def by_ids(self, ids: Sequence[str]) -> list[Record]:
        """Records of this owner, whatever became of them, with their sources."""
        return await self._store.parts.by_ids(self.owner, ids)

    async def parts_of(self, ids: Sequence[str], kind: str) -> list[Record]:
        """Live parts of records, such as the pages of segments, oldest first, without their sources."""
        return await self._store.parts.parts_of(self.owner, ids, kind)

    async def shared(self, agent_id: str, model: str, limit: int) -> list[tuple[Record, Vector | None]]:
        """What an agent may tell of what others taught it: the newest live records of this block, with embeddings."""
        return await self._store.parts.shared(agent_key(agent_id), self.owner, self._block, model, limit)

    async def latest(self, kind: str, sid: int, upto: int) -> Record | None:
        """The record of this block and kind that knows the newest message of a session up to a place."""
        return await self._store.parts.latest(self.owner, self._block, kind, sid, upto)

    async def vectors(self, ids: Sequence[str], model: str) -> dict[str, Any]:
        """Embeddings of records, shape (dimensions,) each; those without one are missing."""
        return await self._store.parts.vectors(self.owner, ids, model)

    async def means(self, ids: Sequence[str], kind: str, model: str) -> dict[str, Any]:
        """Mean embeddings of the live parts of records; those of which a part has none by this model are missing."""
        return await self._store.parts.means(self.owner, ids, kind, model)

    async def messages_behind(self, ids: Sequence[str]) -> dict[str, list[StoredMessage]]:
        """The messages that records come from, in the order of the log."""
        return await self._store.parts.messages_behind(self.owner, ids)

    async def visits(self, kind: str, ids: Sequence[str] | None = None) -> dict[str, Visits]:
        """How often records of a kind, or these, were shown; those that never were are missing."""
        return await self._store.parts.visits(self.owner, kind, ids)
