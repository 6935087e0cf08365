"""FactExtractionMemoryBlock: what a model found worth keeping, one record per fact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, ClassVar

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import LLM
from llama_index.core.memory.memory_blocks.fact import FactExtractionMemoryBlock as CoreFactExtractionMemoryBlock
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate, RichPromptTemplate
from pydantic import Field, PrivateAttr, field_validator, model_validator
from typing_extensions import Self

from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock
from llama_index_memory_tiers.blocks.consumer import Trigger
from llama_index_memory_tiers.blocks.desk import Holder
from llama_index_memory_tiers.blocks.embedding import embed_texts, question_vector, search, usable
from llama_index_memory_tiers.blocks.facts.changes import Move, decide
from llama_index_memory_tiers.blocks.facts.desk import Facts
from llama_index_memory_tiers.blocks.facts.merging import Condensed, FactsDraft, merge_moves, said_at
from llama_index_memory_tiers.blocks.facts.proposals import (
    Extractor,
    ask_extractor,
    moves_of_drafts,
    moves_of_proposals,
)
from llama_index_memory_tiers.blocks.facts.rendering import fact_item, scored, with_key, written_fact
from llama_index_memory_tiers.blocks.outages import is_outage
from llama_index_memory_tiers.budget import Item, TokenCounter
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.errors import EmbeddingError, ExtractionError
from llama_index_memory_tiers.events import BlockFailed
from llama_index_memory_tiers.extraction.facts import (
    FACT_CONDENSE_PROMPT,
    FACT_EXTRACTION_PROMPT,
    PROMPT_VERSION,
    FactDraft,
    Transcript,
    condense_facts,
    extract_facts,
    parse_answer,
    transcribe,
)
from llama_index_memory_tiers.extraction.models import llm_name, needed_llm
from llama_index_memory_tiers.instructions import looks_like_instruction
from llama_index_memory_tiers.records import Batch, Changes, NewRecord, Place, Reads, Record, Scope, StoredMessage
from llama_index_memory_tiers.sameness import words
from llama_index_memory_tiers.storage import Hit, IndexQuery, OwnerReader, codec, new_id
from llama_index_memory_tiers.text import analyse

_KIND = "fact"
# The model needs to see what it need not find again; merges refuse duplicates of older facts anyway.
_KNOWN_TO_MODEL = 100
# Room after condensing, or each batch would need another call.
_CONDENSED_SHARE = 0.8


class FactExtractionMemoryBlock(TieredMemoryBlock, CoreFactExtractionMemoryBlock):
    """Remembers facts about the people who speak: one model call per batch, one more when there are too many.

    A model proposes and code decides: only a fact of the same subject and relation takes the place of another one, by
    when it was said and not by when it came, and what is over stays as history. `of(memory)` looks it up and changes
    facts by hand.

    Args:
        llm: The model; default is that of `Settings`, if one was set. Not needed with an `extractor`, unless facts
            are to be condensed.
        extractor: Your own function instead of a model, sync or async: a list of `StoredMessage` → `FactProposal`s.
        facts: Facts that are known from the start. They are settings like the prompts: shown always, to every
            user, in front of what was learnt, and neither counted nor condensed. What is learnt is in the storage
            only.
        max_facts: So many facts are kept. When there are more, one call condenses them; what is still too much, or
            all of it when the call brings nothing, is put aside by rule: the oldest first.
        fact_extraction_prompt_template: Your own request, which follows the conversation; variables
            `existing_facts` and `max_facts`.
        fact_condense_prompt_template: Your own request for a shorter list; the same variables.
        shown_facts: At most so many are shown: the relevant ones first, then the newest.
        embed_model: Finds relevant facts by meaning as well; without one, by words.
    """

    name: str = "ExtractedFacts"
    llm: LLM | None = None  # type: ignore[assignment]  # with an extractor there may be none
    extractor: Extractor | None = Field(default=None, exclude=True, repr=False)
    max_facts: int = Field(default=50, ge=1)
    fact_extraction_prompt_template: BasePromptTemplate = FACT_EXTRACTION_PROMPT
    fact_condense_prompt_template: BasePromptTemplate = FACT_CONDENSE_PROMPT
    shown_facts: int = Field(default=20, ge=1)
    embed_model: BaseEmbedding | None = None
    absorb_on: frozenset[Trigger] = frozenset({"turn", "flush", "idle"})
    absorb_every: int = Field(default=4, ge=1)
    uses_model: ClassVar[bool] = True
    stable: ClassVar[bool] = True
    _new_id: Callable[[], str] = PrivateAttr(default_factory=lambda: new_id)

    @field_validator("fact_condense_prompt_template", mode="before")
    @classmethod
    def _template(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return RichPromptTemplate(value) if "{{" in value and "}}" in value else PromptTemplate(value)

    @model_validator(mode="after")
    def _modelled(self) -> Self:
        if self.llm is None and self.extractor is None:
            self.llm = needed_llm(
                type(self).__name__,
                without="llm and extractor",
                remedy="Pass llm=… or extractor=…, set Settings.llm first, or leave this block out.",
            )
        return self

    @checked
    def of(self, memory: Holder) -> Facts:
        """The facts of a memory's owner, to be looked up and changed by hand.

        Args:
            memory: A `TieredMemory` that has this block.

        Returns:
            An object with `all`, `as_of`, `history`, `why`, `add`, `edit`, `pin`, `delete` and more.
        """
        return Facts(memory.desk(self.name), self)

    # -- absorbing -------------------------------------------------------------------------------------------

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> FactsDraft | None:
        """Ask for the facts of a batch, and for a shorter list when there are too many."""
        current = await reader.records(_KIND)
        moves = await self._moves(batch, current, counter)
        if not moves and len(current) <= self.max_facts:
            return None
        everything = await reader.records(_KIND, past=True)
        living = {record.id for record in current}
        expired = frozenset(record.id for record in everything if record.live and record.id not in living)
        outcome = decide(moves, everything)
        staying = [record for record in current if record.id not in outcome.ended]
        draft = FactsDraft(outcome.current, moves=tuple(moves), expired=expired)
        if len(staying) + len(draft.new) > self.max_facts:
            draft = await self._condense(staying, draft, counter)
        elif not (outcome.current or outcome.past or outcome.amended or outcome.ended):
            return None
        return await self._embedded(draft, batch.scope)

    async def _moves(self, batch: Batch, current: Sequence[Record], counter: TokenCounter) -> list[Move]:
        """What a batch says about facts; empty when there is nothing to read in it."""
        transcript = transcribe(batch.messages, batch.before)
        if not transcript.lines:
            return []
        if self.extractor is not None:
            proposals = await ask_extractor(self.extractor, transcript.lines)
            made = moves_of_proposals(proposals, transcript.lines, self._maker(counter, prompt="extractor", model=""))
        else:
            made = await self._asked(transcript.lines, transcript, current, counter)
        seeds = {words(text) for text in self.facts}
        return [move for move in made if move.record is None or words(move.record.text) not in seeds]

    async def _asked(
        self, lines: Sequence[StoredMessage], transcript: Transcript, current: Sequence[Record], counter: TokenCounter
    ) -> list[Move]:
        assert self.llm is not None  # noqa: S101  # there is no extractor
        custom = self.fact_extraction_prompt_template != FACT_EXTRACTION_PROMPT
        known = current[-_KNOWN_TO_MODEL:]
        drafts = await extract_facts(
            self.llm,
            transcript,
            [*self.facts, *(record.text if custom else with_key(record) for record in known)],
            max_facts=self.max_facts,
            template=self.fact_extraction_prompt_template,
        )
        # Seeds have numbers, too, but are settings: nothing replaces them. A custom prompt shows no numbers.
        ids = {} if custom else {at: record.id for at, record in enumerate(known, len(self.facts) + 1)}
        prompt = "custom" if custom else PROMPT_VERSION
        return moves_of_drafts(drafts, lines, ids, self._maker(counter, prompt=prompt, model=llm_name(self.llm)))

    def _maker(self, counter: TokenCounter, *, prompt: str, model: str) -> Callable[..., NewRecord]:
        return lambda draft, sources: self._record(draft, sources, counter, prompt=prompt, model=model)

    async def _condense(self, current: Sequence[Record], draft: FactsDraft, counter: TokenCounter) -> FactsDraft:
        old: list[Record | NewRecord] = [*(one for one in current if not one.data.get("pinned")), *draft.new]
        if self.llm is None:
            return draft  # the rule of eviction keeps the bound
        try:
            drafts = await condense_facts(
                self.llm,
                [one.text for one in old],
                max_facts=max(1, int(self.max_facts * _CONDENSED_SHARE)),
                template=self.fact_condense_prompt_template,
            )
        except ExtractionError:
            return draft
        except Exception as error:
            if is_outage(error):
                raise
            # The list may be more than the model takes: then no later try would do better, and the block would
            # never absorb anything again. The rule of eviction keeps the bound.
            return draft
        return self._condensed(drafts, old, draft, counter)

    def _condensed(
        self,
        drafts: Sequence[FactDraft],
        old: Sequence[Record | NewRecord],
        batch: FactsDraft,
        counter: TokenCounter,
    ) -> FactsDraft:
        """Turn a shorter list into replacements; what it repeats word for word stays as it is."""
        by_text = {words(one.text): one.id for one in old}
        repeated = {by_text[words(draft.text)] for draft in drafts if words(draft.text) in by_text}
        custom = self.fact_condense_prompt_template != FACT_CONDENSE_PROMPT
        make = self._maker(counter, prompt="custom" if custom else PROMPT_VERSION, model=llm_name(self.llm))
        condensed = []
        covered: set[str] = set()
        for draft in drafts:
            origins = [old[number - 1] for number in draft.sources]
            covered.update(origin.id for origin in origins)
            origins = [origin for origin in origins if origin.id not in repeated]
            if words(draft.text) in by_text or not origins:
                continue
            sources = [place for origin in origins for place in origin.sources]
            newest = max((said for origin in origins if (said := said_at(origin))), default=None)
            record = make(replace(draft, said_at=newest), sources)
            condensed.append(Condensed(record, frozenset(origin.id for origin in origins)))
        replaced = frozenset(one for each in condensed for one in each.replaces)
        return replace(
            batch,
            condensed=tuple(condensed),
            dropped=frozenset(covered) - replaced - repeated,
            left_out=frozenset(one.id for one in old) - covered - repeated,
        )

    def _record(
        self, draft: FactDraft, sources: Iterable[Place], counter: TokenCounter, *, prompt: str, model: str
    ) -> NewRecord:
        data: dict[str, Any] = {
            "subject": draft.subject,
            "relation": draft.relation,
            "value": draft.value,
            "model": model,
            "prompt": prompt,
        }
        return self._projected(self._new_id(), draft.text, data, draft.said_at, tuple(dict.fromkeys(sources)), counter)

    def _projected(
        self,
        id_: str,
        text: str,
        data: Mapping[str, Any],
        when: datetime | None,
        sources: tuple[Place, ...],
        counter: TokenCounter,
    ) -> NewRecord:
        """A record with what it is found by."""
        own = {name: value for name, value in data.items() if name != "suspect"}
        suspect = looks_like_instruction(text)
        if suspect:
            own["suspect"] = True
        return NewRecord(
            id=id_,
            kind=_KIND,
            text=text,
            data=own,
            said_at=when,
            sources=sources,
            terms={**analyse(str(data.get("subject", ""))), **analyse(text)},
            tokens=counter.text(written_fact(text, suspect=suspect)),
        )

    async def written(
        self, id_: str, text: str, data: Mapping[str, Any], when: datetime, counter: TokenCounter, scope: Scope
    ) -> NewRecord:
        """A fact that a person writes, as a record that can be found.

        Args:
            id_: Its id.
            text: The sentence.
            data: Its fields.
            when: When it was said.
            counter: Measures texts.
            scope: Whose.

        Returns:
            The record.
        """
        record = self._projected(id_, text, data, when, (), counter)
        (done,) = await self._with_vectors([record], scope)
        return done

    async def _embedded(self, draft: FactsDraft, scope: Scope) -> FactsDraft:
        """The draft with a vector for each of its records."""
        stated = [move.record for move in draft.moves if move.record is not None]
        records = [*stated, *(one.record for one in draft.condensed)]
        found = {record.id: record for record in await self._with_vectors(records, scope)}
        return replace(
            draft,
            moves=tuple(
                move if move.record is None else replace(move, record=found[move.record.id]) for move in draft.moves
            ),
            condensed=tuple(replace(one, record=found[one.record.id]) for one in draft.condensed),
        )

    async def _with_vectors(self, records: Sequence[NewRecord], scope: Scope) -> list[NewRecord]:
        model = self.embed_model
        if model is None or not records:
            return list(records)
        vectors = usable(await embed_texts(model, [record.text for record in records]), self._unusable(scope))
        return [
            replace(record, vector=vector, model=_model_name(model))
            for record, vector in zip(records, vectors, strict=True)
        ]

    def _unusable(self, scope: Scope) -> BlockFailed:
        return BlockFailed(session_id=scope.session_id, block=self.key, error=EmbeddingError.__name__)

    def reads(self, draft: Any) -> Reads:  # noqa: ARG002
        """All facts, those that are over as well: another session of the user may have added some."""
        return Reads(kinds=(_KIND,), past=True)

    def merge(self, draft: FactsDraft, records: Sequence[Record]) -> Changes:
        """Decide what the batch changes, replace what was condensed, keep the bound."""
        return merge_moves(draft, records, self.max_facts)

    # -- recall ----------------------------------------------------------------------------------------------

    async def recall(self, query: Query, reader: OwnerReader) -> Sequence[Item]:
        """Offer the facts: all when there are few, else the relevant ones first, then the newest."""
        seeds = [Item(written_fact(text, suspect=False), order=(0.0, float(at))) for at, text in enumerate(self.facts)]
        records = await reader.records(_KIND)
        items = {record.id: fact_item(record, query.now) for record in records}
        tokens = sum(query.counter.text(f"{item.text}\n") for item in (*seeds, *items.values()))
        pinned = [record.id for record in records if record.data.get("pinned")]
        newest = [*pinned, *(record.id for record in reversed(records))]
        if len(records) <= self.shown_facts and tokens <= query.allowance:
            return [*seeds, *(items[one] for one in dict.fromkeys(newest))]
        found = await self._relevant(query, reader)
        ranked = dict.fromkeys([*pinned, *(one for one in found if one in items), *newest])
        shown = [scored(items[one], found.get(one)) for one in ranked]
        return [*seeds, *shown[: self.shown_facts]]

    async def _relevant(self, query: Query, reader: OwnerReader) -> dict[str, Hit]:
        """Records that search finds, best first."""
        model = self.embed_model
        asked = codec.embedded_text(query.text)
        vector = await question_vector(model, asked, block=self.key, scope=query.scope)
        hits = await search(
            reader,
            IndexQuery(
                text=query.text,
                now=query.now,
                vector=vector,
                kinds=frozenset({_KIND}),
                blocks=frozenset({self.key}),
                limit=self.shown_facts,
            ),
            _model_name(model) if model is not None else "",
            self._unusable(query.scope),
        )
        records = await reader.records_by_hit(hits)
        return {records[hit.id].id: hit for hit in hits if hit.id in records}  # some may have been put aside meanwhile

    def _parse_facts_xml(self, xml_text: str) -> list[str]:
        """Texts of the facts in a model's answer; LlamaIndex's name for it."""
        try:
            return [draft.text for draft in parse_answer(xml_text).facts]
        except ExtractionError:
            return []


def _model_name(model: BaseEmbedding) -> str:
    return model.model_name
