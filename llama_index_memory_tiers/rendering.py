"""A packed context becomes messages, and a message loses what was recalled into it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    VideoBlock,
)
from llama_index.core.memory.memory import DEFAULT_MEMORY_BLOCKS_TEMPLATE, InsertMethod

from llama_index_memory_tiers.budget import Packed, PackedPart, section_text, tag_name
from llama_index_memory_tiers.roles import SYSTEM_ROLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.prompts import RichPromptTemplate

RecallPosition = Literal["system", "user"]

_Section = tuple[str, list[ContentBlock]]

_OPEN = re.compile(r"<memory>\n<[\w.-]+>(?:\n|\Z)")
_CLOSE = re.compile(r"(?:\A|\n)</[\w.-]+>\n</memory>")
# What a template makes of a stand-in: its bare token, or the address that carries the token.
_STAND_IN = re.compile(r"(?:https://)?(slot[0-9a-f]{32})(?:\.invalid/slot\.\w+)?")


def render(
    packed: Packed,
    *,
    insert_method: InsertMethod = InsertMethod.SYSTEM,
    template: RichPromptTemplate | None = None,
    recall_position: RecallPosition = "system",
) -> list[ChatMessage]:
    """Write a packed context as messages.

    The sections stand in one `<memory>` section, stable ones first, each kind by priority, so that a
    provider's prompt cache keeps its prefix.

    SYSTEM: when something is recalled, all system and developer messages become one, which comes first:
    system text of the window, that of foreign blocks, then the memory. Its role is that of the first. The
    volatile sections stand before the newest user message instead with `recall_position="user"`. USER: the
    memory stands before the text of the newest user message, and system messages stay as they are. Without a
    user message both fall back to the system message: no turn is made up. Messages of foreign blocks follow
    the leading system messages.

    Args:
        packed: What is shown.
        insert_method: Where the memory goes.
        template: Gets `memory_blocks`, pairs of a name and content blocks; `None` and stock's default are
            written by this function itself. It sees stand-ins, for which the real blocks are put in
            afterwards: stored text is never template code, and media given as bytes survive. A filter that
            changes text (`upper`, `truncate`) would change the stand-in: such blocks are not shown.
        recall_position: Where the volatile sections go under SYSTEM.

    Returns:
        Messages in order. Those that are not changed are the given objects; changed ones are copies.
    """
    parts = [*(p for p in packed.parts if p.part.stable), *(p for p in packed.parts if not p.part.stable)]
    rows = [row.message for row in packed.rows]
    newest = next((at for at in range(len(rows) - 1, -1, -1) if rows[at].role == MessageRole.USER), None)
    to_user: list[PackedPart] = []
    if newest is not None and insert_method == InsertMethod.USER:
        to_user, parts = parts, []
    elif newest is not None and recall_position == "user":
        to_user, parts = [p for p in parts if not p.part.stable], [p for p in parts if p.part.stable]
    if newest is not None and (content := _content(to_user, template)):
        rows[newest] = _with_blocks(rows[newest], [*content, *rows[newest].blocks])
    foreign = [message for part in packed.parts for message in part.part.messages]
    return _placed(rows, foreign, _content(parts, template))


def strip_recalled(message: ChatMessage) -> ChatMessage | None:
    """Remove the memory from a message that was returned by `aget` and comes back as history.

    Args:
        message: Any message.

    Returns:
        A copy without `<memory>` sections, together with the one newline that joined each to the rest; the
        same object when it holds none; `None` when it holds nothing else. What a custom template wrote is not
        recognised.
    """
    blocks: list[ContentBlock] = list(message.blocks)
    at, found = 0, False
    while at < len(blocks):
        span = _find_section(blocks, at)
        if span is None:
            at += 1
            continue
        found = True
        last, rest = span
        blocks[at : last + 1] = [TextBlock(text=text) for text in rest if text]
    if not found:
        return message
    return _with_blocks(message, blocks) if blocks else None


def _find_section(blocks: Sequence[ContentBlock], at: int) -> tuple[int, tuple[str, ...]] | None:
    """Where the section that opens in a block ends, and the text around it."""
    first = blocks[at]
    opened = _OPEN.search(first.text) if isinstance(first, TextBlock) else None
    if not isinstance(first, TextBlock) or opened is None:
        return None
    before, start = first.text[: opened.start()], opened.end() - 1
    for last in range(at, len(blocks)):
        block = blocks[last]
        closed = _CLOSE.search(block.text, start) if isinstance(block, TextBlock) else None
        if isinstance(block, TextBlock) and closed is not None:
            after = block.text[closed.end() :]
            if before.endswith("\n"):
                before = before[:-1]
            elif after.startswith("\n"):
                after = after[1:]
            return last, (before + after,) if last == at else (before, after)
        start = 0
    return None


def _with_blocks(message: ChatMessage, blocks: list[ContentBlock]) -> ChatMessage:
    update = {"blocks": blocks, "additional_kwargs": dict(message.additional_kwargs)}
    return message.model_copy(update=update)


def _placed(
    rows: Sequence[ChatMessage], foreign: Sequence[ChatMessage], content: list[ContentBlock]
) -> list[ChatMessage]:
    lead = next((at for at, message in enumerate(rows) if message.role not in SYSTEM_ROLES), len(rows))
    if not content and not any(message.role in SYSTEM_ROLES for message in foreign):
        return [*rows[:lead], *foreign, *rows[lead:]]
    ordered = [*rows[:lead], *foreign, *rows[lead:]]
    system = [message for message in ordered if message.role in SYSTEM_ROLES]
    rest = [message for message in ordered if message.role not in SYSTEM_ROLES]
    return [_merged(system, content), *rest]


def _merged(system: Sequence[ChatMessage], content: list[ContentBlock]) -> ChatMessage:
    if not system:
        return ChatMessage(role=MessageRole.SYSTEM, blocks=content)
    if len(system) == 1 and not content:
        return system[0]
    merged = _with_blocks(system[0], [*(block for message in system for block in message.blocks), *content])
    for message in system[1:]:
        merged.additional_kwargs = {**message.additional_kwargs, **merged.additional_kwargs}
    return merged


def _content(parts: Sequence[PackedPart], template: RichPromptTemplate | None) -> list[ContentBlock]:
    sections = [_section(part) for part in parts if part.items or part.part.blocks]
    if not sections:
        return []
    if template is None or template.template_str == DEFAULT_MEMORY_BLOCKS_TEMPLATE.template_str:
        return _written(sections)
    return _templated(sections, template)


def _section(packed: PackedPart) -> _Section:
    name = tag_name(packed.part.name)
    blocks: list[ContentBlock] = [_inert(block, name) for block in packed.part.blocks]
    if packed.items:
        # The footer of a group may have the section's name, so only the wrapper's end is looked for.
        blocks.append(_inert(TextBlock(text=section_text(packed.items)), "memory"))
    return name, blocks


def _inert(block: ContentBlock, name: str) -> ContentBlock:
    """Keep content from closing its section or the memory; `strip_recalled` relies on it."""
    if not isinstance(block, TextBlock) or "</" not in block.text:
        return block
    text = re.sub(rf"</(?=\s*(?:memory|{re.escape(name)})\s*>)", "&lt;/", block.text, flags=re.IGNORECASE)
    return block if text == block.text else TextBlock(text=text)


def _written(sections: Sequence[_Section]) -> list[ContentBlock]:
    content: list[ContentBlock] = []
    lines = ["<memory>"]
    for name, blocks in sections:
        lines.append(f"<{name}>")
        for block in blocks:
            if isinstance(block, TextBlock):
                lines.append(block.text)
                continue
            content += [TextBlock(text="\n".join(lines))] if lines else []
            content.append(block)
            lines = []
        lines.append(f"</{name}>")
    return [*content, TextBlock(text="\n".join([*lines, "</memory>"]))]


def _templated(sections: Sequence[_Section], template: RichPromptTemplate) -> list[ContentBlock]:
    real: dict[str, ContentBlock] = {}

    def stand_in(block: ContentBlock) -> ContentBlock:
        token = f"slot{uuid4().hex}"
        real[token] = block
        address = f"https://{token}.invalid/slot"
        # Templates choose by type and print the address of media.
        if isinstance(block, ImageBlock):
            return ImageBlock(url=f"{address}.png")
        if isinstance(block, AudioBlock):
            return AudioBlock(url=f"{address}.mp3")
        if isinstance(block, VideoBlock):
            return VideoBlock(url=f"{address}.mp4")
        if isinstance(block, DocumentBlock):
            return DocumentBlock(url=f"{address}.pdf")
        return TextBlock(text=token)

    data = [(name, [stand_in(block) for block in blocks]) for name, blocks in sections]
    messages = template.format_messages(memory_blocks=data)
    return _filled([block for message in messages for block in message.blocks], real)


def _filled(blocks: Sequence[ContentBlock], real: dict[str, ContentBlock]) -> list[ContentBlock]:
    """Put the real blocks where the stand-ins are; text around them becomes one block."""
    content: list[ContentBlock] = []
    for block in blocks:
        printed = block.text if isinstance(block, TextBlock) else str(getattr(block, "url", ""))
        pieces = _STAND_IN.split(printed)
        if not isinstance(block, TextBlock) and len(pieces) == 1:
            content.append(block)
            continue
        text = ""
        for at, piece in enumerate(pieces):
            put = real.get(piece) if at % 2 else TextBlock(text=piece)
            if isinstance(put, TextBlock):
                text += put.text
            elif put is not None:
                content += [TextBlock(text=text), put] if text.strip() else [put]
                text = ""
        content += [TextBlock(text=text)] if text.strip() else []
    return content
