"""The product's defaults for an evidence-recall harness: `make` a memory, `put` a turn of a two-person chat."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock

_storage: list[Storage] = []


def make(session_id: str, token_limit: int, embed_model: Any) -> TieredMemory:
    """One shared storage for the whole run; each chat is a user of its own."""
    if not _storage:
        _storage.append(Storage())
    return TieredMemory.from_defaults(
        storage=_storage[0],
        user_id=session_id,
        token_limit=token_limit,
        chat_history_token_ratio=0.1,
        memory_blocks=[VectorMemoryBlock(embed_model=embed_model)],
    )


async def put(memory: TieredMemory, turn: Any) -> None:
    """Hand over what a chat application knows: who spoke, and when."""
    message = ChatMessage(role=turn.role, content=turn.text)
    await memory.aput(message, created_at=turn.said_at, sent_from=turn.speaker)
