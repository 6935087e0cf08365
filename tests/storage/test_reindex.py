"""Another embedding model: found at the first question, embedded again page by page, switched in one step."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import hearing, said
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from pydantic import PrivateAttr
from running import MakeStorage
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import EpisodicMemoryBlock, Storage, TieredMemory, VectorMemoryBlock, failpoints
from llama_index_memory_tiers.errors import ConfigurationError, EmbeddingError, EmbeddingMismatchError
from llama_index_memory_tiers.events import EmbeddingMismatch
from llama_index_memory_tiers.records import Changes, NewRecord, Reads
from llama_index_memory_tiers.storage import IndexQuery
from llama_index_memory_tiers.storage.index import encode_vector
from llama_index_memory_tiers.storage.schema import UNFINISHED
from llama_index_memory_tiers.testing import HashEmbedding
from llama_index_memory_tiers.text import analyse

pytestmark = pytest.mark.usefixtures("small_pages")

OWNER = "u:ann"


class Counting(BaseEmbedding):
    """A deterministic model of any size that writes down what it embedded."""

    model_name: str = "old"
    size: int = 4
    fails_after: int | None = None
    _seen: list[str] = PrivateAttr(default_factory=list)

    @property
    def seen(self) -> list[str]:
        return self._seen

    def _get_text_embedding(self, text: str) -> list[float]:
        if self.fails_after is not None and len(self._seen) >= self.fails_after:
            raise ConnectionError("the provider is away")
        self._seen.append(text)
        return [math.sin(len(text) + at + len(self.model_name)) for at in range(self.size)]

    def _get_query_embedding(self, query: str) -> list[float]:
        return [math.sin(len(query) + at) for at in range(self.size)]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embedding(text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


@pytest.fixture
def mismatches() -> Iterator[list[EmbeddingMismatch]]:
    with hearing(EmbeddingMismatch) as found:
        yield found


def remembering(storage: Storage, model: BaseEmbedding | None, **fields: Any) -> TieredMemory:
    scope = {"user_id": "ann", "session_id": "s", **fields}
    return TieredMemory(
        storage=storage, memory_blocks=[VectorMemoryBlock(embed_model=model)], delivery="inline", **scope
    )


def turn(text: str) -> list[ChatMessage]:
    return [said("user", text), said("assistant", f"I see: {text}")]


async def remember(storage: Storage, *texts: str, model: Counting | None = None, owner: str = OWNER) -> None:
    model = model or Counting()

    async def one(text: str) -> NewRecord:
        vector = tuple(await model.aget_text_embedding(text))
        return NewRecord(
            id=storage.ids(), kind="fact", text=text, terms=analyse(text), vector=vector, model=model.model_name
        )

    records = tuple([await one(text) for text in texts])
    await storage.records.change(owner, "facts", reads=Reads(), merge=lambda _: Changes(add=records))


async def vectors(storage: Storage, owner: str = OWNER) -> dict[str, dict[str, bytes]]:
    """Text → model → vector."""
    r, e = storage._tables.records, storage._tables.embeddings

    async def work(connection: AsyncConnection) -> list[Any]:
        query = select(r.c.text, r.c.uid, e.c.model, e.c.vec).join(e, e.c.record_id == r.c.id).where(r.c.owner == owner)
        return list((await connection.execute(query)).all())

    found: dict[str, dict[str, bytes]] = {}
    for row in await storage._database.read(work):
        found.setdefault(row.text or row.uid, {})[row.model] = bytes(row.vec)
    return found


async def legs(storage: Storage, model: str, size: int, text: str = "parrot") -> list[bool]:
    """Whether each hit was found by meaning too."""
    query = IndexQuery(text=text, now=storage.clock(), vector=[math.sin(at + 1) for at in range(size)])
    return [hit.similarity is not None for hit in await storage.records.search(OWNER, model, query)]


TEXTS = [f"parrot {'x' * n}" for n in range(8)]


# --- found at the first question ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["new", "old"], ids=["another name", "the same name"])
async def test_a_question_of_another_model_is_refused_with_both_sizes(storage: Storage, name: str) -> None:
    await remember(storage, *TEXTS)
    with pytest.raises(EmbeddingMismatchError, match=r"768 dimensions.* have 4\.") as caught:
        await legs(storage, name, 768)
    assert "areindex" in caught.value.remedy


@pytest.mark.parametrize("name", ["new", "old"], ids=["another name", "the same name"])
async def test_a_memory_with_another_model_answers_by_words_and_says_why(
    storage: Storage, mismatches: list[EmbeddingMismatch], name: str
) -> None:
    first = remembering(storage, Counting(size=384))
    await first.aput_messages(turn("The parrot is called Io."))
    await first.aflush()
    second = remembering(storage, Counting(model_name=name, size=768))
    assert "Io" in (await second.arecall("parrot"))[0].text
    (event,) = mismatches
    assert (event.stored_model, event.stored_dimensions) == ("old", 384)
    assert (event.asked_model, event.asked_dimensions) == (name, 768)
    assert "areindex" in event.remedy
    await second.areindex()
    assert (await second.arecall("parrot"))[0].distance is not None
    assert len(mismatches) == 1


async def test_where_only_some_records_are_of_the_new_model_it_is_said_once(
    storage: Storage, mismatches: list[EmbeddingMismatch]
) -> None:
    await remember(storage, *TEXTS)
    await remember(storage, "parrot new", model=Counting(model_name="new", size=6))
    for _ in range(3):
        assert sorted(await legs(storage, "new", 6)) == [False] * 8 + [True]
    assert [(event.stored_dimensions, event.asked_dimensions) for event in mismatches] == [(4, 6)]


async def test_the_model_an_owner_was_stored_with_costs_one_statement(storage: Storage) -> None:
    await remember(storage, *TEXTS)
    before = storage.statements
    stored = await storage.records.finder.stored_with(OWNER)
    assert storage.statements == before + 1
    assert stored is not None
    assert (stored.model, stored.dimensions) == ("old", 4)
    assert await storage.records.finder.stored_with("u:nobody") is None


# --- embedded again -------------------------------------------------------------------------------------------


async def test_every_record_is_embedded_again_once_and_the_old_vectors_go(storage: Storage) -> None:
    await remember(storage, *TEXTS)
    new, told = Counting(model_name="new", size=6), []
    report = await storage.reindex(new, progress=lambda done, total: told.append((done, total)))
    assert (report.embedded, report.skipped, report.owners, report.dimensions) == (8, 0, 1, 6)
    assert told == [(0, 8), (3, 8), (6, 8), (8, 8)]
    assert sorted(new.seen[1:]) == sorted(TEXTS)  # after the one word that tells the size
    expected = {text: {"new": encode_vector(new._get_text_embedding(text))} for text in TEXTS}
    assert await vectors(storage) == expected
    assert (await storage.reindex(new)).owners == 0


async def test_a_cached_index_of_another_process_sees_the_switch(make_storage: MakeStorage, storage_kind: str) -> None:
    first, second = make_storage(storage_kind), make_storage(storage_kind)
    await remember(first, *TEXTS)
    assert all(await legs(second, "old", 4))
    await first.reindex(Counting(model_name="new", size=6))
    assert await legs(second, "new", 6) == [True] * 8


async def test_recall_goes_on_until_the_switch_and_never_sees_half_of_it(storage: Storage) -> None:
    await remember(storage, *TEXTS)
    seen: list[tuple[list[bool], list[bool]]] = []
    pages: list[str] = []

    class Watching(Counting):
        async def aget_text_embedding_batch(self, texts: list[str], **how: Any) -> list[list[float]]:
            if texts != ["dimensions"]:
                words = IndexQuery(text="parrot", now=storage.clock())
                found = [hit.similarity is not None for hit in await storage.records.search(OWNER, "new", words)]
                seen.append((await legs(storage, "old", 4), found))
            return await super().aget_text_embedding_batch(texts, **how)

    with failpoints.armed(pages.append):
        await storage.reindex(Watching(model_name="new", size=6))
    assert pages.count("reindex.page") == 3
    assert seen == [([True] * 8, [False] * 8)] * 3  # the old model by meaning, the new one by words
    assert await legs(storage, "new", 6) == [True] * 8


async def test_only_one_persons_records_or_one_blocks_are_embedded(storage: Storage) -> None:
    await remember(storage, *TEXTS[:2])
    await remember(storage, *TEXTS[:2], owner="u:bob")
    assert (await storage.reindex(Counting(model_name="new"), user_id="ann", blocks=["another"])).embedded == 0
    assert (await storage.reindex(Counting(model_name="new"), user_id="ann", blocks=["facts"])).embedded == 2
    assert [set(models) for models in (await vectors(storage)).values()] == [{"new"}] * 2
    assert [set(models) for models in (await vectors(storage, "u:bob")).values()] == [{"old"}] * 2


async def test_a_session_without_a_user_is_embedded_alone(storage: Storage) -> None:
    for session in ("one", "two"):
        memory = remembering(storage, Counting(), user_id=None, session_id=session)
        await memory.aput_messages(turn("The parrot is called Io."))
        await memory.aflush()
    other = remembering(storage, Counting(model_name="new", size=6), user_id=None, session_id="two")
    (report,) = await other.areindex()
    assert (report.embedded, report.owners) == (2, 1)


async def test_records_that_were_stored_without_a_model_get_vectors(storage: Storage) -> None:
    memory = remembering(storage, None)
    await memory.aput_messages(turn("The parrot is called Io."))
    await memory.aflush()
    later = remembering(storage, Counting(size=6))
    assert (await later.areindex())[0].embedded == 2
    assert (await later.arecall("parrot"))[0].distance is not None


async def test_what_is_embedded_is_what_the_blocks_embed(storage: Storage) -> None:
    episodes = EpisodicMemoryBlock(embed_model=Counting())
    memory = TieredMemory(
        storage=storage, user_id="ann", session_id="s", delivery="inline",
        memory_blocks=[VectorMemoryBlock(embed_model=Counting()), episodes],
    )  # fmt: skip
    await memory.aput_messages(turn("The parrot is called Io."), sent_from="Ann")
    await memory.aremember("Io likes figs")
    book = episodes.of(memory)
    await (await book.start("Feed the parrot")).end("success", lessons=["Figs first"])
    await memory.aflush()
    before = await vectors(storage)
    await memory.areindex(again=True)
    assert await vectors(storage) == before
    assert len(before) >= 4


async def test_weights_that_changed_under_one_name_are_embedded_when_asked(storage: Storage) -> None:
    await remember(storage, *TEXTS)
    assert (await storage.reindex(Counting())).embedded == 0
    assert (await storage.reindex(Counting(), again=True)).embedded == 8


async def test_another_size_under_the_same_name_takes_the_place_of_the_old_one(storage: Storage) -> None:
    await remember(storage, *TEXTS)
    assert (await storage.reindex(Counting(size=6))).embedded == 8
    assert {len(models["old"]) for models in (await vectors(storage)).values()} == {12}
    assert await legs(storage, "old", 6) == [True] * 8


async def test_what_has_no_usable_embedding_is_skipped_and_found_by_words(storage: Storage) -> None:
    class Odd(Counting):
        def _get_text_embedding(self, text: str) -> list[float]:
            found = super()._get_text_embedding(text)
            return [0.0] * self.size if text.endswith("xxx") else found

    await remember(storage, *TEXTS[:4])
    report = await storage.reindex(Odd(model_name="new"))
    assert (report.embedded, report.skipped, report.owners) == (3, 1, 1)
    assert sorted(await legs(storage, "new", 4)) == [False, True, True, True]


@pytest.mark.parametrize("model", [None, "openai", object()])
async def test_what_is_no_embedding_model_is_refused(storage: Storage, model: Any) -> None:
    with pytest.raises(ConfigurationError, match="embed_model"):
        await storage.reindex(model)


async def test_a_model_that_gives_no_vectors_changes_nothing(storage: Storage) -> None:
    class Zero(Counting):
        def _get_text_embedding(self, text: str) -> list[float]:
            return [0.0]

    await remember(storage, *TEXTS)
    before = await vectors(storage)
    with pytest.raises(EmbeddingError, match="nothing was changed"):
        await storage.reindex(Zero(model_name="new"))
    assert await vectors(storage) == before


# --- others at work meanwhile ---------------------------------------------------------------------------------


async def test_what_is_written_meanwhile_is_embedded_before_the_switch(storage: Storage) -> None:
    await remember(storage, *TEXTS)

    class Interrupted(Counting):
        async def aget_text_embedding_batch(self, texts: list[str], **how: Any) -> list[list[float]]:
            if "late" not in self.model_name and texts != ["dimensions"] and len(self.seen) < 9:
                await remember(storage, f"parrot late {len(self.seen)}")
            return await super().aget_text_embedding_batch(texts, **how)

    report = await storage.reindex(Interrupted(model_name="new"))
    found = await vectors(storage)
    assert report.embedded == len(found) > 8
    assert all(set(models) == {"new"} for models in found.values())


async def test_a_record_revised_meanwhile_gets_no_vector_of_its_old_text(storage: Storage) -> None:
    await remember(storage, "parrot old")
    (record,) = await storage.records.records(OWNER, kinds=["fact"])

    class Interrupted(Counting):
        async def aget_text_embedding_batch(self, texts: list[str], **how: Any) -> list[list[float]]:
            if texts == ["parrot old"]:
                revised = NewRecord(id=record.id, kind="fact", text="parrot revised", terms=analyse("parrot revised"))
                await storage.records.change(OWNER, "facts", reads=Reads(), merge=lambda _: Changes(revise=(revised,)))
            return await super().aget_text_embedding_batch(texts, **how)

    new = Interrupted(model_name="new")
    await storage.reindex(new)
    assert await vectors(storage) == {
        "parrot revised": {"new": encode_vector(new._get_text_embedding("parrot revised"))}
    }


async def test_what_is_forgotten_meanwhile_leaves_no_vector(storage: Storage) -> None:
    memory = remembering(storage, Counting())
    await memory.aput_messages(turn("The parrot is called Io."))
    await memory.aflush()

    class Interrupted(Counting):
        async def aget_text_embedding_batch(self, texts: list[str], **how: Any) -> list[list[float]]:
            if texts != ["dimensions"]:
                assert (await memory.aforget(scope="user")).complete
            return await super().aget_text_embedding_batch(texts, **how)

    report = await storage.reindex(Interrupted(model_name="new"))
    assert report.embedded == 0
    assert await vectors(storage) == {}


async def test_vectors_of_an_unfinished_run_are_forgotten_and_not_exported(storage: Storage, tmp_path: Path) -> None:
    memory = remembering(storage, Counting())
    await memory.aput_messages([*turn("The parrot is called Io."), *turn("It sings.")])
    await memory.aflush()
    with pytest.raises(ConnectionError):
        await storage.reindex(Counting(model_name="new", fails_after=4))
    assert UNFINISHED in str(await vectors(storage))
    await memory.aexport(tmp_path / "out.jsonl")
    assert UNFINISHED not in (tmp_path / "out.jsonl").read_text()
    assert (await memory.aforget(scope="user")).complete
    assert await vectors(storage) == {}


# --- crashes --------------------------------------------------------------------------------------------------


async def test_after_an_outage_only_what_is_missing_is_embedded(storage: Storage) -> None:
    await remember(storage, *TEXTS)
    with pytest.raises(ConnectionError):
        await storage.reindex(Counting(model_name="new", fails_after=5))
    assert await legs(storage, "old", 4) == [True] * 8
    again = Counting(model_name="new")
    assert (await storage.reindex(again)).embedded == 5
    assert len(again.seen) == 1 + 5


CHILD = """
    import asyncio, os, signal, sys
    sys.path.insert(0, sys.argv[3])
    from test_reindex import Counting
    from llama_index_memory_tiers import Storage, failpoints
    from llama_index_memory_tiers.storage import reindexing

    reindexing._PAGE_RECORDS = 3
    left = int(sys.argv[4])

    def die(name):
        global left
        if name == sys.argv[2]:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    async def main():
        with failpoints.armed(die):
            await Storage(sys.argv[1]).reindex(Counting(model_name="new", size=6))

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("failpoint", "nth", "left"),
    [("reindex.page", 1, 2), ("reindex.switching", 0, 0), ("transaction.begun", 4, 0), ("reindex.switched", 0, 0)],
)
async def test_killed_anywhere_the_next_call_goes_on(
    make_storage: MakeStorage, tmp_path: Path, failpoint: str, nth: int, left: int
) -> None:
    storage = make_storage("file")
    await remember(storage, *TEXTS)
    folder = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(folder).parent), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "memory.db"), failpoint, folder, str(nth)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    if failpoint != "reindex.switched":
        assert await legs(storage, "old", 4) == [True] * 8
    again = Counting(model_name="new", size=6)
    report = await storage.reindex(again)
    assert report.embedded == left
    assert len(again.seen) == 1 + left
    assert all(set(models) == {"new"} for models in (await vectors(storage)).values())
    assert await legs(storage, "new", 6) == [True] * 8


async def test_a_damaged_message_delays_nothing(storage: Storage) -> None:
    memory = remembering(storage, HashEmbedding())
    await memory.aput_messages(turn("The parrot is called Io."))
    await memory.aflush()
    messages = storage._tables.messages

    async def damage(connection: AsyncConnection) -> None:
        await connection.execute(update(messages).where(messages.c.seq == 1).values(data="{"))

    await storage._database.write(damage)
    report = await storage.reindex(Counting(model_name="new"))
    assert (report.embedded, report.skipped) == (1, 1)
