"""What a context costs while it is being packed: each text and message is counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llama_index.core.base.llms.types import ChatMessage, ContentBlock, TextBlock

from llama_index_memory_tiers.budget.counting import TokenCounter
from llama_index_memory_tiers.budget.items import PackedPart, Part, tag_name


@dataclass(slots=True)
class Section:
    """A part while it is being packed. Its sums are estimates: lines are counted one by one."""

    part: Part
    frame: int
    whole: int
    lines: dict[int, int] = field(default_factory=dict)
    frames: dict[str | int, int] = field(default_factory=dict)
    kept: dict[int, None] = field(default_factory=dict)
    open: dict[str | int, int] = field(default_factory=dict)
    tokens: int = 0

    def cost(self, index: int) -> int:
        """What adding this costs now; `kept` does not hold it."""
        cost = 0 if self.kept else self.frame
        if index < 0:
            return cost + self.whole
        key = self.part.items[index].group or index
        return cost + self.lines[index] + (0 if self.open.get(key) else self.frames[key])

    def add(self, index: int) -> None:
        """Keep an item, or with -1 the one piece of the part."""
        self.tokens += self.cost(index)
        self.kept[index] = None
        if index >= 0:
            key = self.part.items[index].group or index
            self.open[key] = self.open.get(key, 0) + 1

    def remove(self, index: int) -> None:
        """Let go of what was added."""
        del self.kept[index]
        if index >= 0:
            self.open[self.part.items[index].group or index] -= 1
        self.tokens -= self.cost(index)

    def packed(self) -> PackedPart:
        """What is kept of the part, in its order."""
        items = tuple(self.part.items[index] for index in sorted(self.kept) if index >= 0)
        return PackedPart(self.part, items, self.tokens)


class Meter:
    """Counts each text and message of one packing once."""

    def __init__(self, counter: TokenCounter, counted: Mapping[int, tuple[ChatMessage, int]]) -> None:
        self._counter = counter
        self._empty = counter.text("")
        self._texts: dict[str, int] = {}
        # By identity; the object is held so that its id is not given to another one.
        self._blocks: dict[int, tuple[ContentBlock, int]] = {}
        self._window = counted
        self._messages: dict[int, tuple[ChatMessage, int]] = {}

    @property
    def linewise(self) -> bool:
        """Whether the cost of a text is the sum of the costs of its lines."""
        return self._counter.linewise

    def line(self, text: str) -> int:
        """Cost of a line within a text; tokenizers that frame each text (BOS, EOS) do so once."""
        return self.text(f"{text}\n") - self._empty

    def text(self, text: str) -> int:
        """Tokens of a text."""
        known = self._texts.get(text)
        if known is None:
            pieces = self._counter.lines(text)
            known = self._counter.text(text) if len(pieces) == 1 else sum(map(self.text, pieces))
            self._texts[text] = known
        return known

    def block(self, block: ContentBlock) -> int:
        """Tokens of a content block."""
        known = self._blocks.get(id(block))
        if known is None:
            tokens = self.text(block.text) if isinstance(block, TextBlock) else self._counter.block(block)
            known = self._blocks[id(block)] = (block, tokens)
        return known[1]

    def message(self, message: ChatMessage) -> int:
        """Tokens of a message."""
        known = self._messages.get(id(message))
        if known is None:
            known = self._messages[id(message)] = (message, self._edited(message))
        return known[1]

    def tags(self, part: Part) -> int:
        """Tokens of the lines around a part."""
        tag = tag_name(part.name)
        return self.line(f"<{tag}>") + self.line(f"</{tag}>")

    def section(self, part: Part) -> Section:
        """A part of which nothing is kept yet."""
        whole = sum(map(self.message, part.messages))
        whole += sum(self.line(b.text) if isinstance(b, TextBlock) else self.block(b) for b in part.blocks)
        section = Section(part, self.tags(part) if part.blocks or part.items else 0, whole)
        for index, item in enumerate(part.items):
            section.lines[index] = self.line(item.text)
            if (key := item.group or index) not in section.frames:
                section.frames[key] = sum(self.line(edge) for edge in (item.header, item.footer) if edge)
        return section

    def total(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of a context."""
        window, known = self._window, self._messages
        return sum(seen[1] if (seen := window.get(id(m)) or known.get(id(m))) else self._edited(m) for m in messages)

    def _edited(self, message: ChatMessage) -> int:
        extra = self._counter.text(str(message.additional_kwargs)) if message.additional_kwargs else 0
        return sum(map(self.block, message.blocks)) + extra
