"""Nobody sees anybody else: look-alike ids, hundreds of tenants over shared objects, every read, every leg."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import pytest
from doubles import BadContentError, RecordingBlock, mark, marks_in
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.llms import MockLLM
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.memory.memory_blocks.vector import VectorMemoryBlock as CoreVectorMemoryBlock
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.storage.chat_store.base_db import MessageStatus
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from pydantic import Field, PrivateAttr
from running import SOAK
from sqlalchemy import func, select, text

from llama_index_memory_tiers import Storage, TieredChatStore, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.blocks.facts.block import FactExtractionMemoryBlock
from llama_index_memory_tiers.errors import MemoryTiersError
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.storage import IndexQuery, OwnerReader, owner_key

LOOK_ALIKES = [
    "john_doe", "john-doe", "john%", "john%doe", "JOHN_DOE", "John_Doe", "john_doe ", " john_doe", "john__doe",
    "john\\_doe", "johndoe", "john.doe", "john_do", "john_doe2", "john\ndoe", "ｊohn_doe", "jöhn_doe", "jo\u0308hn_doe",
    "acme", "acme-corp", "acme corp", "ACME", "acme/", "acme/x", "acme:x", "u:acme", "s:1", "1", "01", "null", "None",
    "'", "''", '"', "%", "_", "*", "?", "[a]", "../acme", "acme\t", "a" * 300, "a" * 301,
]  # fmt: skip


def turn(owner: int, number: int) -> list[ChatMessage]:
    """Everybody speaks of the same things, so that every search would find everybody."""
    return [
        ChatMessage(role="user", content=f"My account {mark(owner)} needs a new password, case {number}."),
        ChatMessage(role="assistant", content=f"The password of account {mark(owner)} was reset, case {number}."),
    ]


class Parrot(MockLLM):
    """Takes every line that a user said for a fact."""

    async def achat(self, messages: Any, **_: Any) -> ChatResponse:
        prompt = "\n".join(message.content or "" for message in messages)
        facts = dict.fromkeys(re.findall(r"My account mark\d{4}z needs a new password, case \d+", prompt))
        answer = json.dumps([{"fact": fact} for fact in facts])
        return ChatResponse(message=ChatMessage(role="assistant", content=answer))


class HashEmbedding(BaseEmbedding):
    """Equal words, equal directions; knows no meaning."""

    model_name: str = "hash-16"

    def _get_text_embedding(self, text: str) -> list[float]:
        rows = [random.Random(word) for word in re.findall(r"\w+", text.lower()) or ["nothing"]]
        return [sum(row.gauss(0, 1) for row in rows) for _ in range(16)]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Fragile(RecordingBlock):
    """Cannot read any second case, and quotes it."""

    name: str = "Fragile"

    async def prepare(self, batch: Any, reader: Any, counter: Any) -> Any:
        for stored in batch.messages:
            if "case 2" in (stored.message.content or ""):
                raise BadContentError(stored.message.content)
        return batch


def reads_of(memory: TieredMemory, question: str) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Every public read of a memory."""
    store = TieredChatStore(memory.storage, user_id=memory.user_id)

    async def report() -> Any:
        found = await memory.aexplain(question)
        return found.parts, found.messages, str(found), found._repr_html_()

    async def described() -> Any:
        return memory.to_handle(), memory

    return {
        "aget": lambda: memory.aget(question),
        "aget of the window": memory.aget,
        "aget of messages": lambda: memory.aget(messages=[ChatMessage(role="user", content=question)]),
        "aexplain": report,
        "amessages": memory.amessages,
        "archived": lambda: memory.amessages(MessageStatus.ARCHIVED),
        "aget_all": memory.aget_all,
        "dead letters": memory.adead_letters,
        "block contents": lambda: memory._get_memory_blocks_content([], question),
        "sql_store": lambda: memory.sql_store.get_messages(memory.session_id, None),
        "store": lambda: store.get_messages(memory.session_id, None),
        "stored": lambda: store.stored_messages(memory.session_id, None),
        "handle and repr": described,
    }


async def everything_that(memory: TieredMemory, question: str, names: Iterable[str] = ()) -> dict[str, Any]:
    """What public reads answer; all of them unless some are named."""
    reads = reads_of(memory, question)
    return {name: await reads[name]() for name in names or reads}


# --- look-alike ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["user", "session"])
async def test_ids_match_character_by_character(storage: Storage, kind: str) -> None:
    """`john_doe` is neither `john-doe` nor `john%` nor `JOHN_DOE`."""
    base = TieredMemory(
        storage=storage, session_id="base", delivery="inline", memory_blocks=[VectorMemoryBlock(embed_model=None)]
    )
    memories = [
        base.for_session("chat", user_id=name) if kind == "user" else base.for_session(name) for name in LOOK_ALIKES
    ]
    for number, memory in enumerate(memories):
        await memory.aput_messages(turn(number, 1))
    for number, memory in enumerate(memories):
        question = f"What about the password of {mark((number + 1) % len(memories))}?"
        found = await everything_that(memory, question, ["aexplain", "amessages"])
        assert {name: foreign for name, value in found.items() if (foreign := marks_in(value) - {mark(number)})} == {}
        assert len(found["amessages"]) == 2


async def test_a_user_and_a_session_without_user_of_the_same_name_are_strangers(storage: Storage) -> None:
    base = TieredMemory(
        storage=storage, session_id="acme", delivery="inline", memory_blocks=[VectorMemoryBlock(embed_model=None)]
    )
    user = base.for_session("acme", user_id="acme")
    # A user whose name is that of another owner's key.
    forged = base.for_session("acme", user_id="s:1")
    for number, memory in enumerate((base, user, forged)):
        await memory.aput_messages(turn(number, 1))
    for number, memory in enumerate((base, user, forged)):
        found = await everything_that(memory, "What about the password of the account?")
        assert marks_in(*found.values()) == {mark(number)}


async def test_two_sessions_of_a_user_share_what_was_learnt_and_no_window(storage: Storage) -> None:
    base = TieredMemory(
        storage=storage,
        session_id="one",
        user_id="acme",
        delivery="inline",
        memory_blocks=[
            VectorMemoryBlock(embed_model=None),
            VectorMemoryBlock(name="Here", scope="session", embed_model=None),
        ],
    )
    other = base.for_session("two")
    await base.aput_messages(turn(1, 1))
    await other.aput_messages(turn(2, 1))
    assert marks_in(await base.amessages()) == {mark(1)}
    assert marks_in(await other.amessages()) == {mark(2)}
    contents = await other._get_memory_blocks_content([], "the password of the account")
    assert marks_in(contents["RetrievedMessages"]) == {mark(1)}  # its own window is shown anyway
    assert "Here" not in contents


async def test_keys_of_a_store_are_those_of_its_user(storage: Storage) -> None:
    names = [None, *LOOK_ALIKES]
    for number, name in enumerate(names):
        await TieredChatStore(storage, user_id=name).add_message(f"chat {mark(number)}", ChatMessage(content="x"))
    for number, name in enumerate(names):
        assert marks_in(await TieredChatStore(storage, user_id=name).get_keys()) == {mark(number)}


# --- many tenants --------------------------------------------------------------------------------------


_HALF = 100 if SOAK else 30


async def test_many_tenants_over_shared_blocks_and_storage_never_meet(tmp_path: Any) -> None:
    """Cases 1, 21, 33, 35: interleaved writes and every read; owners are users and bare sessions in equal parts."""
    rng = random.Random(20260302)
    async with Storage(tmp_path / "memory.db") as storage:
        base = TieredMemory(
            storage=storage,
            session_id="base",
            memory_blocks=[
                FactExtractionMemoryBlock(llm=Parrot(), priority=1),  # two turns are not due: a flush extracts
                VectorMemoryBlock(embed_model=HashEmbedding(), priority=2),
            ],
            tokenizer_fn=str.split,
            token_limit=60,
            chat_history_token_ratio=0.4,
        )
        names = [f"tenant{'_-%. '[n % 5]}{n // 5}" for n in range(_HALF)]
        tenants = [base.for_session(rng.choice(["chat", "chat-1"]), user_id=name) for name in names]
        tenants += [base.for_session(name) for name in names]
        order = rng.sample(range(2 * _HALF), 2 * _HALF)
        for start in range(0, 2 * _HALF, 20):
            group = order[start : start + 20]
            puts = [tenants[owner].aput_messages([*turn(owner, 1), *turn(owner, 2)]) for owner in group]
            await asyncio.gather(*puts)
        for tenant in rng.sample(tenants, 30):  # the rest is for the background
            await tenant.aflush()
        recalled = 0
        for owner, tenant in enumerate(tenants):
            other = rng.randrange(2 * _HALF)
            question = rng.choice(["new password", f"account {mark(other)}", "case 2", ""])
            reads = list(reads_of(tenant, question))
            names = reads if owner % 25 == 0 else rng.sample(reads, 2)
            found = await everything_that(tenant, question, names)
            foreign = {name: marks_in(value) - {mark(owner)} for name, value in found.items()}
            assert not any(foreign.values()), (owner, foreign)
            recalled += any(part.kept for part in found["aexplain"][0]) if "aexplain" in found else 0
        assert recalled >= _HALF // 10  # or this test would see nothing because nothing was recalled
        await base.aclose()


async def test_dead_letters_are_those_of_the_user_or_of_the_bare_session_and_hold_no_text(storage: Storage) -> None:
    base = TieredMemory(storage=storage, session_id="acme", memory_blocks=[Fragile()])
    tenants = [
        base,
        base.for_session("acme-corp"),
        base.for_session("acme", "acme"),
        base.for_session("x", "acme-corp"),
    ]
    for owner, tenant in enumerate(tenants):
        await tenant.aput_messages([*turn(owner, 1), *turn(owner, 2)])
        await tenant.aput(ChatMessage(role="user", content=f"Thanks, {mark(owner)}."))
        while not await tenant.adead_letters():
            await tenant.aflush()
    for tenant in tenants:
        letters = await tenant.adead_letters()
        assert {letter.session_id for letter in letters} == {tenant.session_id}
        assert {letter.error for letter in letters} == {"BadContentError"}
        assert marks_in(letters) == set()
        await tenant.areplay()
        assert {letter.session_id for letter in await tenant.adead_letters()} == {tenant.session_id}
    await base.aclose()


# --- each leg alone -------------------------------------------------------------------------------------------


async def two_owners(storage: Storage, model: BaseEmbedding | None) -> tuple[TieredMemory, TieredMemory]:
    base = TieredMemory(
        storage=storage,
        session_id="a",
        user_id="alice",
        delivery="inline",
        memory_blocks=[VectorMemoryBlock(embed_model=model)],
    )
    bob = base.for_session("b", user_id="bob")
    for number in range(5):
        await base.aput_messages(turn(1, number))
        await bob.aput_messages(turn(2, number))
    return base, bob


async def hits_of(memory: TieredMemory, query: IndexQuery, model: str) -> list[Any]:
    session = await memory.storage.log.session(memory.user_id or "", memory.session_id)
    assert session is not None
    reader = OwnerReader(memory.storage.records, owner_key(memory.scope, session.sid), "RetrievedMessages")
    hits = await reader.search(query, model=model)
    found = await reader.messages_of(hits)
    assert len(found) == len(hits)
    return [(hit, one.message.message.content) for hit, one in zip(hits, found, strict=True)]


@pytest.mark.parametrize("leg", ["bm25", "dense", "both"])
async def test_each_leg_of_a_search_alone_finds_no_foreign_row(
    storage: Storage, leg: str, wordllama_model: Any
) -> None:
    """Scope in every leg of a hybrid search."""
    alice, bob = await two_owners(storage, None if leg == "bm25" else wordllama_model)
    model = "" if leg == "bm25" else wordllama_model.model_name
    for memory, own, foreign in ((alice, 1, 2), (bob, 2, 1)):
        words = f"password of the account {mark(foreign)}" if leg != "dense" else "login credentials"  # no common word
        query = IndexQuery(
            text=words,
            now=memory.storage.clock(),
            vector=None if leg == "bm25" else wordllama_model.get_query_embedding(words),
        )
        hits = await hits_of(memory, query, model)
        assert marks_in([content for _, content in hits]) == {mark(own)}
        legs = {name for hit, _ in hits for name in hit.legs}
        assert ("bm25" in legs) is (leg != "dense")
        assert ("dense" in legs) is (leg != "bm25")


async def test_ids_of_another_owner_are_dropped_whoever_offers_them(storage: Storage) -> None:
    """A stale or wrong index can name what it likes: text comes from SQL, of this owner only."""
    await two_owners(storage, None)
    query = IndexQuery(text="password", now=storage.clock())
    hits = await storage.records.search("u:bob", "", query)
    assert hits
    alices = OwnerReader(storage.records, "u:alice", "RetrievedMessages")
    assert await alices.messages_of(hits) == []
    assert await alices.records_of(hits) == []
    uids = {record.id: 1.0 for record in await storage.records.records("u:bob", kinds=["message"])}
    assert uids
    assert await alices.hits_of(uids) == []


class Leaky(BasePydanticVectorStore):
    """A vector store that ignores the filters it is given."""

    stores_text: bool = False
    _ids: list[str] = PrivateAttr(default_factory=list)

    @property
    def client(self) -> Any:
        return None

    def add(self, nodes: Any, **_: Any) -> list[str]:
        self._ids += [node.node_id for node in nodes]
        assert not marks_in([node.get_content() for node in nodes], [node.metadata for node in nodes])
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        return None

    def query(self, query: Any, **_: Any) -> VectorStoreQueryResult:
        return VectorStoreQueryResult(ids=list(self._ids), similarities=[1.0] * len(self._ids))


async def test_a_vector_store_that_ignores_its_filter_cannot_leak(storage: Storage) -> None:
    block = VectorMemoryBlock(vector_store=Leaky(), embed_model=HashEmbedding())
    base = TieredMemory(
        storage=storage, session_id="a", user_id="alice", delivery="inline", memory_blocks=[block], token_limit=200
    )
    bob = base.for_session("b", user_id="bob")
    for memory, own in ((base, 1), (bob, 2)):
        for number in range(8):
            await memory.aput_messages(turn(own, number))
        await memory.aflush()
    for memory, own in ((base, 1), (bob, 2)):
        found = await everything_that(memory, "the password of the account")
        assert marks_in(*found.values()) == {mark(own)}
        assert any(part.kept for part in found["aexplain"][0])


async def test_a_block_used_without_a_memory_is_told_its_session_each_time() -> None:
    """Scope per call; the first session leaves nothing behind in the object."""
    block = VectorMemoryBlock(embed_model=None)
    for number in range(6):
        await block.aput(turn(number % 2, number), session_id=f"chat-{number % 2}")
    for number in (0, 1, 0, 1):
        asked = [ChatMessage(role="user", content="the password of the account")]
        assert marks_in(await block.aget(asked, session_id=f"chat-{number}")) == {mark(number)}
    assert await block.aget([ChatMessage(role="user", content="password")], session_id="chat-2") == ""
    assert await block.aget([ChatMessage(role="user", content="password")]) == ""
    await block.aclose()


class Filtering(BasePydanticVectorStore):
    """Obeys the filter of its query, as real stores do."""

    stores_text: bool = True
    is_embedding_query: bool = True
    nodes: list[BaseNode] = Field(default_factory=list)

    @property
    def client(self) -> Any:
        return self

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        self.nodes.extend(nodes)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        raise NotImplementedError

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        assert query.filters is not None
        wanted = {each.key: each.value for each in query.filters.filters if isinstance(each, MetadataFilter)}
        found = [node for node in self.nodes if all(node.metadata.get(key) == wanted[key] for key in wanted)]
        return VectorStoreQueryResult(nodes=found, similarities=[1.0] * len(found), ids=[n.node_id for n in found])


@pytest.mark.parametrize("given", [{}, {"filters": MetadataFilters(filters=[])}], ids=["bare", "with a filter"])
async def test_a_shared_stock_vector_block_shows_each_session_its_own(storage: Storage, given: Any) -> None:
    store = Filtering()
    block = CoreVectorMemoryBlock(vector_store=store, embed_model=HashEmbedding(), query_kwargs=given)
    first = TieredMemory(storage=storage, user_id="ann", session_id="of-ann", memory_blocks=[block])
    second = first.for_session("of-ben", user_id="ben")
    for number, memory in enumerate((first, second)):
        node = TextNode(text=f"account {mark(number)}", metadata={"session_id": memory.session_id})
        store.add([node])
    for _ in range(2):
        for number, memory in enumerate((first, second)):
            assert marks_in(await memory.aget("which account?")) == {mark(number)}
    assert [*block.query_kwargs] == [*given]
    assert not any(filters.filters for filters in block.query_kwargs.values())
    await first.aclose()


async def test_what_a_foreign_block_keeps_in_itself_stays_when_it_is_asked(storage: Storage) -> None:
    class Counting(BaseMemoryBlock[str]):
        name: str = "Counting"
        asked: int = 0

        async def _aget(self, messages: list[ChatMessage] | None = None, **_: Any) -> str:
            self.asked += 1
            return "said"

        async def _aput(self, messages: list[ChatMessage]) -> None:
            raise NotImplementedError

    block = Counting()
    memory = TieredMemory(storage=storage, session_id="s", memory_blocks=[block])
    await memory.aget("one")
    await memory.aget("two")
    assert block.asked == 2
    await memory.aclose()


# --- what is said about messages ------------------------------------------------------------------------------

SECRET = "mark9999z, the plans for Tuesday"


class Talkative(RecordingBlock):
    """Fails, and quotes the message in its error."""

    async def prepare(self, batch: Any, reader: Any, counter: Any) -> Any:
        raise ValueError(f"cannot read: {[stored.message.content for stored in batch.messages]}")

    async def recall(self, query: Any, reader: Any) -> Any:
        raise ValueError(f"cannot answer: {query.text}")


async def test_logs_and_events_carry_no_text_whatever_goes_wrong(
    storage: Storage, events: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="llama_index_memory_tiers")
    memory = TieredMemory(
        storage=storage,
        session_id="chat",
        user_id="logan",
        token_limit=100,
        delivery="inline",
        memory_blocks=[Talkative(), VectorMemoryBlock(embed_model=None)],
    )
    for number in range(4):
        await memory.aput_messages(
            [ChatMessage(role="user", content=f"{SECRET} {number} " * 5), ChatMessage(role="assistant", content=SECRET)]
        )
    for _ in range(10):
        report = await memory.aflush()
    await memory.aget(SECRET)
    await memory.areplay()
    await damage_newest(storage)
    await memory.for_session("chat").aget()
    TieredMemory(storage=storage, session_id="chat", user_id="logan")
    async with Storage(storage.address if "sqlite" in storage.address else None) as again:
        await TieredMemory(storage=again, session_id="chat", user_id="logan").aget()
    kinds = {type(event).__name__ for event in events}
    assert {"MessagesPut", "WindowFlushed", "BatchAbsorbed", "BlockFailed", "ContextBuilt"} <= kinds
    assert marks_in(*(event.model_dump() for event in events)) == set()
    assert "Tuesday" not in repr([event.model_dump() for event in events])
    assert "damaged message skipped" in caplog.text
    assert "Tuesday" not in caplog.text
    assert "Tuesday" not in repr([vars(record) for record in caplog.records])
    assert "Tuesday" not in f"{report} {report!r} {await memory.adead_letters()!r}"


async def damage_newest(storage: Storage) -> None:
    """Cut the newest row in its text, as a half-restored backup would."""

    async def work(connection: Any) -> None:
        table = storage.log._m
        newest = select(func.max(table.c.seq)).scalar_subquery()
        await connection.execute(
            table.update().where(table.c.seq == newest),
            {
                "data": json.dumps(
                    {"role": "user", "additional_kwargs": {}, "blocks": [{"block_type": "txt", "text": SECRET}]}
                )
            },
        )

    await storage._database.write(work)
    storage.log._cache.windows.clear()


async def test_errors_carry_no_text_of_messages(storage: Storage) -> None:
    memory = TieredMemory(storage=storage, session_id="chat", token_limit=30, overflow="raise")
    caught: list[BaseException] = []

    async def attempt(work: Any) -> None:
        try:
            await work
        except MemoryTiersError as error:
            caught.append(error)
            seen: BaseException | None = error
            while seen is not None:  # what a traceback would show
                assert "Tuesday" not in str(seen), type(seen)
                seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)

    message = ChatMessage(role="user", content=SECRET * 20)
    await attempt(memory.aput(SECRET))  # type: ignore[arg-type]
    await attempt(memory.aput(ChatMessage(content=SECRET, additional_kwargs={SECRET: object()})))
    await attempt(memory.aput(message, created_at="now"))  # type: ignore[arg-type]
    await memory.aput(message)
    await attempt(memory.aget())
    await storage._database.write(lambda connection: connection.execute(text(f"DROP TABLE {storage.log._m.fullname}")))
    await attempt(memory.aput(message))
    await attempt(memory.aset([message]))
    await attempt(memory.aget())
    await storage.aclose()
    await attempt(memory.aput(message))
    assert len(caught) == 8


def member(value: str) -> str:
    """A text of a class of its own, which is called the same wherever its value is another."""

    class Who(str, Enum):
        SOMEBODY = value

    return Who.SOMEBODY


async def test_an_id_counts_by_its_text_whatever_class_of_text_it_is(storage: Storage) -> None:
    memory = TieredMemory(
        storage=storage, session_id="start", user_id="eve", memory_blocks=[VectorMemoryBlock()], delivery="inline"
    )
    ann = memory.for_session(member("one"), user_id=member("ann"))
    await ann.aput_messages([ChatMessage(content="mark0001z, says Ann"), ChatMessage(role="assistant", content="Yes.")])
    for asking, hears in ((member("bob"), False), (member("ann"), True), ("ann", True)):
        found = await memory.for_session("two", user_id=asking).aget(input="What is mark0001z?")
        assert any("says Ann" in str(message.content) for message in found) is hears
    owners = await storage._database.read(lambda c: c.execute(select(storage.records._r.c.owner).distinct()))
    assert list(owners.scalars()) == ["u:ann"]


def test_a_scope_cannot_be_changed_behind_a_readers_back() -> None:
    scope = Scope("chat", "logan")
    with pytest.raises(AttributeError):
        scope.user_id = "bob"  # type: ignore[misc]
