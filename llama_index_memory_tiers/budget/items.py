"""What is offered for a context, and what was decided about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from llama_index.core.base.llms.types import (
    ChatMessage,
    ContentBlock,
)

from llama_index_memory_tiers.records import Place

Reason = Literal["already shown", "no room", "share", "cut", "no call", "no result"]


@dataclass(frozen=True, slots=True)
class Item:
    """One whole thing that a block offers: kept or left out, never cut.

    Args:
        text: As rendered, escaped, no newline at its end.
        score: How much it is worth; for reports, the order of `Part.items` decides.
        group: Items of one group share a header and a footer, paid with the first of them; an item without
            a group has its own.
        header: Line before the group; empty is none.
        footer: Line after the group; empty is none.
        order: Where it stands when rendered; groups stand by their smallest order, ties as offered.
        sources: The messages it shows; it is left out when the window shows all of them.
        legs: What found it, leg → score.
        record_id: The record it comes from.
        visits: Ids of the records that are visited when it is recalled, counted once a turn.
        quotes: It shows its sources word for word: it is left out as well when other such items show all of them.
        late: It claims only what is left when all other items have claimed theirs: what other blocks may say better.
    """

    text: str
    score: float = 0.0
    group: str = ""
    header: str = ""
    footer: str = ""
    order: tuple[float, ...] = ()
    sources: frozenset[Place] = frozenset()
    legs: Mapping[str, float] = field(default_factory=dict, hash=False)
    record_id: str | None = None
    visits: tuple[str, ...] = ()
    quotes: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one block offers.

    Args:
        name: Name of the block.
        priority: 0 is kept whole; then 1 claims before 2.
        items: Best first.
        blocks: Whole content, one piece: static, or a foreign block's.
        messages: Chat messages of a foreign block, one piece, put before the window.
        share_tokens: What it may claim before the unused rest is lent; `None` is all that is free.
        stable: Rendered before the parts that change from turn to turn.
    """

    name: str
    priority: int
    items: tuple[Item, ...] = ()
    blocks: tuple[ContentBlock, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    share_tokens: int | None = None
    stable: bool = False


class Row(NamedTuple):
    """A message of the window.

    Args:
        message: The message; never changed.
        tokens: Its size by the packer's counter.
        place: Where it stands in the log, if it stands there.
    """

    message: ChatMessage
    tokens: int
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class PackedPart:
    """What is kept of a part.

    Args:
        part: As it was offered.
        items: The kept items, best first.
        tokens: Its size with its tags, by summing up lines.
    """

    part: Part
    items: tuple[Item, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that is not in the context, and why.

    Args:
        part: Name of the part; empty for a message of the window.
        reason: `already shown` by the window or by other items; `no room`; over the `share` of its part, and nothing
            was left to lend; `cut` by the block itself; `no call` for a tool result whose call is not in the window.
        item: The item, when it is one.
        row: The message of the window, when it is one.
    """

    part: str
    reason: Reason
    item: Item | None = None
    row: Row | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """One context, decided.

    Args:
        rows: Messages of the window that are shown, oldest first.
        parts: What is kept of each part, by priority.
        left_out: What is not shown.
        total: Tokens of the rendered messages.
        overflow: Priority 0 and the newest user message alone exceed the limit; nothing else is shown.
    """

    rows: tuple[Row, ...]
    parts: tuple[PackedPart, ...]
    left_out: tuple[LeftOut, ...] = ()
    total: int = 0
    overflow: bool = False


def section_text(items: Sequence[Item]) -> str:
    """Write items as lines, each group between its header and footer.

    Args:
        items: The items that are kept.

    Returns:
        Lines joined by newlines, without one at the end.
    """
    groups: dict[str | int, list[tuple[tuple[tuple[float, ...], int], Item]]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.group or index, []).append(((item.order, index), item))
    lines: list[str] = []
    for members in sorted(groups.values(), key=lambda pairs: min(key for key, _ in pairs)):
        members.sort(key=lambda pair: pair[0])
        frame = next((item for _, item in members if item.header or item.footer), members[0][1])
        lines += [frame.header] if frame.header else []
        lines += [item.text for _, item in members]
        lines += [frame.footer] if frame.footer else []
    return "\n".join(lines)


def tag_name(name: str) -> str:
    """Make the name of a block safe as a tag.

    Args:
        name: Any text.

    Returns:
        Letters, digits, `_`, `-` and `.`, beginning with a letter or `_`; never `memory`, the wrapper's name.
    """
    tag = re.sub(r"[^\w.-]+", "_", name)
    if not re.match(r"[^\W\d]", tag):
        tag = f"_{tag}"
    return f"{tag}_" if tag.lower() == "memory" else tag
