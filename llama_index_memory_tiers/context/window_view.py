"""The window as contexts see it: what is made from it is made once, until it changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property

from llama_index.core.base.llms.types import ChatMessage

from llama_index_memory_tiers.budget import Exchanges, Row, TokenCounter, WindowPlan
from llama_index_memory_tiers.copies import PlainText, Source, fresh, many_objects
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.roles import RESULT_ROLES
from llama_index_memory_tiers.storage import Window

_KEPT_VIEWS = 256


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
        stored = self.window.messages
        made = fresh([one.source for one in stored])
        with many_objects():
            return tuple(
                self._said.get(one.id) or Row(message, one.tokens, one.place)
                for one, message in zip(stored, made, strict=True)
            )

    @cached_property
    def stored(self) -> tuple[ChatMessage, ...]:
        """The messages as they are stored, without secrets: what blocks, models and reports may see."""
        if self._said:
            return tuple(fresh([stored.source for stored in self.window.messages]))
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
        return fresh([sources.get(id(message), message) for message in messages])

    def alone(self, limit: int) -> list[ChatMessage] | None:
        """The window as it is, if it fits and nothing in it has to be left out: then there is nothing to pack."""
        if self._said or self.window.tokens > limit or not self._whole:
            return None
        return fresh([stored.source for stored in self.window.messages])

    @cached_property
    def _whole(self) -> bool:
        """Whether nothing is left out or moved whatever the room."""
        sources = (stored.source for stored in self.window.messages)
        plain = all(isinstance(source, PlainText) and source.role not in RESULT_ROLES for source in sources)
        return plain or self.plan.exchanges == Exchanges()


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
        while len(self._kept) > _KEPT_VIEWS:
            self._kept.popitem(last=False)
        if not raw:
            return known
        said = {
            stored.id: Row(message, self._counter.message(message), stored.place)
            for stored in window.messages
            if (message := raw.get(stored.id)) is not None
        }
        return WindowView(window, said) if said else known
