"""Notes, look-ups and whole turns by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from llama_index.core.llms import LLM

from llama_index_memory_tiers.blocks import VectorMemoryBlock
from llama_index_memory_tiers.blocks.desk import Desk
from llama_index_memory_tiers.checks import check_whole, checked
from llama_index_memory_tiers.conversation import answering_model, pair, respond
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.memory.getting import Getting
from llama_index_memory_tiers.memory.sessions import Sessions
from llama_index_memory_tiers.records import Recollection


class Recalling(Sessions, Getting):
    """Notes and turns by hand."""

    async def aremember(
        self,
        content: str,
        metadata: Mapping[str, Any] | None = None,
        partition: str | None = None,
        *,
        block: str | None = None,
    ) -> str:
        """Store a note that no message said; it is recalled like one.

        Args:
            content: The note; secrets are taken out.
            metadata: Anything that can be written as JSON, for `arecall(filter=…)`.
            partition: One of the block's partitions; default by its classifier.
            block: Name of the vector block; default the first one.

        Returns:
            Id of the note.

        Raises:
            InvalidMessageError: The note has no words, or its metadata cannot be written.
            ConfigurationError: There is no such block or partition.
        """
        vector, desk = self._vector(block)
        return await vector.remember(desk, content, metadata, partition)

    @checked
    async def arecall(
        self,
        query: str,
        top_k: int = 5,
        partitions: Collection[str] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002  # the field's word for it
        *,
        block: str | None = None,
    ) -> list[Recollection]:
        """Look up what the owner's messages and notes say about something.

        Args:
            query: What to look for; without any word nothing is found.
            top_k: At most so many, after partitions and filter; default 5.
            partitions: Only these.
            filter: Metadata that must be equal, such as `{"role": "user"}`; see `Recollection.metadata`.
            block: Name of the vector block; default the first one.

        Returns:
            Best first, with distances.

        Raises:
            ConfigurationError: There is no such block, or `top_k` is no whole number from 1.
        """
        check_whole("top_k", top_k, least=1)
        await self._shared.delivery.freshen(self._key)
        vector, desk = self._vector(block)
        return await vector.find(desk, query, top_k, partitions, filter)

    def _vector(self, name: str | None) -> tuple[VectorMemoryBlock, Desk]:
        for block in self.memory_blocks:
            if isinstance(block, VectorMemoryBlock) and name in (None, block.name):
                return block, self.desk(block.name)
        raise ConfigurationError(
            f"block={name!r:.100} was given." if name is not None else "This memory has no vector block.",
            allowed="Notes are kept by a VectorMemoryBlock of this memory.",
            remedy="Add a VectorMemoryBlock to memory_blocks, or pass the name of the one that is there.",
        )

    # -- one turn at a time, as MemoryOS has it ---------------------------------------------------------------

    @checked
    async def aadd_memory(self, user_message: str, assistant_message: str, timestamp: datetime | None = None) -> None:
        """Store a question and its answer.

        Args:
            user_message: What the user said.
            assistant_message: What the assistant answered.
            timestamp: When; naive means UTC; default now.
        """
        await self.aput_messages(pair(user_message, assistant_message), created_at=timestamp)

    @checked
    async def aget_response(
        self, user_message: str, assistant_message_context: str = "", *, llm: LLM | None = None
    ) -> str:
        """Answer a message with what is remembered, and remember both.

        Args:
            user_message: What the user says.
            assistant_message_context: What the answer is to heed.
            llm: The model; default that of a block, else that of `Settings` if you have set it.

        Returns:
            The answer.

        Raises:
            ConfigurationError: There is no model.
        """
        model = answering_model(llm, self.memory_blocks)
        size = sum(self._shared.counter.message(one) for one in pair(user_message, assistant_message_context))
        return await respond(self, model, user_message, assistant_message_context, spoken_for=size)
