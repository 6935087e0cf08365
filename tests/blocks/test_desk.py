"""Records written by hand: scoped, redacted, revised in place, put aside and taken back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from llama_index_memory_tiers import ConfigurationError, Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.records import Changes, NewRecord, Reads, Record
from llama_index_memory_tiers.storage import IndexQuery
from llama_index_memory_tiers.text import analyse


def _note(text: str, number: str = "n1") -> NewRecord:
    terms: dict[str, int] = {}
    for term in analyse(text):
        terms[term] = terms.get(term, 0) + 1
    return NewRecord(id=number, kind="note", text=text, terms=terms, tokens=3)


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    async with Storage(tmp_path / "desk.db") as opened:
        yield opened


def _memory(storage: Storage, user: str | None, session: str = "s1") -> TieredMemory:
    return TieredMemory(
        storage=storage, user_id=user, session_id=session, memory_blocks=[VectorMemoryBlock(embed_model=None)]
    )


@pytest.mark.parametrize("user", ["ann", None])
async def test_a_revised_record_keeps_its_id_and_is_found_by_its_new_words_only(
    storage: Storage, user: str | None
) -> None:
    desk = _memory(storage, user).desk("RetrievedMessages")
    await desk.change(lambda _: Changes(add=(_note("green parrots"),)))
    reader = await desk.reader()
    assert [hit.id for hit in await reader.search(IndexQuery("parrots", desk.now()))]
    await desk.change(lambda _: Changes(revise=(_note("brown otters"),)))
    assert not await reader.search(IndexQuery("parrots", desk.now()))
    hits = await reader.search(IndexQuery("otters", desk.now()))
    assert [(record.id, record.text) for record in await reader.records_of(hits)] == [("n1", "brown otters")]


async def test_what_was_put_aside_is_not_recalled_until_it_is_taken_back(storage: Storage) -> None:
    desk = _memory(storage, "ann").desk("RetrievedMessages")
    await desk.change(lambda _: Changes(add=(_note("green parrots"),)))
    reader = await desk.reader()
    await desk.change(lambda _: Changes(archive=("n1",)))
    assert not await reader.records("note")
    assert not await reader.search(IndexQuery("parrots", desk.now()))
    await desk.change(lambda _: Changes(restore=("n1",)))
    assert [record.id for record in await reader.records("note")] == ["n1"]
    assert len(await reader.search(IndexQuery("parrots", desk.now()))) == 1


async def test_nobody_changes_the_records_of_another_owner(storage: Storage) -> None:
    ann, bob = (_memory(storage, user).desk("RetrievedMessages") for user in ("ann", "bob"))
    await ann.change(lambda _: Changes(add=(_note("green parrots"),)))
    attempts = [Changes(revise=(_note("mine"),)), Changes(archive=("n1",)), Changes(supersede={"n1": "n2"})]
    reads = Reads(ids=("n1",))
    seen: list[object] = []

    def attempt(records: Sequence[Record]) -> Changes:
        seen.extend(records)
        return attempts.pop()

    while attempts:
        await bob.change(attempt, reads)
    assert not seen
    assert [record.text for record in await (await ann.reader()).records("note")] == ["green parrots"]


async def test_a_session_without_a_user_is_its_own_owner_and_is_made_once(storage: Storage) -> None:
    memory = _memory(storage, None)
    first, again = memory.desk("RetrievedMessages"), memory.desk("RetrievedMessages")
    assert await first.owner() == await again.owner()
    assert await first.owner() != await _memory(storage, None, "s2").desk("RetrievedMessages").owner()


def test_text_written_by_hand_passes_the_redaction(tmp_path: Path) -> None:
    memory = _memory(Storage(tmp_path / "x.db"), "ann")
    assert "hunter2secret" not in memory.desk("RetrievedMessages").redacted("password=hunter2secret")


def test_a_name_that_no_block_has_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="RetrievedMessages"):
        _memory(Storage(tmp_path / "x.db"), "ann").desk("Episodes")
