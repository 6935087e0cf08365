"""What is kept is delivered, forgotten, moved and closed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from llama_index.core.base.embeddings.base import BaseEmbedding
from typing_extensions import Self

from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.events import (
    FlushReport,
    ForgetReceipt,
    MemoryForgotten,
    emit,
)
from llama_index_memory_tiers.instruments import span
from llama_index_memory_tiers.memory.putting import Putting
from llama_index_memory_tiers.storage import DeadLetter, ReindexProgress, ReindexReport
from llama_index_memory_tiers.storage.selection import Derived, ForgetFilter, ForgetScope, Selection, checked_selection
from llama_index_memory_tiers.storage.transfer import Progress, Target, TransferReport


class Keeping(Putting):
    """What happens to what is kept: delivered, forgotten, moved, closed."""

    async def aflush(self) -> FlushReport:
        """Let all blocks absorb this session, and what waits in the user's other sessions, now.

        Returns:
            Per block what was absorbed and what still waits, and why. Never raises for what a block does.
        """
        with span("TieredMemory.aflush"):
            keys = [self._key]
            if self.user_id is not None:
                others = await self.storage.log.behind(self.user_id, self._shared.delivery.keys)
                keys += [(s.user_id, s.session_id) for s in others if s.session_id != self.session_id]
            return await self._shared.delivery.flush(keys)

    async def adrain(self) -> FlushReport:
        """Absorb what is due in everybody's sessions of this storage, for a worker of its own process.

        What is due is decided as in the background: by complete turns, by what left the window, by silence. Workers
        may run side by side, as each session is claimed.

        Returns:
            Per block what was absorbed and what still waits. Never raises for what a block does.
        """
        return await self._shared.delivery.drain_all()

    async def adead_letters(self) -> list[DeadLetter]:
        """Ranges of the user's sessions that a block could not absorb."""
        only = None if self.user_id is not None else self.session_id
        return await self.storage.cursors.dead(self.user_id or "", only)

    async def areplay(self) -> FlushReport:
        """Try the dead letters again; those that succeed are gone."""
        return await self._shared.delivery.replay(await self.adead_letters(), self.user_id or "")

    # -- forgetting ------------------------------------------------------------------------------------------

    async def aforget(
        self,
        *,
        scope: ForgetScope | None = None,
        ids: Sequence[str] | None = None,
        before: datetime | None = None,
        filter: ForgetFilter | None = None,  # noqa: A002  # as in other memories
        derived: Derived = "drop",
    ) -> ForgetReceipt:
        """Forget messages and what was learnt from them, and prove it: everything is read again afterwards.

        What is given must all hold. A crash in the middle loses nothing of the order: the next start finishes it.
        SQLite overwrites what it deletes in the file; PostgreSQL does so when it vacuums.

        Args:
            scope: `session`: in this session only. `user`: in all sessions of the user. Left out: whatever is
                the user's, or the session's when there is no user.
            ids: Messages and records with these ids.
            before: What was said before this moment; naive means UTC.
            filter: What matches.
            derived: A record that came from a forgotten message and from others too is dropped either way;
                `rederive` lets its block read the others again.

        Returns:
            Rows that are gone and rows that are left, per store.

        Raises:
            ConfigurationError: Nothing was said, or something is not what it may be; nothing was forgotten.
        """
        selection = checked_selection(
            self.user_id or "",
            self.session_id,
            scope=scope,
            ids=ids,
            before=before,
            filter=filter,
            derived=derived,
        )
        shared = self._shared
        receipt, moved_back = await shared.forgetter.forget(
            replace(selection, external=shared.forgetter.external), self.scope
        )
        window = await self._window.forget(selection)
        shared.let_go(selection.user_id, selection.session_id)
        shared.contexts.drop_remembered()
        if moved_back:
            await self._read_again(selection)
        if window is not None:
            receipt = replace(receipt, entries=(*receipt.entries, window))
        self._tell_forgotten(receipt)
        return receipt

    def _tell_forgotten(self, receipt: ForgetReceipt) -> None:
        removed = receipt.removed
        emit(
            MemoryForgotten(
                session_id=self.session_id,
                messages=removed.get("messages", 0),
                records=removed.get("records", 0),
                complete=receipt.complete,
            )
        )

    async def _read_again(self, selection: Selection) -> None:
        keys = [self._key]
        if selection.session_id is None:
            behind = await self.storage.log.behind(selection.user_id, self._shared.delivery.keys)
            keys = [(session.user_id, session.session_id) for session in behind]
        for key in keys:
            if self.delivery == "inline":
                await self._postponable(self._shared.delivery.deliver(key))
            else:
                self._shared.delivery.schedule(key)

    # -- moving ----------------------------------------------------------------------------------------------

    @checked
    async def aexport(
        self, target: Target, *, scope: ForgetScope | None = None, progress: Progress | None = None
    ) -> TransferReport:
        """Write everything that is kept as JSON Lines, for a backup or another database.

        What is held elsewhere is not in it: a vector store of yours, a journal's files, and the window in a
        `chat_store` of yours.

        Args:
            target: Path of a file, replaced in one step, or a stream of bytes.
            scope: `user`: all sessions of the user, the default when there is one. `session`: this session, and
                what was learnt from it.
            progress: Gets the lines done and the lines in all, perhaps from another thread.

        Returns:
            What was written.

        Raises:
            ConfigurationError: Names the argument, its value and the way out.
        """
        asked = checked_selection(
            self.user_id or "", self.session_id, scope=scope or ("session" if self.user_id is None else "user")
        )
        return await self.storage.export_to(target, asked.user_id, asked.session_id, progress)

    @checked
    async def aimport(self, source: Target, *, progress: Progress | None = None) -> TransferReport:
        """Take in what `aexport` wrote, here or elsewhere, in one transaction; twice is the same as once.

        Secrets that the file holds are taken out as this memory's `redaction` says.

        Args:
            source: Path of a file, or a stream of bytes.
            progress: See `aexport`.

        Returns:
            What was stored, and how many sessions were here already.

        Raises:
            ConfigurationError: The file is not whole, is somebody else's, or one of its sessions holds other messages
                here; nothing was stored.
        """
        only = None if self.user_id is not None else self.session_id
        redactor = self._shared.entries.redactor
        return await self.storage.import_from(source, self.user_id or "", only, progress, redaction=redactor)

    async def astop(self) -> None:
        """Stop background work of this memory and all made from it by `for_session`, and begin no other.

        Everything can still be read and put; what waits is absorbed by `aflush`, or by other processes.
        """
        await self._shared.delivery.aclose()
        await self._shared.forgetter.aclose()
        await self._shared.upkeep.aclose()

    @checked
    async def areindex(
        self, *, again: bool = False, progress: ReindexProgress | None = None
    ) -> tuple[ReindexReport, ...]:
        """Embed everything that this user's blocks remember again, each with its own `embed_model`.

        For a memory that was built with another embedding model than its records; see `Storage.reindex`. Vectors in
        a `vector_store` of yours stay as they are.

        Args:
            again: Embed also what has a vector of the model already.
            progress: Gets the records done and the records in all, for one model after the other.

        Returns:
            One report per model; none when no block has one.
        """
        models: dict[str, tuple[BaseEmbedding, set[str]]] = {}
        for block in self.memory_blocks:
            model = getattr(block, "embed_model", None)
            elsewhere = getattr(block, "vector_store", None) is not None
            if isinstance(block, TieredMemoryBlock) and isinstance(model, BaseEmbedding) and not elsewhere:
                models.setdefault(model.model_name, (model, set()))[1].add(block.key)
        only = None if self.user_id is not None else self.session_id
        return tuple(
            [
                await self.storage.reindex(
                    model, user_id=self.user_id, session_id=only, blocks=keys, again=again, progress=progress
                )
                for model, keys in models.values()
            ]
        )

    @checked
    async def aclose(self, *, flush: bool = False) -> None:
        """Stop background work; close the storage if this memory opened it. Nothing is lost: the next start goes on.

        Args:
            flush: Let all blocks absorb what waits before, which may call models.
        """
        try:
            if flush and not self.storage.closed:
                await self.aflush()
        finally:
            if not self._derived:
                await self.astop()
                if self._shared.owns_storage:
                    await self.storage.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
