"""A context and how it came to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.budget import Item, Packed, TokenCounter
from llama_index_memory_tiers.context.answers import Content
from llama_index_memory_tiers.context.request import Request
from llama_index_memory_tiers.events import ContextReport, ItemReport, PartReport


@dataclass(frozen=True, slots=True)
class Built:
    """A context and how it came to be.

    Args:
        messages: The context.
        packed: What was decided.
        contents: What each block answered.
    """

    messages: list[ChatMessage]
    packed: Packed
    contents: Mapping[str, Content]

    def report(
        self,
        request: Request,
        blocks: Sequence[BaseMemoryBlock[Any]],
        counter: TokenCounter,
        unread: Mapping[str, str | None],
    ) -> ContextReport:
        """Say where the tokens went, and what was left out and why.

        Args:
            request: What it was built for.
            blocks: All that were asked, in the user's order.
            counter: Measures.
            unread: Kind of failure, by the name of each block that could not read the session's newest messages.

        Returns:
            The report.
        """

        def item_report(item: Item, reason: str = "") -> ItemReport:
            return ItemReport(item.text, counter.text(item.text), item.score, item.legs, reason)

        packed = self.packed
        kept = {part.part.name: part for part in packed.parts}
        parts = []
        for block in blocks:
            content = self.contents.get(block.name)
            mine = kept.get(block.name)
            parts.append(
                PartReport(
                    name=block.name,
                    priority=block.priority,
                    tokens=mine.tokens if mine is not None else 0,
                    kept=tuple(item_report(item) for item in (mine.items if mine is not None else ())),
                    left_out=tuple(
                        item_report(out.item, out.reason)
                        for out in packed.left_out
                        if out.part == block.name and out.item is not None
                    ),
                    error=type(content).__name__ if isinstance(content, Exception) else None,
                    absorb_error=unread.get(block.name),
                )
            )
        return ContextReport(
            query=request.text,
            limit=request.limit,
            tokens=packed.total,
            window_tokens=sum(row.tokens for row in packed.rows),
            window_messages=len(packed.rows),
            window_left_out=sum(out.row is not None for out in packed.left_out),
            parts=tuple(parts),
            overflow=packed.overflow,
            messages=tuple(self.messages),
            window_broken=sum(out.reason in {"no call", "no result"} for out in packed.left_out),
        )
