"""SummaryMemoryBlock: what has left the window, told shorter, on one level or two."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal

from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from pydantic import Field

from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock
from llama_index_memory_tiers.blocks.consumer import Trigger
from llama_index_memory_tiers.budget import Item, TokenCounter
from llama_index_memory_tiers.extraction.facts import transcribe
from llama_index_memory_tiers.extraction.models import llm_name, needed_llm
from llama_index_memory_tiers.extraction.summaries import PROMPT_VERSION, SUMMARY_PROMPT, list_summaries, summarize
from llama_index_memory_tiers.records import Batch, Changes, NewRecord, Place, Reads, Record, StoredMessage
from llama_index_memory_tiers.storage import OwnerReader, new_id
from llama_index_memory_tiers.text import escape

_KIND = "summary"
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")


@dataclass(frozen=True, slots=True)
class SummaryDraft:
    """What a batch gave.

    Args:
        add: New summaries, in the order in which they were made.
        replaced: Id of an older summary → id of the one that took it in.
    """

    add: tuple[NewRecord, ...]
    replaced: dict[str, str]


_Told = Record | NewRecord
"""A summary as the next one sees it: kept, or just made."""


def default_llm() -> LLM:
    """The model of `Settings`; without one, summaries cannot be written."""
    return needed_llm(
        "SummaryMemoryBlock",
        without="llm",
        remedy="Pass llm=…, set Settings.llm first, or leave this block out: the vector block needs none.",
    )


class SummaryMemoryBlock(TieredMemoryBlock):
    """Summarises what leaves the window, so that a long session stays in view.

    With one level each summary takes in the one before (progressive). With two, every `summarize_every` messages
    become a summary of level 1, and every `summaries_per_level2` of those are taken into the one of level 2. The
    context shows level 2, the newer summaries of level 1, and the window.

    Args:
        llm: The model; default is that of `Settings`, if one was set.
        levels: 1 is progressive, 2 is hierarchical; default 2.
        summarize_every: Messages that become one summary, and that leave the window together; default 10.
        window_messages: Messages that the window holds at most, leading system messages not counted; default 20.
        summaries_per_level2: Summaries of level 1 that are taken into level 2; default 5.
        level1_tokens: Cap of a summary of level 1, in tokens; with one level that of the only one; default 300.
        level2_tokens: Cap of the summary of level 2, in tokens; default 600.
        summary_prompt_template: Your own request; variables `previous`, `material` and `max_words`.
    """

    name: str = "Summary"
    scope: Literal["user", "session"] = "session"
    llm: LLM = Field(default_factory=default_llm)
    levels: Literal[1, 2] = 2
    summarize_every: int = Field(default=10, ge=2)
    window_messages: int = Field(default=20, ge=1)
    summaries_per_level2: int = Field(default=5, ge=2)
    level1_tokens: int = Field(default=300, ge=20)
    level2_tokens: int = Field(default=600, ge=20)
    summary_prompt_template: BasePromptTemplate = SUMMARY_PROMPT
    absorb_on: frozenset[Trigger] = frozenset({"flush"})
    uses_model: ClassVar[bool] = True
    stable: ClassVar[bool] = True

    @property
    def window_bound(self) -> tuple[int, int]:
        """Messages that the window may hold, and how many leave together."""
        return self.window_messages, self.summarize_every

    # -- absorbing -------------------------------------------------------------------------------------------

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> SummaryDraft | None:
        """Summarise the batch part by part, and what has come together into level 2."""
        told: list[_Told] = [*await reader.records(_KIND)]
        draft = SummaryDraft((), {})
        for part in _parts(batch.messages, self.summarize_every):
            transcript = transcribe(part)
            if transcript.lines:
                made = await self._level1(transcript.text, part, told, counter)
                draft = _replaced(draft, made, told if self.levels == 1 else ())
                told = [made] if self.levels == 1 else [*told, made]
            fresh = [one for one in told if _level(one) == 1]
            if self.levels == 2 and len(fresh) >= self.summaries_per_level2:  # noqa: PLR2004  # the field's own value
                made = await self._level2(told, counter)
                draft = _replaced(draft, made, told)
                told = [made]
        return draft if draft.add else None

    async def _level1(
        self, material: str, part: Sequence[StoredMessage], told: Sequence[_Told], counter: TokenCounter
    ) -> NewRecord:
        previous = told if self.levels == 1 else []
        text = await self._ask(material, [one.text for one in previous], self.level1_tokens, counter)
        sources = [*(place for one in previous for place in one.sources), *(stored.place for stored in part)]
        return self._record(1, text, sources, part[-1].created_at, counter)

    async def _level2(self, told: Sequence[_Told], counter: TokenCounter) -> NewRecord:
        previous = [one.text for one in told if _level(one) == 2]  # noqa: PLR2004  # the level's name
        newer = [one for one in told if _level(one) == 1]
        material = list_summaries([one.text for one in newer])
        text = await self._ask(material, previous, self.level2_tokens, counter)
        return self._record(2, text, [place for one in told for place in one.sources], newer[-1].said_at, counter)

    async def _ask(self, material: str, previous: Sequence[str], max_tokens: int, counter: TokenCounter) -> str:
        text = await summarize(
            self.llm, material, previous=previous, max_tokens=max_tokens, template=self.summary_prompt_template
        )
        return capped(text, counter, max_tokens)

    def _record(
        self, level: int, text: str, sources: Sequence[Place], said_at: datetime | None, counter: TokenCounter
    ) -> NewRecord:
        custom = self.summary_prompt_template != SUMMARY_PROMPT
        return NewRecord(
            id=new_id(),
            kind=_KIND,
            text=text,
            data={"level": level, "prompt": "custom" if custom else PROMPT_VERSION, "model": llm_name(self.llm)},
            said_at=said_at,
            sources=tuple(dict.fromkeys(sources)),
            tokens=counter.text(_written(level, text)),
        )

    def reads(self, draft: Any) -> Reads:  # noqa: ARG002
        """All current summaries, as some may have been forgotten meanwhile."""
        return Reads(kinds=(_KIND,))

    def merge(self, draft: SummaryDraft, records: Sequence[Record]) -> Changes:
        """Write the summaries; those that newer ones took in stay as superseded records."""
        there = {record.id for record in records if record.live} | {record.id for record in draft.add}
        return Changes(add=draft.add, supersede={old: new for old, new in draft.replaced.items() if old in there})

    # -- recall ----------------------------------------------------------------------------------------------

    async def recall(self, query: Query, reader: OwnerReader) -> Sequence[Item]:  # noqa: ARG002  # base's signature
        """Offer level 2 first, then the newest of level 1."""
        told = await reader.records(_KIND)
        return [
            Item(
                _written(_level(record), record.text),
                order=(float(-_level(record)), _told_at(record)),
                sources=frozenset(record.sources),
                record_id=record.id,
            )
            for record in sorted(told, key=lambda record: (_level(record), _told_at(record)), reverse=True)
        ]


def capped(text: str, counter: TokenCounter, max_tokens: int) -> str:
    """Cut a summary to its cap: whole sentences from the beginning, a piece of the first when it alone is too long.

    Args:
        text: The summary.
        counter: Measures texts.
        max_tokens: The cap.

    Returns:
        The same, or its beginning, with an ellipsis when something was cut.
    """
    if counter.text(text) <= max_tokens:
        return text
    ends = [found.start() for found in _SENTENCE_END.finditer(text)] or [len(text)]
    fitting = [end for end in ends if counter.text(f"{text[:end]} …") <= max_tokens]
    if fitting:
        return f"{text[: fitting[-1]]} …"
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if counter.text(f"{text[:middle]} …") <= max_tokens else (low, middle - 1)
    return f"{text[:low].rstrip()} …"


def _parts(messages: Sequence[StoredMessage], size: int) -> list[Sequence[StoredMessage]]:
    return [messages[at : at + size] for at in range(0, len(messages), size)]


def _replaced(draft: SummaryDraft, made: NewRecord, old: Sequence[_Told]) -> SummaryDraft:
    return SummaryDraft((*draft.add, made), draft.replaced | {one.id: made.id for one in old})


def _level(record: _Told) -> int:
    return 2 if record.data.get("level") == 2 else 1  # noqa: PLR2004  # the level's name


def _told_at(record: Record) -> float:
    return (record.said_at or record.created_at).timestamp()


def _written(level: int, text: str) -> str:
    return f"<summary level='{level}'>{escape(text)}</summary>"
