"""What a heat block offers for a context: the profile, knowledge of both sides, and pages in two stages."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import iscoroutinefunction

from pydantic import Field, field_validator

from llama_index_memory_tiers.blocks.base import Query
from llama_index_memory_tiers.blocks.heat.library import library_of
from llama_index_memory_tiers.blocks.heat.models import ModelledBlock
from llama_index_memory_tiers.blocks.heat.promotion import AGENT, USER, side
from llama_index_memory_tiers.blocks.heat.recall import (
    RecallRules,
    Shelf,
    choose_knowledge,
    choose_pages,
    fill_shelf,
    knowledge_item,
    note_volume,
    page_item,
    pages_of,
    profile_item,
    question,
)
from llama_index_memory_tiers.blocks.heat.segments import Probe, Volume
from llama_index_memory_tiers.blocks.heat.sharing import SharePolicy, distinct
from llama_index_memory_tiers.budget import Item
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.heat import Scale
from llama_index_memory_tiers.records import Record, Scope
from llama_index_memory_tiers.storage import OwnerReader, codec


class RecallingBlock(ModelledBlock):
    """A block that recalls what is filed by topic.

    Args:
        long_term_knowledge_capacity: Pieces of knowledge on each side; default 100.
        retrieval_queue_capacity: Pages that are recalled; default 7.
        share: Which statements an agent may tell all its users; default none.
    """

    long_term_knowledge_capacity: int = Field(default=100, ge=1)
    retrieval_queue_capacity: int = Field(default=7, ge=1)
    share: SharePolicy | None = Field(default=None, exclude=True)

    @field_validator("share")
    @classmethod
    def _answers_at_once(cls, share: SharePolicy | None) -> SharePolicy | None:
        if iscoroutinefunction(share) or iscoroutinefunction(getattr(share, "__call__", None)):  # noqa: B004  # its kind
            raise ConfigurationError(
                f"share={share!r:.100} was given to {cls.__name__}.",
                allowed="A share policy is 'unnamed', or a callable that answers True or False at once, not async.",
                remedy="Pass a plain function, or leave share out to share nothing.",
            )
        return share

    @property
    def hears_others(self) -> bool:
        """Whether other users' agents may have told something meanwhile."""
        return self.share is not None

    async def recall(self, query: Query, reader: OwnerReader) -> Sequence[Item]:
        """Offer the profile, then knowledge and pages that have to do with the request, best first."""
        shelf: Shelf = await reader.remembered("shelf", lambda: fill_shelf(reader, self._model))
        shown = [profile_item(shelf.profile)] if shelf.profile is not None else []
        text = codec.storable(query.text)
        if not text.strip():
            return shown
        scale = await self._scaled_quietly(query)
        asked = question(text, await self._query_vector(text, query))
        rules = RecallRules(pages=self.retrieval_queue_capacity, literal=self.policy == "memoryos")
        pages = await self._recalled_pages(asked, scale, rules, query, reader)
        user = [pair for pair in shelf.known if side(pair[0]) == USER]
        agent = await self._of_agent(query.scope, reader, shelf)
        known = [
            knowledge_item(*pair) for whose in (user, agent) for pair in choose_knowledge(asked, whose, scale, rules)
        ]
        return [*shown, *sorted([*pages, *known], key=lambda item: -item.score)]

    async def _of_agent(self, scope: Scope, reader: OwnerReader, shelf: Shelf) -> list[tuple[Record, Volume]]:
        """What the agent learnt from this owner, and what it may tell of what it learnt from others."""
        mine = [pair for pair in shelf.known if side(pair[0]) == f"{AGENT}/{scope.agent_id or ''}"]
        if self.share is None or scope.agent_id is None:
            return mine
        others = await reader.shared(scope.agent_id, self._model, self.long_term_knowledge_capacity)
        pool = [*((one, note_volume(one, vector)) for one, vector in others), *mine]
        left = distinct(record for record, _ in pool)
        return [pair for pair in pool if pair[0].id in left]

    async def _recalled_pages(
        self, asked: Probe, scale: Scale, rules: RecallRules, query: Query, reader: OwnerReader
    ) -> list[Item]:
        library = await library_of(reader, self._model)
        chosen = library.about(asked, scale, least=rules.least, most=rules.segments, literal=rules.literal)
        volumes = await pages_of(library, [id_ for id_, _ in chosen], reader)
        best = choose_pages(asked, volumes, scale, rules)
        # Texts come from SQL whatever is remembered, so that nothing that was forgotten is shown.
        ids = [id_ for id_, _ in best]
        messages = await reader.messages_behind(ids)
        there = {page.id: page for page in await reader.by_ids(ids) if page.live}
        items = [page_item(there[id_], messages.get(id_, []), score) for id_, score in best if id_ in there]
        return [item for item in items if item.sources and not item.sources <= query.visible]
