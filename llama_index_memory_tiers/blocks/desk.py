"""Desk: one block's records of one owner, for what is written and looked up by hand rather than absorbed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.errors import InvalidMessageError
from llama_index_memory_tiers.events import RecordsChanged, emit_changes
from llama_index_memory_tiers.records import Changes, Reads, Record, Scope
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.storage import OwnerReader, Storage, owner_key


@runtime_checkable
class Holder(Protocol):
    """What a block asks of the memory that it is used by."""

    def desk(self, block: str) -> Desk:
        """The place of one of its blocks, by name."""


class Desk:
    """Reads and writes one block's records of one owner; text passes the redaction of its memory.

    Args:
        storage: Where.
        scope: Whose.
        block: Key of the block.
        counter: Measures texts.
        redactor: Takes secrets out of what is written by hand, or `None`.
        consumers: Keys of the memory's blocks: they read a session that is made here from its beginning.
        per_session: Keep to the session even though there is a user.
    """

    def __init__(
        self,
        storage: Storage,
        scope: Scope,
        block: str,
        counter: TokenCounter,
        *,
        redactor: Redactor | None = None,
        consumers: Sequence[str] = (),
        per_session: bool = False,
    ) -> None:
        self.storage = storage
        self.scope = scope
        self.block = block
        self.counter = counter
        self._redactor = redactor
        self._consumers = tuple(consumers)
        self._per_session = per_session
        self._owner: str | None = None

    def now(self) -> datetime:
        """The storage's clock."""
        return self.storage.clock()

    def new_id(self) -> str:
        """A public id."""
        return self.storage.ids()

    def redacted(self, text: str) -> str:
        """The text without secrets; everything written by hand goes through here.

        Raises:
            InvalidMessageError: It is no text.
        """
        if not isinstance(text, str):
            raise InvalidMessageError(
                f"{text!r:.100} was given to {self.block}.",
                allowed="What is written by hand is text.",
                remedy="Pass a text, or leave the argument out; nothing was stored.",
            )
        return text if self._redactor is None else str(self._redactor.value(text))

    def redacted_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Named values without secrets, in their names too; a name such as `password` makes its value one.

        Args:
            fields: JSON-like.

        Returns:
            A copy.
        """
        return dict(fields) if self._redactor is None else dict(self._redactor.value(dict(fields)))

    async def owner(self) -> str:
        """Whose records these are; a session that is its own owner is made if need be."""
        if self._owner is None:
            self._owner = owner_key(self.scope, await self._sid(), per_session=self._per_session)
        return self._owner

    async def _sid(self) -> int:
        if self.scope.user_id is not None and not self._per_session:
            return 0  # the user is the owner, whatever the session
        user, session = self.scope.user_id or "", self.scope.session_id
        made = await self.storage.log.open_session(user, session, now=self.storage.now(), consumers=self._consumers)
        return made.sid

    async def reader(self) -> OwnerReader:
        """The owner's records, for reading."""
        return OwnerReader(self.storage.records, await self.owner(), self.block)

    async def change(self, merge: Callable[[Sequence[Record]], Changes], reads: Reads | None = None) -> Changes:
        """Change the owner's records in one transaction.

        Args:
            merge: Pure: records that `reads` names, as they are now → changes. May be called more than once.
            reads: Default none.

        Returns:
            What was written.
        """
        owner = await self.owner()
        changes = await self.storage.records.change(owner, self.block, reads=reads or Reads(), merge=merge)
        if changes != Changes():
            emit_changes(RecordsChanged, self.block, changes, session_id=self.scope.session_id)
        return changes
