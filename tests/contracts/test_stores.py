"""The store contract on every store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore

from llama_index_memory_tiers import Storage, TieredChatStore
from llama_index_memory_tiers.testing.contracts import STORE_CAPABILITIES, StoreContract


def _clock_that_steps_back() -> Callable[[], datetime]:
    seconds: Iterator[int] = itertools.count()
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    return lambda: start - timedelta(seconds=next(seconds))


class _Ours(StoreContract):
    kind = ""

    @pytest.fixture(autouse=True)
    def _place(self, make_storage: Callable[..., Storage]) -> None:
        self.make_storage = make_storage

    async def make_store(self) -> TieredChatStore:
        return TieredChatStore(self.make_storage(self.kind, clock=_clock_that_steps_back()), user_id="ann")

    async def ids_of(self, store: AsyncDBChatStore, key: str) -> list[Any]:
        assert isinstance(store, TieredChatStore)
        return [stored.id for stored in await store.stored_messages(key)]


class TestFile(_Ours):
    kind = "file"


class TestPrivate(_Ours):
    kind = "private"


class TestPostgres(_Ours):
    kind = "postgres"


class TestStock(StoreContract):
    """LlamaIndex's own store, which keeps LlamaIndex's interface and little beyond."""

    capabilities = frozenset({"copies"})

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.uri = f"sqlite+aiosqlite:///{tmp_path / 'stock.db'}"

    async def make_store(self) -> SQLAlchemyChatStore:
        return SQLAlchemyChatStore(table_name="messages", async_database_uri=self.uri)

    async def close_store(self, store: AsyncDBChatStore) -> None:
        assert isinstance(store, SQLAlchemyChatStore)
        assert store._async_engine is not None
        await store._async_engine.dispose()


def test_the_contract_is_run_in_full_on_our_stores() -> None:
    assert all(store.capabilities == STORE_CAPABILITIES for store in (TestFile, TestPrivate, TestPostgres))
