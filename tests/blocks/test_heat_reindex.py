"""HeatMemoryBlock after a change of the embedding model: pages, topics and recall go over to the new space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from heat_doubles import TOPICS, block, memory, reader, said, talk
from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_memory_tiers import HeatMemoryBlock, Storage, TieredMemory, VectorMemoryBlock, failpoints
from llama_index_memory_tiers.blocks.heat.calibration import unit
from llama_index_memory_tiers.blocks.heat.library import Library, library_of
from llama_index_memory_tiers.blocks.heat.segments import Segment, read_segment
from llama_index_memory_tiers.storage import IndexQuery, codec
from llama_index_memory_tiers.testing import HashEmbedding

CAT, TRAIN, SOUP = TOPICS["cat"], TOPICS["train"], TOPICS["soup"]
OLD = HashEmbedding(dims=512)
PULSES = ("Would a chickpea curry taste nice?", "Chickpea curry with rice, beans and spices.")
ASKED = "Which nourishment did the animal doctor suggest for the kitten?"


pytestmark = pytest.mark.usefixtures("small_pages")
everywhere = pytest.mark.parametrize("storage", ["file", "postgres"], indirect=True)


def kept(model: BaseEmbedding | None, **fields: Any) -> HeatMemoryBlock:
    return block(embed_model=model, short_term_capacity=0, **fields)


async def chatted(storage: Storage, model: BaseEmbedding | None, **fields: Any) -> TieredMemory:
    chat = memory(storage, kept(model, **fields))
    await talk(chat, *CAT, *TRAIN, *SOUP)
    await chat.aflush()
    return chat


async def page_vectors(storage: Storage, model: BaseEmbedding) -> dict[str, Any]:
    ids = [page.id for page in await reader(storage).history("page")]
    return await reader(storage).vectors(ids, model.model_name)


async def embedded_anew(storage: Storage, model: BaseEmbedding) -> dict[str, Any]:
    """What each page's embedding must be: that of what was said in it."""
    ids = [page.id for page in await reader(storage).history("page")]
    behind = await storage.records.parts.messages_behind("u:ann", ids, live=False)
    return {
        one: unit(await model.aget_text_embedding(codec.embedded_text(codec.told(said))))
        for one, said in behind.items()
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        np.allclose(found[one], expected[one], atol=2e-3) for one in expected
    )


async def library(storage: Storage, model: BaseEmbedding) -> Library:
    return await library_of(reader(storage), model.model_name)


async def stored(storage: Storage) -> dict[str, Segment]:
    return {record.id: read_segment(record) for record in await reader(storage).light("segment")}


async def directions(storage: Storage, model: BaseEmbedding) -> dict[str, Any]:
    """What the direction of each topic must be."""
    vectors, there = await page_vectors(storage, model), await stored(storage)
    sums: dict[str, Any] = {}
    for page in await reader(storage).light("page"):
        sums[page.parent or ""] = sums.get(page.parent or "", 0) + vectors[page.id]
    return {one: unit(total) for one, total in sums.items() if one in there}


async def shown(chat: TieredMemory, asked: str = ASKED) -> str:
    return "\n".join(str(message.content) for message in await chat.for_session("t").aget(input=asked))


@everywhere
@pytest.mark.parametrize("before", [OLD, None], ids=["another model", "no model"])
async def test_every_page_is_embedded_again_and_topics_point_where_their_pages_do(
    storage: Storage, wordllama_model: BaseEmbedding, before: BaseEmbedding | None
) -> None:
    await chatted(storage, before, mid_term_capacity=2)
    (report,) = await memory(storage, kept(wordllama_model)).areindex()
    expected = await embedded_anew(storage, wordllama_model)
    assert report.embedded == len(expected) == 15
    assert same(await page_vectors(storage, wordllama_model), expected)
    assert not await page_vectors(storage, OLD)
    segments = (await library(storage, wordllama_model)).segments
    assert same({one: segment.vector for one, segment in segments.items()}, await directions(storage, wordllama_model))


async def test_recall_goes_by_the_new_vectors(storage: Storage, wordllama_model: BaseEmbedding) -> None:
    await chatted(storage, OLD)
    chat = memory(storage, kept(wordllama_model, retrieval_queue_capacity=1))
    assert "vet" not in await shown(chat)
    await chat.areindex()
    assert "vet" in await shown(chat)


@pytest.mark.parametrize("again", [True, False], ids=["embedded again", "by words alone"])
async def test_pages_are_filed_and_chained_by_the_new_vectors(
    storage: Storage, wordllama_model: BaseEmbedding, again: bool
) -> None:
    await chatted(storage, OLD)
    chat = memory(storage, kept(wordllama_model, mid_term_similarity_threshold=0.3))
    if again:
        await chat.areindex()
    await talk(chat, PULSES)  # on soup, in other words
    await chat.aflush()
    *_, before, page = pages = await reader(storage).light("page")
    soup = {one.parent for one in pages[-6:-1]}
    assert (page.parent in soup) is again
    assert (page.data["chain"] == before.data["chain"]) is again


async def test_new_directions_are_written_down_with_the_next_batch(
    storage: Storage, wordllama_model: BaseEmbedding
) -> None:
    await chatted(storage, OLD)
    chat = memory(storage, kept(wordllama_model))
    await chat.areindex()
    assert {one.model for one in (await stored(storage)).values()} == {OLD.model_name}
    await talk(chat, CAT[1])
    await chat.aflush()
    found = await stored(storage)
    assert {one.model for one in found.values()} == {wordllama_model.model_name}
    assert same({one: segment.vector for one, segment in found.items()}, await directions(storage, wordllama_model))
    assert not (await library(storage, wordllama_model)).directed


async def test_without_new_vectors_topics_are_told_by_words(storage: Storage, wordllama_model: BaseEmbedding) -> None:
    await chatted(storage, OLD)
    chat = memory(storage, kept(wordllama_model))
    await talk(chat, CAT[1])
    await chat.aflush()
    segments = (await library(storage, wordllama_model)).segments
    assert all(one.lacks(wordllama_model.model_name) for one in segments.values())


@everywhere
async def test_other_weights_under_the_same_name_move_the_topics_too(storage: Storage) -> None:
    class Other(HashEmbedding):
        def _get_text_embedding(self, text: str) -> list[float]:
            return super()._get_text_embedding(text)[::-1]

    await chatted(storage, OLD)
    other = Other(dims=512)
    await memory(storage, kept(other)).areindex(again=True)
    segments = (await library(storage, other)).segments
    expected = await directions(storage, other)
    assert same({one: segment.vector for one, segment in segments.items()}, expected)
    assert same(await page_vectors(storage, other), await embedded_anew(storage, other))


async def test_an_interrupted_run_goes_on_and_recall_reads_the_old_vectors_until_the_switch(
    storage: Storage, wordllama_model: BaseEmbedding
) -> None:
    first = await chatted(storage, OLD)
    before = await page_vectors(storage, OLD)
    seen = await shown(first)
    left = 2

    def stop(name: str) -> None:
        nonlocal left
        left -= name == "reindex.page"
        if left < 0:
            raise KeyboardInterrupt

    chat = memory(storage, kept(wordllama_model))
    with failpoints.armed(stop), pytest.raises(KeyboardInterrupt):
        await chat.areindex()
    assert same(await page_vectors(storage, OLD), before)
    assert await shown(first) == seen
    (report,) = await chat.areindex()
    assert report.embedded == 15 - 9
    assert same(await page_vectors(storage, wordllama_model), await embedded_anew(storage, wordllama_model))


async def test_what_a_page_was_embedded_from_is_what_it_is_embedded_from_again(
    storage: Storage, wordllama_model: BaseEmbedding
) -> None:
    chat = memory(storage, kept(wordllama_model))
    await talk(chat, ("Tell me of the cat \0Tom. " * 10, "The vet weighs him. " * 500))  # more than is embedded
    await chat.aput(said("user", "What does the night train cost?"))
    await chat.aflush()
    await chat.aput(said("assistant", "Eighty euros to Berlin."))  # after its page was filed
    await chat.aflush()
    before = await page_vectors(storage, wordllama_model)
    segments = await stored(storage)
    assert len(before) == 2
    assert same({one: segment.vector for one, segment in segments.items()}, await directions(storage, wordllama_model))
    await chat.areindex(again=True)
    assert same(await page_vectors(storage, wordllama_model), before)


async def test_beside_another_block_both_are_embedded_again(storage: Storage, wordllama_model: BaseEmbedding) -> None:
    def both(model: BaseEmbedding) -> TieredMemory:
        blocks: list[Any] = [VectorMemoryBlock(embed_model=model), kept(model)]
        return TieredMemory(storage=storage, user_id="ann", session_id="s", memory_blocks=blocks, delivery="inline")

    chat = both(OLD)
    await talk(chat, *CAT)
    await chat.aflush()
    (report,) = await both(wordllama_model).areindex()
    assert (report.embedded, report.skipped) == (15, 0)


async def test_what_a_vector_block_finds_is_not_moved_by_the_pages_beside_it(
    storage: Storage, wordllama_model: BaseEmbedding
) -> None:
    found = []
    for user, beside in (("ann", []), ("bob", [kept(wordllama_model)])):
        vector = VectorMemoryBlock(embed_model=wordllama_model)
        chat = TieredMemory(
            storage=storage, user_id=user, session_id="s", memory_blocks=[vector, *beside], delivery="inline"
        )
        await talk(chat, *CAT, *TRAIN)
        await chat.aflush()
        asked = tuple(await wordllama_model.aget_query_embedding(ASKED))
        query = IndexQuery(ASKED, storage.clock(), asked, blocks=frozenset({vector.key}))
        hits = await reader(storage, user, vector.key).search(query, model=wordllama_model.model_name)
        found.append([(hit.place and hit.place[1], round(hit.legs.get("dense", 0), 3)) for hit in hits])
    assert len(found[0]) == 20
    assert sorted(found[0]) == sorted(found[1])
