"""The owner indexes that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from llama_index_memory_tiers.storage.index.search import OwnerIndex


class IndexCache:
    """The owners used last, within a memory bound; safe to use from several threads.

    Args:
        max_bytes: Most memory that all indexes may hold together; a single larger one is kept while it is the newest.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, OwnerIndex] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> OwnerIndex | None:
        """Look up an index and make it the newest.

        Args:
            key: What it was put under.

        Returns:
            The index, or `None`.
        """
        with self._lock:
            index = self._held.get(key)
            if index is not None:
                self._held.move_to_end(key)
            return index

    def drop(self, key: Hashable) -> None:
        """Let an index go; nothing happens when it is not held."""
        with self._lock:
            if self._held.pop(key, None) is not None:
                self._total -= self._sizes.pop(key)

    def held(self) -> list[Hashable]:
        """Keys of what is held."""
        with self._lock:
            return list(self._held)

    def put(self, key: Hashable, index: OwnerIndex) -> None:
        """Keep an index as the newest, dropping old ones that no longer fit; put again whenever it has grown.

        Args:
            key: Owner, and whatever else tells two indexes apart.
            index: It replaces another one of that key.
        """
        size = index.nbytes
        with self._lock:
            self._held[key] = index
            self._held.move_to_end(key)
            self._total += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            while self._total > self.max_bytes and len(self._held) > 1:
                oldest, _ = self._held.popitem(last=False)
                self._total -= self._sizes.pop(oldest)
