"""What blocks answer to a request: all at once, each for itself, and once a turn."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import TextBlock
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock
from llama_index_memory_tiers.blocks.foreign import for_one_question
from llama_index_memory_tiers.blocks.guarding import within
from llama_index_memory_tiers.budget import Part, TokenCounter, section_text
from llama_index_memory_tiers.context.foreign import foreign_part, patience
from llama_index_memory_tiers.context.request import Request
from llama_index_memory_tiers.copies import clone
from llama_index_memory_tiers.errors import StorageError
from llama_index_memory_tiers.events import BlockFailed, BlockRecalled, emit
from llama_index_memory_tiers.instruments import listening
from llama_index_memory_tiers.records import Place
from llama_index_memory_tiers.storage import OwnerReader, Storage, owner_key

_logger = logging.getLogger(__name__)

_REMEMBERED_TURNS = 256

Content = Part | Exception
"""What a block answered: its part, or what it raised."""


@dataclass(slots=True)
class TurnCache:
    """What was recalled for the newest turns: an agent asks once per tool round."""

    kept: OrderedDict[tuple[Any, ...], dict[str, Content]] = field(default_factory=OrderedDict)

    def get(self, key: tuple[Any, ...]) -> dict[str, Content] | None:
        """What was recalled for this turn, if it is remembered."""
        found = self.kept.get(key)
        if found is not None:
            self.kept.move_to_end(key)
        return found

    def put(self, key: tuple[Any, ...], contents: dict[str, Content]) -> None:
        """Remember a turn; failures are asked again."""
        if any(isinstance(content, Exception) for content in contents.values()):
            return
        self.kept[key] = contents
        while len(self.kept) > _REMEMBERED_TURNS:
            self.kept.popitem(last=False)


class Answers:
    """Asks blocks.

    Args:
        storage: What blocks read.
        counter: Measures.
    """

    def __init__(self, storage: Storage, counter: TokenCounter) -> None:
        self._storage = storage
        self._counter = counter
        self._turns = TurnCache()
        self._counted: OrderedDict[tuple[Any, ...], None] = OrderedDict()

    def drop_remembered(self) -> None:
        """Let go of what was recalled for earlier requests."""
        self._turns.kept.clear()

    async def of(
        self, blocks: Sequence[BaseMemoryBlock[Any]], request: Request, visible: frozenset[Place]
    ) -> dict[str, Content]:
        """Ask blocks at once; one that fails or is slow costs its own section only.

        What our blocks recalled is remembered within a turn; others may change at any time and are asked each time.
        """
        window = request.view.window
        key = (
            window.sid, window.owner_rev, request.turn, request.text, request.limit, visible,
            tuple(block.name for block in blocks), repr(request.block_kwargs) if request.block_kwargs else "",
        )  # fmt: skip
        cacheable = window.sid != 0 and not request.told
        remembered = self._turns.get(key) if cacheable else None
        known = remembered or {}
        asked = [block for block in blocks if block.name not in known]
        answers = await asyncio.gather(*(self._ask(block, request, visible) for block in asked))
        found = {**known, **{block.name: answer for block, answer in zip(asked, answers, strict=True)}}
        if cacheable and remembered is None:
            ours = {
                block.name: found[block.name]
                for block in asked
                if isinstance(block, TieredMemoryBlock) and not block.hears_others
            }
            self._turns.put(key, ours)
        return found

    async def count_visits(
        self, blocks: Sequence[BaseMemoryBlock[Any]], request: Request, contents: Mapping[str, Content]
    ) -> None:
        """Count what was recalled, once a turn; a context is handed out whether or not that can be written."""
        parts = [content for content in contents.values() if isinstance(content, Part)]
        shown = {part.name: [one for item in part.items for one in item.visits] for part in parts}
        ours = {block.name: block for block in blocks if isinstance(block, TieredMemoryBlock)}
        turn = (request.scope, request.turn, request.text)
        found = {name: list(dict.fromkeys(ids)) for name, ids in shown.items() if ids and name in ours}
        if not found or turn in self._counted:
            return
        self._counted[turn] = None
        while len(self._counted) > _REMEMBERED_TURNS:
            self._counted.popitem(last=False)
        for name, ids in found.items():
            owner = owner_key(request.scope, request.view.window.sid, per_session=ours[name].per_session)
            try:
                await self._storage.records.parts.visit(owner, ids)
            except StorageError as error:
                about = {"session_id": request.scope.session_id, "error": type(error).__name__}
                _logger.warning("visits not counted", extra=about)

    async def _ask(self, block: BaseMemoryBlock[Any], request: Request, visible: frozenset[Place]) -> Content:
        began = time.monotonic()
        try:
            asking = (
                self._recall(block, request, visible)
                if isinstance(block, TieredMemoryBlock)
                else self._get(block, request)
            )
            part = await within(patience(block), asking)
        except Exception as error:  # noqa: BLE001  # a block may raise anything; the chat goes on
            emit(BlockFailed(session_id=request.scope.session_id, block=block.name, error=type(error).__name__))
            return error
        if listening():
            seconds, session = time.monotonic() - began, request.scope.session_id
            items = len(part.items or part.messages or part.blocks)
            emit(BlockRecalled(session_id=session, block=block.name, items=items, seconds=seconds))
        return part

    async def _recall(self, block: TieredMemoryBlock, request: Request, visible: frozenset[Place]) -> Part:
        owner = owner_key(request.scope, request.view.window.sid, per_session=block.per_session)
        query = Query(
            text=request.text,
            now=request.now,
            scope=request.scope,
            messages=request.messages,
            visible=visible,
            allowance=request.limit,
            counter=self._counter,
            sid=request.view.window.sid,
        )
        items = await block.recall(query, OwnerReader(self._storage.records, owner, block.key))
        return Part(block.name, block.priority, items=tuple(items), stable=block.stable)

    async def _get(self, block: BaseMemoryBlock[Any], request: Request) -> Part:
        content = await for_one_question(block).aget(
            [clone(message) for message in request.messages],
            session_id=request.scope.session_id,
            **copy.deepcopy(dict(request.block_kwargs)),
        )
        return foreign_part(block, content)


def uncut(contents: Mapping[str, Content]) -> dict[str, Any]:
    """What each block says: text, content blocks or messages; empty answers are missing."""
    found: dict[str, Any] = {}
    for name, content in contents.items():
        if isinstance(content, Exception):
            continue
        if content.items:
            found[name] = section_text(content.items)
        elif content.messages:
            found[name] = list(content.messages)
        elif len(content.blocks) == 1 and isinstance(content.blocks[0], TextBlock):
            found[name] = content.blocks[0].text
        elif content.blocks:
            found[name] = list(content.blocks)
    return found
