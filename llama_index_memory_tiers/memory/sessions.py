"""Other sessions, roles and processes that share a memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import (
    BaseMemoryBlock,
)
from typing_extensions import Self

from llama_index_memory_tiers import retention
from llama_index_memory_tiers.board import Duplicates, MessageBoard
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.memory.putting import Putting
from llama_index_memory_tiers.records import Cause, Scope
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.addresses import lacks_password
from llama_index_memory_tiers.storage.chat_store import TieredChatStore
from llama_index_memory_tiers.views import MemoryView

HANDLE_VERSION = 1


class Sessions(Putting):
    """Other sessions, roles and processes, with the same storage."""

    @checked
    def for_session(self, session_id: str, user_id: str | None = None) -> Self:
        """Make a memory for another session with the same storage, blocks and settings, at next to no cost.

        Stock and third-party blocks hold what they learn in themselves, so that another user would be shown it: with
        such blocks, make a `TieredMemory` with blocks of its own per user.

        Args:
            session_id: The conversation.
            user_id: Another person; default the same.

        Returns:
            The memory; closing it leaves what is shared open.
        """
        scope = Scope(session_id, user_id if user_id is not None else self.user_id, self.agent_id)
        changed: dict[str, Any] = {"session_id": scope.session_id, "user_id": scope.user_id}
        if scope.user_id != self.user_id and self._shared.store is None:
            redactor = self._shared.entries.redactor
            changed["sql_store"] = TieredChatStore(self.storage, user_id=scope.user_id, redaction=redactor)
        return self.model_copy(update=changed)

    @checked
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:  # noqa: ARG002
        """Copy the memory; storage, blocks and background work are shared, and closing the copy leaves them open.

        Args:
            update: Fields that differ; see `for_session`.
            deep: Makes no difference: what a memory holds stands in its storage.

        Returns:
            The copy.
        """
        twin = super().model_copy(update=update)
        twin._derived = True  # noqa: SLF001  # of the same class
        twin._window = twin._make_window()  # noqa: SLF001  # of the same class
        return twin

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HANDLE_IDS and getattr(self, "_window", None) is not None:
            raise ConfigurationError(
                f"{name}={value!r:.100} was assigned to a memory.",
                allowed="A memory belongs to one session, user and agent as long as it lives.",
                remedy="Make another with for_session(session_id, user_id), or a TieredMemory of its own.",
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[Any, Any]:
        raise ConfigurationError(
            "A TieredMemory was pickled.",
            allowed="Connections and background work stay in their process.",
            remedy="Send to_handle(), which is JSON, and take it up with TieredMemory.from_handle().",
        )

    @checked
    def board(self, *, deduplicate: Duplicates = "id") -> MessageBoard:
        """This session's messages, to be looked up by cause, by role and by content, added and deleted.

        Args:
            deduplicate: What it refuses to add twice: the same `id` (default), or the same `content`.

        Returns:
            The board; keep it, as its index is read once.

        Raises:
            ConfigurationError: The window is kept in a chat store of your own, which knows no metadata.
        """
        if self._shared.store is not None:
            raise ConfigurationError(
                f"chat_store={type(self._shared.store).__name__} keeps this memory's window.",
                allowed="Causes and addresses of messages are kept in our own log only.",
                remedy="Leave chat_store out.",
            )

        async def put(messages: list[ChatMessage], uids: list[str], *, distinct: bool = False, **about: Any) -> int:
            return await self._put(messages, uids, self._shared.entries.describe(**about), distinct=distinct)

        redacted = self._shared.entries.redacted
        return MessageBoard(self.storage, self.scope, put=put, redacted=redacted, deduplicate=deduplicate)

    @checked
    def view(
        self,
        name: str,
        *,
        watch: Cause | Iterable[Cause] = (),
        observe_all: bool = False,
        remember: bool = True,
    ) -> MemoryView:
        """What one of several roles sees of this session.

        Args:
            name: Of the role; messages are addressed to it by this name.
            watch: Causes, classes or names, whose messages concern the role.
            observe_all: Keep in its history also what reaches it without concerning it.
            remember: Keep a history at all; without one the view only filters.

        Returns:
            The view.
        """
        return MemoryView(
            self.board(),
            # Messages are addressed to the name as it is stored.
            self._shared.entries.name(name) if isinstance(name, str) else name,
            watch=watch,
            observe_all=observe_all,
            remember=remember,
            claim_seconds=self.claim_seconds,
        )

    def to_handle(self) -> dict[str, Any]:
        """Describe this memory as plain JSON data, for a context that is stored and taken up again.

        Returns:
            Address without secrets, scope and settings; no blocks, no models.
        """
        return {
            "version": HANDLE_VERSION,
            "storage": None if self.storage.private else self.storage.address,
            "table_name": self.storage.table_name,
            "db_schema": self.storage.db_schema,
            "session_id": self.session_id,
            "user_id": self.user_id,
            "agent_id": self.agent_id,
            "settings": {name: getattr(self, name) for name in _HANDLE_SETTINGS}
            | {
                "insert_method": self.insert_method.value,
                "budget": self.budget.to_dict() if self.budget is not None else None,
                "retention": retention.as_data(self.retention),
            },
            "redaction": _kind_of(self._shared.entries.redactor),
        }

    @classmethod
    def from_handle(
        cls,
        handle: Mapping[str, Any],
        *,
        storage: Storage | str | None = None,
        memory_blocks: list[BaseMemoryBlock[Any]] | None = None,
        **settings: Any,
    ) -> Self:
        """Take up a memory again.

        Args:
            handle: From `to_handle`.
            storage: Where it is; default the handle's address, which holds no password.
            memory_blocks: The blocks, as a handle holds no code and no models.
            settings: Override the handle's.

        Returns:
            The memory.

        Raises:
            ConfigurationError: The handle is of a newer version or not whole, or its storage was private.
        """
        _check_handle(handle, whole=not isinstance(storage, Storage))
        if "redaction" not in settings:
            settings["redaction"] = _redaction_of(handle)
        address = storage if storage is not None else handle["storage"]
        if address is None:
            raise ConfigurationError(
                "The handle of a memory with a private temporary storage was given without storage=.",
                allowed="A private storage ends with the memory that opened it.",
                remedy="Pass the same open Storage, or use a file or a database from the beginning.",
            )
        if storage is None and lacks_password(str(address)):
            raise ConfigurationError(
                f"The handle of a memory at {address!r} was given without storage=.",
                allowed="A handle holds no password.",
                remedy="Pass storage= with the whole URI, or an open Storage.",
            )
        if not isinstance(address, Storage):
            address = Storage(address, table_name=handle["table_name"], db_schema=handle["db_schema"])
        kept = {**handle["settings"]}
        if settings.get("budget") is not None:
            kept = {name: value for name, value in kept.items() if name not in {"token_limit", "reserve_tokens"}}
        if "retention" in kept:
            kept["retention"] = retention.from_data(kept["retention"])
        memory = cls(
            storage=address,
            session_id=handle["session_id"],
            user_id=handle["user_id"],
            agent_id=handle["agent_id"],
            memory_blocks=memory_blocks or [],
            **{**kept, **settings},
        )
        memory._shared.owns_storage = not isinstance(storage, Storage)
        return memory


_HANDLE_IDS = ("session_id", "user_id", "agent_id")
_HANDLE_PLACE = ("storage", "table_name", "db_schema")
_HANDLE_SETTINGS = (
    "token_limit", "reserve_tokens", "chat_history_token_ratio", "token_flush_size", "window_messages", "overflow",
    "delivery", "recall_position", "claim_seconds", "image_token_size_estimate", "audio_token_size_estimate",
    "video_token_size_estimate", "document_token_size_estimate", "maintain_every",
)  # fmt: skip


def _kind_of(redactor: Redactor | None) -> str | None:
    return None if redactor is None else "default" if redactor == Redactor() else "own"


def _redaction_of(handle: Mapping[str, Any]) -> Any:
    """What takes secrets out, as far as a handle can say."""
    kind = handle.get("redaction", "default")
    if kind == "own":
        raise ConfigurationError(
            "The handle of a memory with a Redactor of its own was given without redaction=.",
            allowed="A handle holds no patterns and no key.",
            remedy="Pass the same redaction=Redactor(…), or redaction='default'.",
        )
    return kind


def _check_handle(handle: Mapping[str, Any], *, whole: bool) -> None:
    version = handle.get("version") if isinstance(handle, Mapping) else type(handle)
    if version != HANDLE_VERSION:
        raise ConfigurationError(
            f"A handle of version {version!r} was given.",
            allowed=f"This release reads version {HANDLE_VERSION}.",
            remedy="Install the release that wrote it, or make the memory anew from its ids.",
        )
    lacking = [name for name in (*_HANDLE_IDS, *(_HANDLE_PLACE if whole else ())) if name not in handle]
    if not isinstance(handle.get("settings"), Mapping):
        lacking.append("settings")
    if lacking:
        raise ConfigurationError(
            f"A handle without {', '.join(lacking)} was given.",
            allowed="A handle is taken up as to_handle made it.",
            remedy="Store the whole handle, or make the memory anew from its ids.",
        )
