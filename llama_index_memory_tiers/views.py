"""What one role of several sees of a shared memory: what is new for it, what matters to it, what it has seen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from llama_index.core.base.llms.types import ChatMessage

from llama_index_memory_tiers.blocks.claims import Claim
from llama_index_memory_tiers.board import MessageBoard, cause_names
from llama_index_memory_tiers.checks import check_whole, checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Cause, MessageMeta, StoredMessage
from llama_index_memory_tiers.storage.rows import ACTIVE, ARCHIVED

EVERYBODY = "all"
"""As an address: everybody, the same as no address at all."""

_logger = logging.getLogger(__name__)


def reaches(meta: MessageMeta, name: str) -> bool:
    """Whether a message is for a role: addressed to it, or to everybody.

    Args:
        meta: Of the message.
        name: Of the role.

    Returns:
        True or false; a message to others only reaches nobody else.
    """
    return not meta.send_to or name in meta.send_to or EVERYBODY in meta.send_to


def is_news(meta: MessageMeta, name: str, watch: frozenset[str]) -> bool:
    """Whether a role has to do something about a message.

    Args:
        meta: Of the message.
        name: Of the role.
        watch: Names of the causes that it watches.

    Returns:
        True when the message is addressed to the role by name, or to everybody with a watched cause and by somebody
        else. A blank cause is watched by nobody.
    """
    if name in meta.send_to:
        return True
    return reaches(meta, name) and meta.sent_from != name and bool(meta.cause_by) and meta.cause_by in watch


class MemoryView:
    """A role's view of a memory that several share; `TieredMemory.view(name, …)` makes it.

    A view reads the log behind a cursor of its own, which lasts: what was handled is not news again after a restart,
    and what failed is.

    Args:
        board: The session's messages.
        name: Of the role; messages are addressed to it by this name.
        watch: Causes, classes or names, whose messages concern the role.
        observe_all: Keep in its history also what reaches it without concerning it.
        remember: Keep a history at all; without one the view only filters.
        claim_seconds: How long what a dead process was handling waits for another; default 30.

    Raises:
        ConfigurationError: The name is blank.
    """

    def __init__(
        self,
        board: MessageBoard,
        name: str,
        *,
        watch: Cause | Iterable[Cause] = (),
        observe_all: bool = False,
        remember: bool = True,
        claim_seconds: float = 30.0,
    ) -> None:
        if not isinstance(name, str) or not name.strip():
            raise ConfigurationError(
                f"name={name!r:.100} was given.",
                allowed="A role's name is text with a visible character.",
                remedy="Pass the name that messages to the role are addressed to.",
            )
        self.board = board
        self.name = name
        self.watch = frozenset(cause_names([watch])) - {""}
        self.observe_all = observe_all
        self.remember = remember
        self.claim_seconds = claim_seconds

    def __repr__(self) -> str:
        return f"MemoryView(name={self.name!r}, session_id={self.board.scope.session_id!r})"

    @property
    def key(self) -> str:
        """Name of its cursor."""
        return f"view:{self.name}"

    def observe(self) -> Observation:
        """What is new for the role, once.

        `async with view.observe() as news:` counts it as seen when the block ends without an exception; after one it
        is new again. `await view.observe()` counts it as seen at once. While one handles what is new, in this process
        or another, there is nothing new for the others.

        Returns:
            To be entered or awaited; gives a list of messages, oldest first.
        """
        return Observation(self)

    async def important(self) -> list[StoredMessage]:
        """What the role has seen of the causes that it watches, oldest first."""
        return [message for message in await self.history() if message.meta.cause_by in self.watch]

    @checked
    async def history(self, k: int = 0) -> list[StoredMessage]:
        """What the role has seen and said, oldest first.

        Args:
            k: The newest so many; 0 (the default) means all.

        Returns:
            Messages that concerned it, with `observe_all` all that reached it; none without `remember`.

        Raises:
            ConfigurationError: `k` is negative.
        """
        count = check_whole("k", k, least=0)
        if not self.remember:
            return []
        session = await self.board.session()
        cursor = None if session is None else (await self.board.storage.cursors.all(session.sid)).get(self.key)
        seen = await self.board.until(cursor.pos if cursor is not None else 0)
        found = [message for message in seen if self._keeps(message.meta)]
        return found[max(0, len(found) - count) :] if count else found

    @checked
    async def say(self, message: ChatMessage, **about: Any) -> str | None:
        """Put a message in the role's name.

        Args:
            message: The message.
            about: `send_to`, `cause_by`, `created_at`, `uid`; see `MessageBoard.add`.

        Returns:
            Its id, or `None` when an identical one is there.
        """
        return await self.board.add(message, sent_from=self.name, **about)

    def concerns(self, message: StoredMessage) -> bool:
        """Whether a message is news for the role; see `is_news`."""
        return is_news(message.meta, self.name, self.watch)

    def _keeps(self, meta: MessageMeta) -> bool:
        if meta.sent_from == self.name or is_news(meta, self.name, self.watch):
            return True
        return self.observe_all and reaches(meta, self.name)


@dataclass(slots=True)
class _Claimed:
    """What an observation holds while it is handled."""

    claim: Claim
    pos: int
    hi: int


class Observation:
    """What is new for a role, counted as seen when it was handled; see `MemoryView.observe`.

    Args:
        view: Whose.
    """

    def __init__(self, view: MemoryView) -> None:
        self._view = view
        self._stack = AsyncExitStack()
        self._claimed: _Claimed | None = None

    def __await__(self) -> Generator[Any, None, list[StoredMessage]]:
        return self._at_once().__await__()

    async def _at_once(self) -> list[StoredMessage]:
        async with self as news:
            return news

    async def __aenter__(self) -> list[StoredMessage]:
        session = await self._view.board.session()
        if session is None:
            return []
        try:
            return await self._claim(session.sid, session.session_id)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise

    async def _claim(self, sid: int, session_id: str) -> list[StoredMessage]:
        view, storage = self._view, self._view.board.storage
        if view.key not in await storage.cursors.all(sid):
            await storage.cursors.add(sid, [(view.key, 0)])
        claim = Claim(storage, sid, view.key, seconds=view.claim_seconds)
        pos = await claim.take()
        if pos is None:
            return []
        self._claimed = _Claimed(claim, pos, pos)
        await self._stack.enter_async_context(claim.kept_alive())
        rows, last = await storage.log.read(sid, session_id, after=pos, statuses=(ACTIVE, ARCHIVED))
        self._claimed.hi = max(pos, last)
        return [row for row in rows if view.concerns(row)]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not to be cut off half way: a claim that stays would keep the next one waiting until it expires.
        ending = asyncio.ensure_future(self._end(handled=kind is None))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _end(self, *, handled: bool) -> None:
        claimed, self._claimed = self._claimed, None
        try:
            if claimed is None:
                return
            if not handled or claimed.hi == claimed.pos:
                await claimed.claim.release()
            elif not await claimed.claim.advance(claimed.pos, claimed.hi):
                _logger.warning("an observation was taken over by another worker", extra={"consumer": self._view.key})
        finally:
            await self._stack.aclose()
