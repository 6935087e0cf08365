"""What a block wrote elsewhere for something that never came to be here: noted first, then deleted there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol

from llama_index_memory_tiers.records import Forgotten
from llama_index_memory_tiers.storage import Storage

_logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """Whatever keeps something outside the storage and can delete it there."""

    @property
    def key(self) -> str:
        """Name of its cursor."""

    @property
    def timeout_seconds(self) -> float:
        """Bound of one deletion."""

    async def forget(self, forgotten: Forgotten) -> None:
        """Delete."""


async def take_back(storage: Storage, block: Keeper, noting: Awaitable[tuple[int, Forgotten] | None]) -> None:
    """Have a block delete what it wrote elsewhere in vain; a cancelled caller stops it not.

    A crash after the block wrote and before the note stands leaves what was written there.

    Args:
        storage: Where the note stands until the block has deleted: a failure is tried again as any forgetting is.
        block: Which.
        noting: Writes the note; answers its number and content, or `None` when nothing is to be deleted.
    """
    await asyncio.shield(_take_back(storage, block, noting))


async def _take_back(storage: Storage, block: Keeper, noting: Awaitable[tuple[int, Forgotten] | None]) -> None:
    try:
        note = await noting
        if note is not None:
            await asyncio.wait_for(block.forget(note[1]), block.timeout_seconds)
            await storage.forgetting.told([note[0]])
    except Exception as error:  # noqa: BLE001  # whatever a store raises must not hide why this was called
        _logger.warning("forgetting stays pending", extra={"block": block.key, "error": type(error).__name__})
