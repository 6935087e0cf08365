"""What tests of blocks share: a clock that stands still, and a storage that goes by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llama_index_memory_tiers import Storage
from tests.doubles import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(request: pytest.FixtureRequest, make_storage: Callable[..., Storage], clock: Clock) -> Storage:
    """A file, or the kind that an indirect parameter names."""
    return make_storage(getattr(request, "param", "file"), clock=clock)
