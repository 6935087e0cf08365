"""What is kept can be listed and traced."""

from __future__ import annotations

from typing import Any

from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.listing import list_kept
from llama_index_memory_tiers.memory.base import MemoryBase
from llama_index_memory_tiers.provenance import Provenance, explain_origin


class Looking(MemoryBase):
    """What is kept, to be looked at."""

    async def alist(self) -> list[dict[str, Any]]:
        """List all that is kept for the user, or without one for the session: one row per message and record."""
        return await list_kept(self.storage, self.scope)

    @checked
    async def awhy(self, id: str) -> Provenance:  # noqa: A002  # the field's word for it
        """Say where a message or record comes from, and what came from it.

        Args:
            id: Public id of a message or record.

        Returns:
            The messages behind it, the records made from it, and the model and prompt that wrote it.

        Raises:
            ConfigurationError: Nothing with this id is kept for the user, or without one for the session.
        """
        return await explain_origin(self.storage, self.scope, id)
