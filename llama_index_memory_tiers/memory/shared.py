"""What all memories made from one by `for_session` have in common."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass, field

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore

from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.context import ContextBuilder
from llama_index_memory_tiers.delivery import Delivery
from llama_index_memory_tiers.entries import EntryMaker
from llama_index_memory_tiers.forgetting import Forgetter
from llama_index_memory_tiers.maintenance import Upkeep
from llama_index_memory_tiers.pacing import Key
from llama_index_memory_tiers.storage import Storage

_Turns = weakref.WeakValueDictionary[tuple[int, Key], asyncio.Lock]


@dataclass(slots=True)
class Shared:
    """What all memories made from one by `for_session` have in common."""

    storage: Storage
    owns_storage: bool
    store: AsyncDBChatStore | None
    counter: TokenCounter
    entries: EntryMaker
    delivery: Delivery
    contexts: ContextBuilder
    forgetter: Forgetter
    upkeep: Upkeep
    raw: dict[Key, dict[str, ChatMessage]] = field(default_factory=dict)
    stuck: dict[Key, bool] = field(default_factory=dict)
    turns: _Turns = field(default_factory=weakref.WeakValueDictionary)

    def turn(self, key: Key) -> asyncio.Lock:
        """A lock under which flushes of a session follow each other: a foreign store archives by position."""
        place = (id(asyncio.get_running_loop()), key)
        lock = self.turns.get(place)
        if lock is None:
            lock = self.turns[place] = asyncio.Lock()
        return lock

    def let_go(self, user_id: str, session_id: str | None = None) -> None:
        """Drop what is held in RAM of one session, or of all of a person."""
        for held in (self.raw, self.stuck):
            for key in [key for key in held if key[0] == user_id and session_id in {None, key[1]}]:
                del held[key]
