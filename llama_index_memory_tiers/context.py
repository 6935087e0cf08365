"""One context out: blocks answer at the same time, each for itself, and the best that fits is rendered."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.memory.memory import BaseMemoryBlock, InsertMethod
from llama_index.core.prompts import RichPromptTemplate

from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock, newest_request
from llama_index_memory_tiers.blocks.foreign import for_one_question
from llama_index_memory_tiers.budget import (
    RESULT_ROLES,
    SYSTEM_ROLES,
    Item,
    Packed,
    Packer,
    Part,
    Row,
    TokenCounter,
    WindowPlan,
    section_text,
    widened,
)
from llama_index_memory_tiers.copies import PlainText, Source, clone, many_objects
from llama_index_memory_tiers.errors import BudgetError, StorageError
from llama_index_memory_tiers.events import (
    BlockFailed,
    BlockRecalled,
    ContextBuilt,
    ContextReport,
    ItemReport,
    PartReport,
    emit,
)
from llama_index_memory_tiers.instruments import listening
from llama_index_memory_tiers.records import Place, Scope
from llama_index_memory_tiers.rendering import RecallPosition, render
from llama_index_memory_tiers.storage import OwnerReader, Storage, Window, owner_key

_logger = logging.getLogger(__name__)

_REMEMBERED_TURNS = 256
_FOREIGN_SECONDS = 60.0

Content = Part | Exception
"""What a block answered: its part, or what it raised."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How contexts are built.

    Args:
        token_limit: Everything returned, after the reserve.
        window_share: Of it, what the window may claim first.
        insert_method: Where the memory goes.
        template: How sections are written; `None` as stock does.
        recall_position: Where volatile sections go.
        raise_on_overflow: Raise when what must be shown does not fit.
        shares: Tokens that a block may claim, by its name.
    """

    token_limit: int
    window_share: int
    insert_method: InsertMethod
    template: RichPromptTemplate | None
    recall_position: RecallPosition
    raise_on_overflow: bool
    shares: Mapping[str, int] = field(default_factory=dict)


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


class WindowView:
    """A window as the packer sees it; what is made from it is made once, when it is needed, until the window changes.

    Args:
        window: The window.
        said: Rows of the running turn as they were said, by id.
    """

    def __init__(self, window: Window, said: Mapping[str, Row] | None = None) -> None:
        self.window = window
        self._said = said or {}

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Its messages, those of the running turn as they were said; shared by all contexts."""
        with many_objects():
            return tuple(
                self._said.get(stored.id) or Row(stored.message, stored.tokens, stored.place)
                for stored in self.window.messages
            )

    @cached_property
    def stored(self) -> tuple[ChatMessage, ...]:
        """The messages as they are stored, without secrets: what blocks, models and reports may see."""
        if self._said:
            return tuple(stored.message for stored in self.window.messages)
        return tuple(row.message for row in self.rows)

    @cached_property
    def plan(self) -> WindowPlan:
        """What comes and goes together."""
        return WindowPlan(self.rows)

    @cached_property
    def _sources(self) -> Mapping[int, Source]:
        """What each message is made from, by the identity of the shared one."""
        pairs = zip(self.rows, self.window.messages, strict=True)
        return {id(row.message): stored.source for row, stored in pairs if stored.id not in self._said}

    def handed_out(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Copies of messages, for somebody who may change them."""
        sources = self._sources
        with many_objects():
            return [
                source.message() if isinstance(source := sources.get(id(message)), PlainText) else clone(message)
                for message in messages
            ]

    def alone(self, limit: int) -> list[ChatMessage] | None:
        """The window as it is, if it fits and nothing in it has to be left out: then there is nothing to pack."""
        messages = self.window.messages
        first = next((stored.role for stored in messages if stored.role not in SYSTEM_ROLES), None)
        if self._said or first in RESULT_ROLES or sum(stored.tokens for stored in messages) > limit:
            return None
        with many_objects():
            return [stored.message for stored in messages]


class WindowViews:
    """The newest view of each session, as a log hands out the same window until it changes.

    Args:
        counter: Measures.
    """

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._kept: OrderedDict[Scope, WindowView] = OrderedDict()

    def clear(self) -> None:
        """Let all views go."""
        self._kept.clear()

    def of(self, scope: Scope, window: Window, raw: Mapping[str, ChatMessage]) -> WindowView:
        """The view of a window.

        Args:
            scope: Whose.
            window: The active messages, as stored.
            raw: Messages of the running turn whose secrets were replaced in the store, by id.

        Returns:
            The view; with raw messages it is made for this request alone.
        """
        known = self._kept.get(scope)
        if known is None or known.window is not window:
            known = self._kept[scope] = WindowView(window)
        self._kept.move_to_end(scope)
        while len(self._kept) > _REMEMBERED_TURNS:
            self._kept.popitem(last=False)
        if not raw:
            return known
        said = {
            stored.id: Row(message, self._counter.message(message), stored.place)
            for stored in window.messages
            if (message := raw.get(stored.id)) is not None
        }
        return WindowView(window, said) if said else known


@dataclass(frozen=True, slots=True)
class Request:
    """What a context is asked for.

    Args:
        scope: Who asks.
        view: The active messages, running turn as it was said.
        text: The current request.
        given: Messages that the caller told, or the request.
        limit: Tokens allowed.
        now: The clock.
        block_kwargs: Passed on to foreign blocks.
        told: The messages were told by the caller, who may tell others the next time.
    """

    scope: Scope
    view: WindowView
    text: str
    given: tuple[ChatMessage, ...]
    limit: int
    now: datetime
    block_kwargs: Mapping[str, Any]
    told: bool = False

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """What stock and third-party blocks are given."""
        return self.given if self.told else (*self.view.stored, *self.given)

    @property
    def turn(self) -> int:
        """Sequence number of the newest user message."""
        for stored in reversed(self.view.window.messages):
            if stored.role == MessageRole.USER:
                return stored.seq
        return 0


def make_request(
    scope: Scope,
    view: WindowView,
    *,
    asked: str | ChatMessage | None,
    messages: Sequence[ChatMessage] | None,
    redact: Callable[[ChatMessage], ChatMessage],
    limit: int,
    now: datetime,
    block_kwargs: Mapping[str, Any],
) -> Request:
    """Put together what blocks and packer need to know.

    Args:
        scope: Who asks.
        view: The active messages.
        asked: The request as text or message; `None` means the newest user message.
        messages: Or these messages, whose newest user message is the request.
        redact: Takes secrets out of what the caller told, before any block or model sees it.
        limit: Tokens allowed.
        now: The clock.
        block_kwargs: Passed on to foreign blocks.

    Returns:
        The request.
    """
    given = list(messages or ())
    if isinstance(asked, ChatMessage):
        given.append(asked)
    elif asked is not None:
        given.append(ChatMessage(role=MessageRole.USER, content=asked))
    given = [redact(message) for message in given]
    asking = (stored.text for stored in reversed(view.window.messages) if stored.role == MessageRole.USER)
    text = newest_request(given) or (given[-1].content or "" if given else next(asking, ""))
    return Request(
        scope=scope,
        view=view,
        text=text,
        given=tuple(given),
        limit=limit,
        now=now,
        block_kwargs=block_kwargs,
        told=messages is not None,
    )


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


class ContextBuilder:
    """Builds contexts for one set of blocks and settings.

    Args:
        storage: What blocks read.
        blocks: In the order given by the user.
        counter: Measures.
        settings: How.
    """

    def __init__(
        self,
        storage: Storage,
        blocks: Sequence[BaseMemoryBlock[Any]],
        counter: TokenCounter,
        settings: Settings,
    ) -> None:
        self._storage = storage
        self._blocks = tuple(blocks)
        self._counter = counter
        self._settings = settings
        self._turns = TurnCache()
        self._counted: OrderedDict[tuple[Any, ...], None] = OrderedDict()
        self.views = WindowViews(counter)

    def drop_remembered(self) -> None:
        """Let go of what was recalled and seen for earlier requests."""
        self._turns.kept.clear()
        self.views.clear()

    async def messages(self, request: Request) -> list[ChatMessage]:
        """The context alone; see `build`."""
        alone = None if self._blocks else request.view.alone(request.limit)
        if alone is None:
            built = await self.build(request)
            await self._visited(request, built.contents)
            return built.messages
        tokens = sum(stored.tokens for stored in request.view.window.messages)
        self._tell(request, tokens, overflow=False)
        return alone

    async def _visited(self, request: Request, contents: Mapping[str, Content]) -> None:
        """Count what was recalled, once a turn; a context is handed out whether or not that can be written."""
        parts = [content for content in contents.values() if isinstance(content, Part)]
        shown = {part.name: [one for item in part.items for one in item.visits] for part in parts}
        blocks = {block.name: block for block in self._blocks if isinstance(block, TieredMemoryBlock)}
        turn = (request.scope, request.turn, request.text)
        found = {name: list(dict.fromkeys(ids)) for name, ids in shown.items() if ids and name in blocks}
        if not found or turn in self._counted:
            return
        self._counted[turn] = None
        while len(self._counted) > _REMEMBERED_TURNS:
            self._counted.popitem(last=False)
        for name, ids in found.items():
            owner = owner_key(request.scope, request.view.window.sid, per_session=blocks[name].per_session)
            try:
                await self._storage.records.parts.visit(owner, ids)
            except StorageError as error:
                about = {"session_id": request.scope.session_id, "error": type(error).__name__}
                _logger.warning("visits not counted", extra=about)

    def _tell(self, request: Request, tokens: int, *, overflow: bool) -> None:
        emit(ContextBuilt(session_id=request.scope.session_id, tokens=tokens, limit=request.limit, overflow=overflow))

    async def build(self, request: Request) -> Built:
        """Recall, pack, render.

        Args:
            request: What for.

        Returns:
            The context; its messages are the caller's to change.

        Raises:
            BudgetError: What must be shown does not fit, and the memory was told to raise.
        """
        contents = await self._answers([b for b in self._blocks if b.priority == 0], request, frozenset())
        packer = self._packer(request)
        packer.begin([part for part in contents.values() if isinstance(part, Part)])
        # The window is planned first: what it shows need not be recalled.
        others = [block for block in self._blocks if block.priority > 0]
        contents |= await self._answers(others, request, packer.shown)
        packed = await self._pack(packer, contents)
        if packed.overflow and self._settings.raise_on_overflow:
            raise BudgetError(
                f"The newest user message and the blocks of priority 0 take {packed.total} tokens.",
                allowed=f"{request.limit} tokens are allowed (token_limit less reserve_tokens).",
                remedy="Raise token_limit, shorten the message or the static content, or use overflow='event'.",
            )
        self._tell(request, packed.total, overflow=packed.overflow)
        return Built(request.view.handed_out(self._render(packed)), packed, contents)

    # -- recall ----------------------------------------------------------------------------------------------

    async def _answers(
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

    async def raw_contents(self, request: Request) -> dict[str, Any]:
        """What each block says, uncut: text, content blocks or messages; empty answers are missing."""
        found: dict[str, Any] = {}
        for name, content in (await self._answers(self._blocks, request, request.view.plan.places)).items():
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

    async def _ask(self, block: BaseMemoryBlock[Any], request: Request, visible: frozenset[Place]) -> Content:
        began = time.monotonic()
        try:
            asking = (
                self._recall(block, request, visible)
                if isinstance(block, TieredMemoryBlock)
                else self._get(block, request)
            )
            part = await asyncio.wait_for(asking, _seconds(block))
        except Exception as error:  # noqa: BLE001  # a block may raise anything; the chat goes on
            emit(BlockFailed(session_id=request.scope.session_id, block=block.name, error=type(error).__name__))
            return error
        if listening():
            seconds, session = time.monotonic() - began, request.scope.session_id
            emit(BlockRecalled(session_id=session, block=block.name, items=_count(part), seconds=seconds))
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
        return _foreign_part(block, content)

    # -- packing ---------------------------------------------------------------------------------------------

    def _packer(self, request: Request) -> Packer:
        return Packer(
            self._counter,
            limit=request.limit,
            rows=request.view.rows,
            render=self._render,
            window_share=min(self._settings.window_share, request.limit),
            plan=request.view.plan,
        )

    async def _pack(self, packer: Packer, contents: Mapping[str, Content]) -> Packed:
        """Fill what the window and priority 0 have left."""
        shares = self._settings.shares
        parts = {
            name: replace(part, share_tokens=shares[name]) if name in shares else part
            for name, part in contents.items()
            if isinstance(part, Part)
        }
        ordered = sorted((b for b in self._blocks if b.name in parts), key=lambda block: block.priority)
        for at, block in enumerate(ordered):
            if block.priority > 0:
                part = self._widened(packer, [parts[each.name] for each in ordered[at:]])
                cut = None if part.items else await self._cut_to_fit(block, part, packer.room(part))
                packer.take(part if cut is None else cut, cut=cut is not None)
        packer.take_late()
        packer.fill()
        return packer.result()

    def _widened(self, packer: Packer, parts: Sequence[Part]) -> Part:
        """The first of these parts; its share is as much larger as the others leave, if its block will cut it."""
        part, later = parts[0], parts[1:]
        if part.items or part.share_tokens is None or self._size(part.messages or part.blocks) <= packer.room(part):
            return part
        sizes = [self._size_of(each) for each in later]
        claims = [
            size if each.share_tokens is None else min(size, each.share_tokens)
            for size, each in zip(sizes, later, strict=True)
        ]
        free = packer.room(replace(part, share_tokens=None))
        return replace(part, share_tokens=widened(part.share_tokens, free, claims))

    def _size_of(self, part: Part) -> int:
        text = section_text(part.items) if part.items else ""
        return self._counter.text(text) + self._size(part.messages or part.blocks)

    async def _cut_to_fit(self, block: BaseMemoryBlock[Any], part: Part, room: int) -> Part | None:
        """Let a foreign block cut its own content; `None` when it need not or does not."""
        try:
            return await asyncio.wait_for(self._cut(block, part, room), _seconds(block))
        except Exception as error:  # noqa: BLE001  # a foreign block may raise anything
            emit(BlockFailed(block=block.name, error=type(error).__name__))
            return None

    async def _cut(self, block: BaseMemoryBlock[Any], part: Part, room: int) -> Part | None:
        cut: Part | None = None
        content: list[Any] = list(part.messages or part.blocks)
        # A block may cut too little: it is asked again while that makes its content smaller.
        while content and (size := self._size(content)) > room:
            alone = len(content) == 1 and isinstance(content[0], TextBlock)
            left = await block.atruncate(content[0].text if alone else copy.copy(content), size - room)
            cut = _foreign_part(block, left) if left else None
            if cut is None:
                return None
            content = list(cut.messages or cut.blocks)
            if self._size(content) >= size:
                return None
        return cut if cut is None else replace(cut, stable=part.stable)

    def _size(self, content: Sequence[Any]) -> int:
        if content and isinstance(content[0], ChatMessage):
            return sum(self._counter.message(message) for message in content)
        return self._counter.blocks(content)

    def _render(self, packed: Packed) -> list[ChatMessage]:
        return render(
            packed,
            insert_method=self._settings.insert_method,
            template=self._settings.template,
            recall_position=self._settings.recall_position,
        )

    # -- the report ------------------------------------------------------------------------------------------

    def report(self, request: Request, built: Built) -> ContextReport:
        """Say where the tokens of a context went, and what was left out and why."""
        packed = built.packed
        kept = {part.part.name: part for part in packed.parts}
        parts = []
        for block in self._blocks:
            content = built.contents.get(block.name)
            mine = kept.get(block.name)
            parts.append(
                PartReport(
                    name=block.name,
                    priority=block.priority,
                    tokens=mine.tokens if mine is not None else 0,
                    kept=tuple(self._item(item) for item in (mine.items if mine is not None else ())),
                    left_out=tuple(
                        self._item(out.item, out.reason)
                        for out in packed.left_out
                        if out.part == block.name and out.item is not None
                    ),
                    error=type(content).__name__ if isinstance(content, Exception) else None,
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
            messages=tuple(built.messages),
        )

    def _item(self, item: Item, reason: str = "") -> ItemReport:
        return ItemReport(item.text, self._counter.text(item.text), item.score, item.legs, reason)


def _count(part: Part) -> int:
    return len(part.items or part.messages or part.blocks)


def _seconds(block: BaseMemoryBlock[Any]) -> float:
    """How long a block may take for one answer."""
    return float(getattr(block, "timeout_seconds", _FOREIGN_SECONDS))


def _foreign_part(block: BaseMemoryBlock[Any], content: Any) -> Part:
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
