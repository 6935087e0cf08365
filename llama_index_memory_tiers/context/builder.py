"""One context out: blocks answer at the same time, each for itself, and the best that fits is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import BaseMemoryBlock, InsertMethod
from llama_index.core.prompts import RichPromptTemplate

from llama_index_memory_tiers.budget import Packed, Packer, Part, TokenCounter, section_text, widened
from llama_index_memory_tiers.context.answers import Answers, Content, uncut
from llama_index_memory_tiers.context.built import Built
from llama_index_memory_tiers.context.foreign import content_size, cut_to_fit
from llama_index_memory_tiers.context.request import Request
from llama_index_memory_tiers.context.window_view import WindowViews
from llama_index_memory_tiers.embeddings import one_context
from llama_index_memory_tiers.errors import BudgetError
from llama_index_memory_tiers.events import ContextBuilt, ContextReport, emit
from llama_index_memory_tiers.rendering import RecallPosition, render
from llama_index_memory_tiers.storage import Storage


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
        self._blocks = tuple(blocks)
        self._counter = counter
        self._settings = settings
        self._answers = Answers(storage, counter)
        self._cursors = storage.cursors
        self.views = WindowViews(counter)

    def drop_remembered(self) -> None:
        """Let go of what was recalled and seen for earlier requests."""
        self._answers.drop_remembered()
        self.views.clear()

    async def messages(self, request: Request) -> list[ChatMessage]:
        """The context alone; see `build`."""
        alone = None if self._blocks else request.view.alone(request.limit)
        if alone is None:
            built = await self.build(request)
            await self._answers.count_visits(self._blocks, request, built.contents)
            return built.messages
        self._tell(request, request.view.window.tokens, overflow=False)
        return alone

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
        with one_context():
            contents = await self._answers.of([b for b in self._blocks if b.priority == 0], request, frozenset())
            packer = self._packer(request)
            packer.begin([part for part in contents.values() if isinstance(part, Part)])
            # The window is planned first: what it shows need not be recalled.
            others = [block for block in self._blocks if block.priority > 0]
            contents |= await self._answers.of(others, request, packer.shown)
        packed = await self._pack(packer, contents)
        if packed.overflow and self._settings.raise_on_overflow:
            raise BudgetError(
                f"The newest user message and the blocks of priority 0 take {packed.total} tokens.",
                allowed=f"{request.limit} tokens are allowed (token_limit less reserve_tokens).",
                remedy="Raise token_limit, shorten the message or the static content, or use overflow='event'.",
            )
        self._tell(request, packed.total, overflow=packed.overflow)
        return Built(request.view.handed_out(self._render(packed)), packed, contents)

    async def report(self, request: Request) -> ContextReport:
        """Build a context, and say where its tokens went and what was left out and why; raises as `build` does."""
        built = await self.build(request)
        cursors = await self._cursors.all(request.view.window.sid)
        unread = {name: cursor.error for name, cursor in cursors.items()}
        return built.report(request, self._blocks, self._counter, unread)

    async def raw_contents(self, request: Request) -> dict[str, Any]:
        """What each block says, uncut: text, content blocks or messages; empty answers are missing."""
        with one_context():
            return uncut(await self._answers.of(self._blocks, request, request.view.plan.places))

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
                cut = None if part.items else await cut_to_fit(block, part, packer.room(part), self._counter)
                packer.take(part if cut is None else cut, cut=cut is not None)
        packer.take_late()
        packer.fill()
        return packer.result()

    def _widened(self, packer: Packer, parts: Sequence[Part]) -> Part:
        """The first of these parts; its share is as much larger as the others leave, if its block will cut it."""
        part, later = parts[0], parts[1:]
        if part.items or part.share_tokens is None:
            return part
        if content_size(part.messages or part.blocks, self._counter) <= packer.room(part):
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
        return self._counter.text(text) + content_size(part.messages or part.blocks, self._counter)

    def _render(self, packed: Packed) -> list[ChatMessage]:
        return render(
            packed,
            insert_method=self._settings.insert_method,
            template=self._settings.template,
            recall_position=self._settings.recall_position,
        )
