"""Blocks of LlamaIndex and third parties: what they answered, and how they cut it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.blocks.guarding import within
from llama_index_memory_tiers.budget import Part, TokenCounter
from llama_index_memory_tiers.events import BlockFailed, emit

_SECONDS = 60.0


def patience(block: BaseMemoryBlock[Any]) -> float:
    """How long a block may take for one answer, in seconds."""
    return float(getattr(block, "timeout_seconds", _SECONDS))


def foreign_part(block: BaseMemoryBlock[Any], content: Any) -> Part:
    """What a block answered, as a part of a context.

    Args:
        block: Who answered.
        content: Text, content blocks or messages.

    Returns:
        The part.

    Raises:
        TypeError: It is none of these.
    """
    stable = bool(getattr(block, "stable", False))
    if not content:
        return Part(block.name, block.priority, stable=stable)
    if isinstance(content, str):
        return Part(block.name, block.priority, blocks=(TextBlock(text=content),), stable=stable)
    if isinstance(content, list) and isinstance(content[0], ChatMessage):
        return Part(block.name, block.priority, messages=tuple(content), stable=stable)
    if isinstance(content, list):
        return Part(block.name, block.priority, blocks=tuple(content), stable=stable)
    raise TypeError(f"{block.name} returned {type(content).__name__}, not text, content blocks or messages")


def content_size(content: Sequence[Any], counter: TokenCounter) -> int:
    """Tokens of messages or content blocks."""
    if content and isinstance(content[0], ChatMessage):
        return sum(counter.message(message) for message in content)
    return counter.blocks(content)


async def cut_to_fit(block: BaseMemoryBlock[Any], part: Part, room: int, counter: TokenCounter) -> Part | None:
    """Let a block cut its own content.

    Args:
        block: Who answered.
        part: What.
        room: Tokens that are free.
        counter: Measures.

    Returns:
        The shorter part; `None` when it need not or does not.
    """
    try:
        return await within(patience(block), _cut(block, part, room, counter))
    except Exception as error:  # noqa: BLE001  # a foreign block may raise anything
        emit(BlockFailed(block=block.name, error=type(error).__name__))
        return None


async def _cut(block: BaseMemoryBlock[Any], part: Part, room: int, counter: TokenCounter) -> Part | None:
    cut: Part | None = None
    content: list[Any] = list(part.messages or part.blocks)
    # A block may cut too little: it is asked again while that makes its content smaller.
    while content and (size := content_size(content, counter)) > room:
        alone = len(content) == 1 and isinstance(content[0], TextBlock)
        left = await block.atruncate(content[0].text if alone else copy.copy(content), size - room)
        cut = foreign_part(block, left) if left else None
        if cut is None:
            return None
        content = list(cut.messages or cut.blocks)
        if content_size(content, counter) >= size:
            return None
    return cut if cut is None else replace(cut, stable=part.stable)
