"""One fault at every boundary: after a restart nothing is lost, doubled or out of order, and forgotten stays gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from running import SOAK

from llama_index_memory_tiers import Storage, failpoints
from llama_index_memory_tiers.failpoints import FAILPOINTS
from llama_index_memory_tiers.testing.faults import FAULTS, FaultCase, FaultMatrix

MOST_TIMES = 12 if SOAK else 1
# What chats do not come to: tests/storage/test_upgrades.py, test_reindex.py and test_qdrant.py go there.
ELSEWHERE = {"migrate.statement", "migrate.done", "reindex.page", "reindex.switching", "reindex.switched", "index.told"}


@pytest.fixture
def matrix(make_storage: Callable[..., Storage], storage_kind: str) -> Iterator[FaultMatrix]:
    made = FaultMatrix(lambda: make_storage(storage_kind))
    yield made
    made.close()


async def test_no_fault_loses_doubles_or_brings_back_anything(matrix: FaultMatrix, storage_kind: str) -> None:
    reaches = await matrix.reaches()
    assert set(FAILPOINTS) - set(reaches) <= ELSEWHERE
    problems: dict[FaultCase, tuple[str, ...]] = {}
    for row, failpoint in enumerate(sorted(reaches)):
        for column, fault in enumerate(FAULTS):
            if not SOAK and (row + column) % 4 != (0 if storage_kind == "file" else 2):
                continue  # half of the cells, each on one of the two databases
            for time in range(MOST_TIMES):
                # Spread over all times that the work gets there.
                nth = 1 + (time * reaches[failpoint] // MOST_TIMES + 3 * row + column) % reaches[failpoint]
                case = FaultCase(failpoint, fault, nth)
                outcome = await matrix.run(case)
                if not outcome.fired:
                    problems[case] = ("never got there",)
                elif outcome.problems:
                    problems[case] = outcome.problems
    assert problems == {}


def test_an_unarmed_failpoint_does_nothing() -> None:
    for name in FAILPOINTS:
        failpoints.reach(name)


def test_what_was_armed_before_is_armed_again() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with failpoints.armed(outer.append):
        with failpoints.armed(inner.append):
            failpoints.reach("put.stored")
        failpoints.reach("put.prepared")
    failpoints.reach("put.inserted")
    assert (outer, inner) == (["put.prepared"], ["put.stored"])
