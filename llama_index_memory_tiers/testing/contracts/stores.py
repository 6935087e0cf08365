"""What every chat store promises, as tests to run on your own."""
# ruff: noqa: S101, PLR2004  # these are tests: they assert, and their values are literals

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest import SkipTest, mock

from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus

from llama_index_memory_tiers.testing.contracts.samples import (
    ODD_TEXTS,
    PNG,
    close,
    numbered,
    texts,
    tool_turn,
    user_says,
)

STORE_CAPABILITIES = frozenset(
    {
        "atomic_set",  # a set that fails, or is read half way, never shows part of a window
        "bulk_7000",  # one call may hold thousands of messages
        "concurrent",  # writers on one session at the same time lose nothing
        "copies",  # what is given in or out may be changed
        "deletes_by_id",  # `ids_of` names messages for `delete_message`
        "empty_batch",  # adding no messages is harmless
        "keeps_archive",  # setting the window leaves the archive in peace
        "ordered_by_put",  # order is that of the puts, whatever the clock says
    }
)
"""What a store may promise beyond LlamaIndex's interface."""

_ALIKE = ("john_doe", "john-doe", "john%", "JOHN_DOE", "john_doe ", "john", "约翰")


class StoreContract:
    """What every `AsyncDBChatStore` promises.

    Subclass it under a name that begins with `Test`, override `make_store`, and let pytest collect it (with
    pytest-asyncio in auto mode). What your store does not promise, leave out of `capabilities`: its tests are
    skipped.

    Example:
        ```python
        class TestMyStore(StoreContract):
            capabilities = STORE_CAPABILITIES - {"bulk_7000"}

            async def make_store(self):
                return MyStore(...)
        ```
    """

    capabilities: frozenset[str] = STORE_CAPABILITIES

    async def make_store(self) -> AsyncDBChatStore:
        """Return an empty store; called once per test."""
        raise NotImplementedError

    async def close_store(self, store: AsyncDBChatStore) -> None:
        """Release what the store holds; default: its `aclose`, if it has one."""
        await close(store)

    async def ids_of(self, store: AsyncDBChatStore, key: str) -> list[Any]:
        """Return what `delete_message` takes for each message of a session, in order; for `deletes_by_id`."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def _store(self, capability: str | None = None) -> AsyncIterator[AsyncDBChatStore]:
        if capability is not None and capability not in self.capabilities:
            raise SkipTest(f"the store does not promise {capability!r}")
        store = await self.make_store()
        try:
            yield store
        finally:
            await self.close_store(store)

    async def test_capabilities_are_known_names(self) -> None:
        """A misspelt capability would skip nothing and promise nothing."""
        assert self.capabilities <= STORE_CAPABILITIES

    # -- what LlamaIndex's interface asks for ----------------------------------------------------------------

    async def test_a_new_session_is_empty(self) -> None:
        """Reading, counting and moving in a session that nobody wrote to gives nothing."""
        async with self._store() as store:
            assert await store.get_messages("nobody") == []
            assert await store.count_messages("nobody") == 0
            assert await store.archive_oldest_messages("nobody", 3) == []
            assert await store.delete_oldest_messages("nobody", 3) == []
            await store.delete_messages("nobody")
            assert await store.get_keys() == []

    async def test_messages_come_back_in_order(self) -> None:
        """Single puts and batches come back equal, in the order they were given."""
        async with self._store() as store:
            await store.add_message("s", user_says("first"))
            await store.add_messages("s", numbered(5))
            await store.add_message("s", user_says("last"))
            assert await store.get_messages("s") == [user_says("first"), *numbered(5), user_says("last")]

    async def test_every_role_comes_back(self) -> None:
        """No role is mistaken for another."""
        async with self._store() as store:
            messages = [ChatMessage(role=role, content=role.value) for role in MessageRole]
            await store.add_messages("s", messages)
            assert [message.role for message in await store.get_messages("s")] == list(MessageRole)

    async def test_limit_takes_the_oldest(self) -> None:
        """A limit cuts at the end, and may be larger than what there is."""
        async with self._store() as store:
            await store.add_messages("s", numbered(6))
            assert await store.get_messages("s", limit=2) == numbered(2)
            assert await store.get_messages("s", limit=60) == numbered(6)

    async def test_offset_with_limit_reads_a_page(self) -> None:
        """An offset skips the oldest."""
        async with self._store() as store:
            await store.add_messages("s", numbered(6))
            assert await store.get_messages("s", limit=2, offset=3) == numbered(2, start=3)
            assert await store.get_messages("s", limit=5, offset=6) == []

    async def test_counts_follow_the_status(self) -> None:
        """Active and archived messages are counted apart and together."""
        async with self._store() as store:
            await store.add_messages("s", numbered(3))
            await store.add_messages("s", numbered(2, start=3), status=MessageStatus.ARCHIVED)
            assert await store.count_messages("s") == 3
            assert await store.count_messages("s", MessageStatus.ARCHIVED) == 2
            assert await store.count_messages("s", None) == 5
            assert await store.get_messages("s") == numbered(3)
            assert await store.get_messages("s", None) == numbered(5)

    async def test_archiving_moves_the_oldest(self) -> None:
        """The oldest active messages are returned, leave the window and stay readable."""
        async with self._store() as store:
            await store.add_messages("s", numbered(5))
            assert await store.archive_oldest_messages("s", 2) == numbered(2)
            assert await store.archive_oldest_messages("s", 1) == numbered(1, start=2)
            assert await store.archive_oldest_messages("s", 0) == []
            assert await store.get_messages("s") == numbered(2, start=3)
            assert await store.get_messages("s", MessageStatus.ARCHIVED) == numbered(3)

    async def test_deleting_the_oldest_returns_them(self) -> None:
        """They are gone for good; more than there are is all there are."""
        async with self._store() as store:
            await store.add_messages("s", numbered(4))
            assert await store.delete_oldest_messages("s", 1) == numbered(1)
            assert await store.delete_oldest_messages("s", 9) == numbered(3, start=1)
            assert await store.get_messages("s", None) == []

    async def test_deleting_a_session_keeps_the_others(self) -> None:
        """A deletion by key or status reaches nothing else."""
        async with self._store() as store:
            for key in ("s", "t"):
                await store.add_messages(key, numbered(4))
                await store.archive_oldest_messages(key, 2)
            await store.delete_messages("s", MessageStatus.ARCHIVED)
            assert await store.get_messages("s", None) == numbered(2, start=2)
            await store.delete_messages("s")
            assert await store.get_messages("s", None) == []
            assert await store.get_messages("t", None) == numbered(4)

    async def test_deleting_what_is_absent_returns_none(self) -> None:
        """An id that no message has is no error."""
        async with self._store() as store:
            await store.add_message("s", user_says("here"))
            assert await store.delete_message("s", 987_654) is None
            assert await store.delete_message("nobody", 1) is None
            assert await store.count_messages("s") == 1

    async def test_set_replaces_the_window(self) -> None:
        """After a set the window is exactly what was given, in order; an empty one empties it."""
        async with self._store() as store:
            await store.add_messages("s", numbered(4))
            wanted = [user_says("new"), *numbered(2, start=2), user_says("new")]
            await store.set_messages("s", wanted)
            assert await store.get_messages("s") == wanted
            await store.set_messages("s", [])
            assert await store.get_messages("s") == []

    async def test_set_may_bring_back_what_was_archived(self) -> None:
        """A window that is set to the whole history shows the whole history, once."""
        async with self._store() as store:
            await store.add_messages("s", numbered(4))
            await store.archive_oldest_messages("s", 2)
            await store.set_messages("s", numbered(5))
            assert await store.get_messages("s") == numbered(5)

    async def test_keys_are_those_written_to(self) -> None:
        """Every session with messages is listed once."""
        async with self._store() as store:
            for key in ("a", "b", "a"):
                await store.add_message(key, user_says(key))
            assert sorted(await store.get_keys()) == ["a", "b"]

    async def test_look_alike_keys_are_different_sessions(self) -> None:
        """Keys are compared character by character: no pattern, no case folding, no trimming."""
        async with self._store() as store:
            for key in _ALIKE:
                await store.add_message(key, user_says(f"only for {key}"))
            for key in _ALIKE:
                assert texts(await store.get_messages(key)) == [f"only for {key}"]
            await store.delete_messages("john%")
            assert await store.count_messages("john_doe") == 1

    async def test_any_text_survives(self) -> None:
        """NUL, lone surrogates, emoji, Chinese, SQL and template code come back as they were."""
        async with self._store() as store:
            await store.add_messages("s", [user_says(text) for text in ODD_TEXTS])
            assert texts(await store.get_messages("s")) == list(ODD_TEXTS)

    async def test_empty_contents_survive(self) -> None:
        """No text, no block and many blocks are all messages."""
        async with self._store() as store:
            many = ChatMessage(role=MessageRole.USER, blocks=[TextBlock(text=str(number)) for number in range(3)])
            messages = [user_says(""), ChatMessage(role=MessageRole.USER, blocks=[]), many]
            await store.add_messages("s", messages)
            assert await store.get_messages("s") == messages

    async def test_tool_calls_survive(self) -> None:
        """Tool calls, results and extra arguments come back equal."""
        async with self._store() as store:
            await store.add_messages("s", tool_turn())
            assert await store.get_messages("s") == tool_turn()

    async def test_images_survive(self) -> None:
        """An image given as bytes comes back with the same bytes."""
        async with self._store() as store:
            await store.add_message("s", ChatMessage(role=MessageRole.USER, blocks=[ImageBlock(image=PNG)]))
            block = (await store.get_messages("s"))[0].blocks[0]
            assert isinstance(block, ImageBlock)
            assert block.resolve_image().read() == PNG

    async def test_the_callers_messages_are_left_as_they_are(self) -> None:
        """Storing writes nothing into the objects that were given."""
        async with self._store() as store:
            given = tool_turn()
            await store.add_message("s", given[0])
            await store.add_messages("s", given)
            await store.set_messages("s", given)
            assert given == tool_turn()

    # -- what a store may promise beyond it ------------------------------------------------------------------

    async def test_an_empty_batch_changes_nothing(self) -> None:
        """An agent's scratchpad may be empty."""
        async with self._store("empty_batch") as store:
            await store.add_messages("s", [])
            assert await store.get_messages("s", None) == []

    async def test_returned_messages_are_copies(self) -> None:
        """An agent edits the last message it is given; the store must not see that."""
        async with self._store("copies") as store:
            given = tool_turn()
            await store.add_messages("s", given)
            given[2].additional_kwargs["later"] = True
            for message in await store.get_messages("s"):
                message.blocks.append(TextBlock(text="scribbled"))
                message.additional_kwargs["scribbled"] = True
            assert await store.get_messages("s") == tool_turn()

    async def test_order_does_not_depend_on_the_clock(self) -> None:
        """A clock that steps back reorders nothing and moves the oldest, not the newest."""
        async with self._store("ordered_by_put") as store:
            with mock.patch("time.time_ns", side_effect=itertools.count(time.time_ns(), -1_000_000_000)):
                for message in numbered(4):
                    await store.add_message("s", message)
            assert await store.get_messages("s") == numbered(4)
            assert await store.archive_oldest_messages("s", 1) == numbered(1)

    async def test_a_set_that_fails_changes_nothing(self) -> None:
        """One message that cannot be stored leaves window and archive as they were."""
        async with self._store("atomic_set") as store:
            await store.add_messages("s", numbered(3))
            bad = ChatMessage(role=MessageRole.USER, content="bad", additional_kwargs={"x": object()})
            with contextlib.suppress(Exception):
                await store.set_messages("s", [user_says("new"), bad])
            assert await store.get_messages("s", None) == numbered(3)

    async def test_readers_never_see_half_a_set(self) -> None:
        """While one task sets, others read one whole window or the other."""
        async with self._store("atomic_set") as store:
            windows = (numbered(3), numbered(5, start=100))
            await store.set_messages("s", windows[0])

            async def switch() -> None:
                for number in range(1, 9):
                    await store.set_messages("s", windows[number % 2])

            switching = asyncio.create_task(switch())
            while not switching.done():
                assert await store.get_messages("s") in windows
                await asyncio.sleep(0)  # a store in memory never waits by itself
            await switching

    async def test_setting_the_window_keeps_the_archive(self) -> None:
        """What has left the window is history, not the window's to delete."""
        async with self._store("keeps_archive") as store:
            await store.add_messages("s", numbered(3))
            await store.archive_oldest_messages("s", 2)
            await store.set_messages("s", [user_says("new")])
            assert await store.get_messages("s") == [user_says("new")]
            assert (await store.get_messages("s", MessageStatus.ARCHIVED))[:2] == numbered(2)

    async def test_deleting_by_id_deletes_that_message(self) -> None:
        """The message is returned once, then gone; its neighbours stay."""
        async with self._store("deletes_by_id") as store:
            await store.add_messages("s", numbered(3))
            middle = (await self.ids_of(store, "s"))[1]
            assert await store.delete_message("other", middle) is None
            assert await store.delete_message("s", middle) == user_says("message 1")
            assert await store.delete_message("s", middle) is None
            assert await store.get_messages("s", None) == [user_says("message 0"), user_says("message 2")]

    async def test_concurrent_adds_lose_nothing(self) -> None:
        """Fifty writers on one new session: each message is there once, each batch in one piece."""
        async with self._store("concurrent") as store:
            await asyncio.gather(*(store.add_messages("s", numbered(3, start=3 * n)) for n in range(50)))
            found = texts(await store.get_messages("s"))
            assert sorted(found, key=str) == sorted(texts(numbered(150)), key=str)
            assert all(found[at : at + 3] == texts(numbered(3, start=_number(found[at]))) for at in range(0, 150, 3))

    async def test_concurrent_archiving_moves_each_message_once(self) -> None:
        """Several flushes at once archive what they say, and nothing twice."""
        async with self._store("concurrent") as store:
            await store.add_messages("s", numbered(40))
            moved = await asyncio.gather(*(store.archive_oldest_messages("s", 5) for _ in range(4)))
            told = [text for part in moved for text in texts(part)]
            assert len(told) == len(set(told))
            assert await store.count_messages("s", MessageStatus.ARCHIVED) == len(told)

    async def test_one_call_may_hold_thousands_of_messages(self) -> None:
        """Databases bound the parameters of a statement; callers need not know."""
        async with self._store("bulk_7000") as store:
            await store.add_messages("s", numbered(7000))
            assert await store.count_messages("s") == 7000
            assert await store.get_messages("s", limit=1, offset=6999) == numbered(1, start=6999)
            await store.set_messages("s", numbered(1))
            assert await store.get_messages("s") == numbered(1)


def _number(text: str | None) -> int:
    return int((text or "").split()[-1])
