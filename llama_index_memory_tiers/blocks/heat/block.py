"""HeatMemoryBlock: pages, segments, promotion and two-stage recall, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Literal

from pydantic import Field, PrivateAttr

from llama_index_memory_tiers.blocks.desk import Holder
from llama_index_memory_tiers.blocks.heat import hands
from llama_index_memory_tiers.blocks.heat.analysis import Analyst, Before, told_pages
from llama_index_memory_tiers.blocks.heat.filing import Filing, FilingRules, file_pages
from llama_index_memory_tiers.blocks.heat.library import library_of
from llama_index_memory_tiers.blocks.heat.merging import Calls, HeatDraft, merge_heat, reads_of
from llama_index_memory_tiers.blocks.heat.pages import KIND as PAGE
from llama_index_memory_tiers.blocks.heat.pages import Extension, Page, cut, extended, make_page
from llama_index_memory_tiers.blocks.heat.promotion import KNOWLEDGE, PROFILE, USER, Promotion, side
from llama_index_memory_tiers.blocks.heat.recalling import RecallingBlock
from llama_index_memory_tiers.blocks.heat.segments import KIND as SEGMENT
from llama_index_memory_tiers.blocks.heat.segments import Likeness, Segment, read_segment
from llama_index_memory_tiers.blocks.heat.sharing import approved
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.events import TiersReport
from llama_index_memory_tiers.extraction.insight import Meter
from llama_index_memory_tiers.extraction.models import llm_name
from llama_index_memory_tiers.heat import Scale, Tenant, eviction_order
from llama_index_memory_tiers.records import Batch, Changes, NewRecord, Reads, Record, Scope, StoredMessage
from llama_index_memory_tiers.retention import Holding
from llama_index_memory_tiers.storage import OwnerReader, Visits, codec, new_id

# A segment takes no more pages, and the next one on its topic begins: the cost of looking into it stays bounded.
_SEGMENT_PAGES = 100
# So many segments get the direction that their records lack along with a batch.
_DIRECTED = 50
# So many segments are compared in a thread, so that the loop stays free.
_THREAD_SEGMENTS = 100
_SPARE_LEAVERS = 8
# What is left of the time of a batch when no other analysis is begun.
_ANALYSIS_SHARE = 0.5


class HeatMemoryBlock(RecallingBlock):
    """Remembers by topic: what one keeps coming back to becomes a profile and knowledge, what cools down leaves.

    Pages (a question with its answer) are filed under segments (topics). A segment's heat grows with its pages and
    visits and cools with time; a hot one is analysed into long-term memory. After MemoryOS (Kang et al., 2025), with
    its names and defaults. Without a language model there are pages and segments, no profile and no knowledge;
    without an embedding model topics are told by words.

    Args:
        llm: The model; default that of `Settings` if you have set it; `None` works without.
        embed_model: Default that of `Settings` if you have set it; `None` goes by words.
        short_term_capacity: The newest pairs, held back while the chat goes on; default 10.
        mid_term_capacity: Segments that are kept; the rest is put aside, not deleted; default 2 000.
        long_term_knowledge_capacity: Pieces of knowledge about the user, and as many of an agent; default 100.
        retrieval_queue_capacity: Pages that are recalled; default 7.
        mid_term_heat_threshold: Heat from which a segment is analysed; default 5.
        mid_term_similarity_threshold: Score from which a page joins a segment; means the same for every embedding
            model; default .6.
        heat_alpha: Weight of a visit, default 1.
        heat_beta: Weight of a page, default 1.
        heat_gamma: Weight of the recency, default 1.
        heat_tau_hours: After so many hours the recency has fallen to 1/e; default 24.
        grace_hours: Younger segments leave last; default 24.
        knowledge_overflow: What leaves when there is too much knowledge: what is unimportant and old
            (`importance`), or the oldest (`fifo`).
        share: Which statements an agent may tell all its users: `unnamed`, those that do not speak of the user as far
            as words show (see `AgentStatement.names_user`), or a callable that decides for each `AgentStatement`. They
            are withdrawn with what they came from. Default: nothing that was said to an agent by one user is told to
            another. What waits is learnt as the agent of the memory that absorbs it: give agents that serve the same
            users blocks with names of their own.
        policy: `heat`, or `memoryos` for the original's rules: raw cosines, Jaccard in recall, least frequently used
            leaves, first in first out, only the hottest segment is analysed.
        model_seconds: Bound of one model call; default 30.
        max_calls_a_day: Model calls per owner and day (UTC); then batches wait. Default no bound.
    """

    name: str = "HeatMemory"
    short_term_capacity: int = Field(default=10, ge=0, le=100)
    mid_term_capacity: int = Field(default=2000, ge=1)
    mid_term_heat_threshold: float = Field(default=5.0, gt=0)
    mid_term_similarity_threshold: float = Field(default=0.6, gt=0)
    heat_alpha: float = Field(default=1.0, ge=0)
    heat_beta: float = Field(default=1.0, ge=0)
    heat_gamma: float = Field(default=1.0, ge=0)
    heat_tau_hours: float = Field(default=24.0, gt=0)
    grace_hours: float = Field(default=24.0, ge=0)
    knowledge_overflow: Literal["importance", "fifo"] | None = None
    absorb_every: int = Field(default=10, ge=1)
    batch_tokens: int = Field(default=8000, ge=1)
    timeout_seconds: float = Field(default=180.0, gt=0)
    _new_id: Callable[[], str] = PrivateAttr(default_factory=lambda: new_id)

    @property
    def uses_model(self) -> bool:  # type: ignore[override]  # of ours it is the only one that may do without
        """Whether absorbing costs calls of a language model."""
        return self.llm is not None

    @property
    def hold_back(self) -> int:
        """The newest pairs belong to the short tier."""
        return self.short_term_capacity

    # -- absorbing -------------------------------------------------------------------------------------------

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> HeatDraft | None:
        """Cut a batch into pages, file them, and analyse what is hot."""
        until = asyncio.get_running_loop().time() + self.timeout_seconds * _ANALYSIS_SHARE
        groups = cut(batch.messages)
        if not groups.pages and not groups.rest:
            return None
        before = await self._before(batch, reader)
        late: tuple[Extension, ...] = ()
        waiting = list(groups.pages)
        if groups.rest and before is None:
            waiting.insert(0, groups.rest)
        elif groups.rest and before is not None:
            late = (await self._extended(before, groups.rest, batch.scope, reader, counter),)
        now = reader.now()
        calls = Calls(self._meter_id(reader.owner), f"{now:%Y-%m-%d}")
        meter = await self._meter(reader, calls, counter)
        scale = await self._scaled()
        pages = await self._embedded([make_page(self.key, group) for group in waiting], batch.scope)
        pages = [replace(page, tokens=counter.text(page.text)) for page in pages]
        try:
            pages = await told_pages(
                self.llm,
                pages,
                before,
                Likeness(scale),
                meter,
                seconds=self.model_seconds,
                failed=lambda error: self._failed(batch.scope, error),
            )
            draft = await self._filed(batch, reader, pages, before, meter, counter, scale, calls, until)
        except BaseException:
            self._unsettle(reader.owner, calls.day, meter.calls)
            raise
        return replace(draft, extended=late)

    async def _before(self, batch: Batch, reader: OwnerReader) -> Before | None:
        """The page in front of a batch: chains go on over restarts."""
        record = await reader.latest(PAGE, batch.sid, batch.lo) if batch.lo else None
        if record is None:
            return None
        vectors = await reader.vectors([record.id], self._model)
        messages = await reader.messages_behind([record.id]) if self.llm is not None else {}
        return Before(record, vectors.get(record.id), tuple(messages.get(record.id, ())))

    async def _extended(
        self, before: Before, rest: Sequence[StoredMessage], scope: Scope, reader: OwnerReader, counter: TokenCounter
    ) -> Extension:
        """The page in front of a batch, with the answer that the batch begins with."""
        page = before.record
        said = before.messages or (await reader.messages_behind([page.id])).get(page.id, ())
        (vector,) = await self._vectors([codec.told([*said, *rest])], scope)
        size = counter.text(codec.told(rest))
        return extended(page, rest, before=before.vector, vector=vector, model=self._model, tokens=size)

    async def _filed(
        self,
        batch: Batch,
        reader: OwnerReader,
        pages: Sequence[Page],
        before: Before | None,
        meter: Meter,
        counter: TokenCounter,
        scale: Scale,
        calls: Calls,
        until: float,
    ) -> HeatDraft:
        now = reader.now()
        library = await library_of(reader, self._model)
        last = before.record.parent if before is not None else None
        file = partial(file_pages, pages, library, self._rules(scale), now, last)
        filings, changed = await asyncio.to_thread(file) if len(library.segments) > _THREAD_SEGMENTS else file()
        state = library.segments | changed
        surplus = max(0, len(state) - self.mid_term_capacity)
        # All visits are read only where all heats are needed.
        visits = await reader.visits(SEGMENT, None if surplus or self.llm is not None else list(changed))
        promotions = await self._promotions(batch, reader, state, filings, visits, meter, counter, until, now)
        return HeatDraft(
            session_id=batch.scope.session_id,
            block=self.key,
            now=now,
            model=self._model,
            weights=self._weights,
            threshold=self.mid_term_heat_threshold,
            capacity=self.long_term_knowledge_capacity,
            overflow=self._overflow,
            calls=replace(calls, calls=meter.calls, tokens=meter.tokens),
            filings=tuple(filings),
            promotions=tuple(promotions),
            surplus=surplus,
            leaving=await asyncio.to_thread(self._leaving, state, surplus, visits, now) if surplus else {},
            visits={one: seen for one, seen in visits.items() if one in changed},
            directed=library.lacking(changed, _DIRECTED),
        )

    async def _promotions(
        self,
        batch: Batch,
        reader: OwnerReader,
        state: Mapping[str, Segment],
        filings: Sequence[Filing],
        visits: Mapping[str, Visits],
        meter: Meter,
        counter: TokenCounter,
        until: float,
        now: datetime,
    ) -> list[Promotion]:
        if self.llm is None:
            return []
        fresh = [one for one in state.values() if one.unanalysed]
        heats = {one.id: one.parts(visits.get(one.id), now, self._weights).total for one in fresh}
        hot = [one for one in fresh if heats[one.id] >= self.mid_term_heat_threshold]
        hot.sort(key=lambda one: (-heats[one.id], one.id))
        analyst = Analyst(
            llm=self.llm,
            model=llm_name(self.llm),
            reader=reader,
            meter=meter,
            count=counter.text,
            new_id=self._new_id,
            agent=batch.scope.agent_id,
            tokens=self.batch_tokens,
            seconds=self.model_seconds,
            until=until,
            failed=lambda error: self._failed(batch.scope, error),
        )
        counts = {one: seen.count for one, seen in visits.items()}
        found = await analyst.promote(hot[:1] if self.policy == "memoryos" else hot, filings, counts, now)
        new = [record for one in found for record in (*one.knowledge, one.profile) if record is not None]
        shared = {note.id: note for note in await self._approved(new, batch.scope, reader)}
        found = [replace(one, knowledge=tuple(shared[note.id] for note in one.knowledge)) for one in found]
        return await self._with_vectors(found, batch.scope)

    async def _approved(self, new: Sequence[NewRecord], scope: Scope, reader: OwnerReader) -> list[NewRecord]:
        """Mark what the agent may tell all its users."""
        if self.share is None or not any(side(record) != USER for record in new):
            return list(new)
        known: list[Record | NewRecord] = [*await reader.light(KNOWLEDGE, PROFILE), *new]
        about_user = [record for record in known if side(record) == USER]
        return approved(new, self.share, scope, about_user, lambda error: self._failed(scope, error))

    def _leaving(
        self, state: Mapping[str, Segment], surplus: int, visits: Mapping[str, Visits], now: datetime
    ) -> dict[str, float]:
        tenants = [
            Tenant(
                one.id,
                one.parts(visits.get(one.id), now, self._weights).total,
                one.created_at,
                visits[one.id].count if one.id in visits else 0,
                pinned=one.pinned,
            )
            for one in state.values()
        ]
        order = eviction_order(tenants, now, grace_hours=self.grace_hours, policy=self.policy)
        heats = {one.id: one.heat for one in tenants}
        return {id_: heats[id_] for id_ in order[: surplus + _SPARE_LEAVERS]}

    def reads(self, draft: HeatDraft) -> Reads:
        """The segments that the draft changes, and long-term memory if it adds to it."""
        return reads_of(draft)

    def merge(self, draft: HeatDraft, records: Sequence[Record]) -> Changes:
        """File the pages, apply what was analysed, keep the bounds."""
        return merge_heat(draft, records)

    # -- settings --------------------------------------------------------------------------------------------

    def _rules(self, scale: Scale) -> FilingRules:
        ours = self.policy == "heat"
        return FilingRules(
            threshold=self.mid_term_similarity_threshold,
            model=self._model,
            scale=scale,
            most_pages=_SEGMENT_PAGES if ours else None,
            follow=ours,
        )

    @property
    def _weights(self) -> dict[str, float]:
        return {
            "alpha": self.heat_alpha,
            "beta": self.heat_beta,
            "gamma": self.heat_gamma,
            "tau_hours": self.heat_tau_hours,
        }

    @property
    def _overflow(self) -> Literal["importance", "fifo"]:
        if self.knowledge_overflow is not None:
            return self.knowledge_overflow
        return "fifo" if self.policy == "memoryos" else "importance"

    # -- what may leave --------------------------------------------------------------------------------------

    def holding(self, record: Record, visits: Visits | None, now: datetime) -> Holding:
        """A record as seen by who decides what may leave; segments have a heat."""
        seen = super().holding(record, visits, now)
        if record.kind != SEGMENT:
            return replace(seen, side=side(record)) if record.kind == KNOWLEDGE else seen
        return replace(seen, heat=read_segment(record).parts(visits, now, self._weights).total)

    # -- by hand ---------------------------------------------------------------------------------------------

    @checked
    async def atiers(self, memory: Holder) -> TiersReport:
        """Look at the tiers of a memory's owner: counts, tokens, the hottest topics, the profile's version.

        Args:
            memory: The memory that uses this block.

        Returns:
            The report.
        """
        capacities = {
            "short": self.short_term_capacity,
            "middle": self.mid_term_capacity,
            "long": self.long_term_knowledge_capacity,
        }
        return await hands.tiers(memory.desk(self.name), capacities, self._weights)

    @checked
    async def aprofiles(self, memory: Holder) -> list[hands.ProfileVersion]:
        """All versions of the profile, oldest first."""
        return await hands.profile_versions(await memory.desk(self.name).reader())

    @checked
    async def aroll_back(self, memory: Holder, version: int) -> None:
        """Show an older version of the profile again, as a new version.

        Args:
            memory: The memory that uses this block.
            version: Its number.

        Raises:
            ConfigurationError: There is no such version.
        """
        await hands.roll_back(memory.desk(self.name), version)

    @checked
    async def aset_profile(self, memory: Holder, text: str) -> bool:
        """Write the profile by hand, as its next version.

        Args:
            memory: The memory that uses this block.
            text: One sentence a line; secrets are taken out.

        Returns:
            Whether it says anything that no version said.
        """
        return await hands.set_profile(memory.desk(self.name), text)

    @checked
    async def alearn(self, memory: Holder, notes: Sequence[tuple[datetime, str, bool]]) -> int:
        """Add knowledge by hand.

        Args:
            memory: The memory that uses this block.
            notes: For each when it was said (aware), the text, and whether it is about the assistant.

        Returns:
            How many were new.
        """
        desk = memory.desk(self.name)

        async def approve(records: Sequence[NewRecord], reader: OwnerReader) -> list[NewRecord]:
            return await self._approved(records, desk.scope, reader)

        return await hands.learn(desk, notes, self.long_term_knowledge_capacity, self._overflow, approve)

    @checked
    async def apin(self, memory: Holder, segment: str, *, pinned: bool = True) -> None:
        """Keep a segment whatever its heat; or, with `pinned=False`, no longer.

        Args:
            memory: The memory that uses this block.
            segment: Id of the segment, see `atiers`.
            pinned: Which.

        Raises:
            ConfigurationError: There is no such segment.
        """
        await hands.pin(memory.desk(self.name), segment, pinned=pinned)
