"""Forgetter: runs a job of forgetting, tells the blocks, and writes the receipt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.memory import StaticMemoryBlock as CoreStaticMemoryBlock
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.blocks.base import TieredMemoryBlock
from llama_index_memory_tiers.blocks.guarding import contained
from llama_index_memory_tiers.errors import StorageError
from llama_index_memory_tiers.events import ForgetEntry, ForgetReceipt
from llama_index_memory_tiers.records import Forgotten, Scope
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.forgetting import POINTS, STORES, Outcome
from llama_index_memory_tiers.storage.selection import Selection

_logger = logging.getLogger(__name__)
_NOTES_AT_ONCE = 50


class Forgetter:
    """Forgets for one set of blocks.

    Args:
        storage: Where.
        blocks: All blocks of a memory.
    """

    def __init__(self, storage: Storage, blocks: Sequence[BaseMemoryBlock[Any]]) -> None:
        self._storage = storage
        self._tellable = {b.key: b for b in blocks if isinstance(b, TieredMemoryBlock) and b.holds_external_data}
        storage.log.elsewhere.update(self._tellable)
        self._ours = [block for block in blocks if isinstance(block, TieredMemoryBlock)]
        self._unreached = tuple(
            block.name
            for block in blocks
            if not isinstance(block, TieredMemoryBlock | CoreStaticMemoryBlock) and block.accept_short_term_memory
        )
        self._asked = -1  # how many notes there had been when blocks were last told
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def external(self) -> tuple[str, ...]:
        """Keys of the blocks that hold data elsewhere."""
        return tuple(self._tellable)

    async def forget(self, selection: Selection, scope: Scope) -> tuple[ForgetReceipt, bool]:
        """Forget what is selected and look again.

        Args:
            selection: What, with `external`.
            scope: Who asks.

        Returns:
            The receipt, and whether a block has to read something again.
        """
        store = self._storage.forgetting
        # Files first: what a crash interrupts after `begin` is finished from the tables alone.
        files = await self._forget_files(selection, scope) if selection.everything else []
        if selection.filter is not None and selection.filter.contains is not None:
            files = await self._look_into_files(selection.filter.contains, selection, scope)
        run = await store.begin(selection)
        outcome = await store.run(run)
        told = [await self._tell(key, selection.user_id) for key in self._tellable]
        failpoints.reach("forget.blocks")
        await store.close(run.job)
        await store.resume()  # what an earlier call could not finish
        return ForgetReceipt((*_entries(outcome), *told, *files), self._unreached), outcome.moved_back

    async def _forget_files(self, selection: Selection, scope: Scope) -> list[ForgetEntry]:
        entries = []
        for block in self._ours:
            try:
                owners = await self._owners(selection, scope, per_session=block.per_session)
                removed = [await block.forget_owner(owner) for owner in owners]
            except Exception as error:  # noqa: BLE001  # a disk or a service of the user's: the receipt says so
                _logger.warning("not forgotten outside", extra={"block": block.key, "error": type(error).__name__})
                entries.append(ForgetEntry(block.name, 0, None, type(error).__name__))
                continue
            counts = [count for count in removed if count is not None]
            if counts:
                entries.append(ForgetEntry(block.name, sum(counts)))
        return entries

    async def _look_into_files(self, text: str, selection: Selection, scope: Scope) -> list[ForgetEntry]:
        """Say how often a text stands in files that people edit: it is theirs to take out there."""
        entries = []
        for block in self._ours:
            owners = await self._owners(selection, scope, per_session=block.per_session)
            try:
                found = [count for owner in owners if (count := await block.mentions(owner, text)) is not None]
            except Exception as error:  # noqa: BLE001  # a disk of the user's: the rest is forgotten all the same
                _logger.warning("not looked into", extra={"block": block.key, "error": type(error).__name__})
                entries.append(ForgetEntry(block.name, 0, None, type(error).__name__))
                continue
            if found:
                entries.append(ForgetEntry(block.name, 0, sum(found)))
        return entries

    async def _owners(self, selection: Selection, scope: Scope, *, per_session: bool) -> list[Scope]:
        """Who is forgotten as a whole, as a block sees it."""
        if selection.session_id is not None:
            return [scope] if per_session or scope.user_id is None else []
        if not per_session:
            return [scope]
        sessions = await self._storage.log.sessions(selection.user_id)
        return [Scope(session.session_id, scope.user_id, scope.agent_id) for session in sessions]

    async def _tell(self, key: str, user_id: str | None = None) -> ForgetEntry:
        """Tell a block everything that it has not been told of, and count what it was or was not told."""
        store, block = self._storage.forgetting, self._tellable[key]
        notes = await store.to_tell(key, user_id)
        done = 0
        for at in range(0, len(notes), _NOTES_AT_ONCE):
            part = notes[at : at + _NOTES_AT_ONCE]
            whole = Forgotten(
                tuple(record for _, note in part for record in note.records),
                tuple(message for _, note in part for message in note.messages),
            )
            try:
                await asyncio.wait_for(contained(block.forget(whole)), block.timeout_seconds)
            except Exception as error:  # noqa: BLE001  # whatever a store raises: it stays pending and says so
                left = sum(max(len(note.records), len(note.messages)) for _, note in notes[at:])
                _logger.warning("forgetting stays pending", extra={"block": key, "error": type(error).__name__})
                return ForgetEntry(key, done, left, type(error).__name__)
            await store.told([number for number, _ in part])
            done += sum(max(len(note.records), len(note.messages)) for _, note in part)
        return ForgetEntry(key, done, 0)

    def tell_waiting(self) -> None:
        """Tell blocks in the background what an earlier process could not tell them, and what was deleted by hand."""
        store = self._storage.forgetting
        if self._asked == store.noted or not (store.waiting or store.noted) or not self._tellable:
            return
        self._asked = store.noted
        task = asyncio.get_running_loop().create_task(self._tell_all())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_all(self) -> None:
        try:
            for key in self._tellable:
                await self._tell(key)
        except StorageError as error:
            _logger.warning("forgetting stays pending", extra={"error": type(error).__name__})
            self._asked = -1

    async def aclose(self) -> None:
        """Wait for what is being told on this loop."""
        mine = [task for task in self._telling if task.get_loop() is asyncio.get_running_loop()]
        await asyncio.gather(*mine, return_exceptions=True)


def _entries(outcome: Outcome) -> list[ForgetEntry]:
    stores = (*STORES, POINTS) if POINTS in outcome.removed else STORES
    return [ForgetEntry(store, outcome.removed.get(store, 0), _left(outcome, store)) for store in stores]


def _left(outcome: Outcome, store: str) -> int | None:
    return 0 if store == "cursors moved back" else outcome.left.get(store)
