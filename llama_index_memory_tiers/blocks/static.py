"""StaticMemoryBlock: content that stands in every context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from llama_index.core.memory import StaticMemoryBlock as _CoreStaticMemoryBlock

from llama_index_memory_tiers.blocks.base import checked_fields


class StaticMemoryBlock(_CoreStaticMemoryBlock):
    """Content that stands in every context, such as who the user is or how to behave.

    The arguments are those of LlamaIndex's block of the same name. With priority 0, the default, it is never cut,
    and `TieredMemory` refuses at construction what could never fit.

    Args:
        static_content: A text, or content blocks: text, images, documents …, given as bytes, path or URL.
        name: Section in the context.
        priority: 0 is never cut, larger numbers are cut first.
    """

    stable: ClassVar[bool] = True

    def __init__(self, **fields: Any) -> None:
        with checked_fields(type(self), fields):
            super().__init__(**fields)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What `repr` shows: not the content, which may be private."""
        yield "name", self.name
        yield "priority", self.priority

    def __str__(self) -> str:
        return repr(self)
