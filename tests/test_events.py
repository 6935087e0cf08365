"""Observability: each event once per change of state, no text unasked, and nothing paid when nobody listens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import Outage, RecordingBlock, absorb_all, refuse_content, rows, said, turn
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index_instrumentation.dispatcher import Dispatcher
from pydantic import PrivateAttr
from running import MakeStorage

from llama_index_memory_tiers import (
    ByAge,
    EpisodicMemoryBlock,
    FactExtractionMemoryBlock,
    Partition,
    Storage,
    SummaryMemoryBlock,
    TieredMemory,
    VectorMemoryBlock,
)
from llama_index_memory_tiers import events as ours
from llama_index_memory_tiers.extraction.calling import ask
from llama_index_memory_tiers.instruments import acting, include_texts, listening, span, watching
from llama_index_memory_tiers.testing import ScriptedLLM

ROOT = Path(__file__).parent.parent


class Heard(BaseEventHandler):
    """Keeps every event."""

    _events: list[BaseEvent] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Heard"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self._events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self._events if isinstance(event, kind)]

    def total(self, kind: type[Any], field: str) -> int:
        return sum(getattr(event, field) for event in self.of(kind))


class Spans(BaseSpanHandler[BaseSpan]):
    """Keeps what became of every span, and what was told about it."""

    _told: list[tuple[str, str, Any]] = PrivateAttr(default_factory=list)

    def new_span(
        self, id_: str, bound_args: Any, instance: Any = None, parent_span_id: Any = None, tags: Any = None, **_: Any
    ) -> BaseSpan:
        self._told.append(("enter", id_, (bound_args.arguments, instance, parent_span_id)))
        return BaseSpan(id_=id_, parent_id=parent_span_id)

    def prepare_to_exit_span(
        self, id_: str, bound_args: Any, instance: Any = None, result: Any = None, **_: Any
    ) -> BaseSpan:
        self._told.append(("exit", id_, result))
        return self.open_spans[id_]

    def prepare_to_drop_span(
        self, id_: str, bound_args: Any, instance: Any = None, err: Any = None, **_: Any
    ) -> BaseSpan:
        self._told.append(("drop", id_, type(err).__name__))
        return self.open_spans[id_]

    def names(self) -> list[tuple[str, str]]:
        return [(what, id_.partition("-")[0]) for what, id_, _ in self._told]


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    before = list(ours.dispatcher.event_handlers)
    ours.dispatcher.add_event_handler(handler)
    yield handler
    ours.dispatcher.event_handlers = before


@pytest.fixture
def spans() -> Iterator[Spans]:
    handler = Spans()
    before = list(ours.dispatcher.span_handlers)
    ours.dispatcher.span_handlers = [*before, handler]
    yield handler
    ours.dispatcher.span_handlers = before


@pytest.fixture
def store(make_storage: MakeStorage) -> Storage:
    return make_storage("private")


def fact(number: int) -> str:
    return json.dumps(
        {"subject": f"thing {number}", "relation": "is", "value": "x", "fact": f"Thing {number} is x.", "said": [1]}
    )


def scripted_facts() -> ScriptedLLM:
    counter = iter(range(10_000))
    return ScriptedLLM(lambda _: "\n".join(fact(next(counter)) for _ in range(3)))


async def count(storage: Storage, query: str) -> int:
    return int((await rows(storage, f"SELECT count(*) AS n FROM {query}"))[0].n)  # noqa: S608  # our own words


# --- once per change ------------------------------------------------------------------------------------------


async def test_events_of_a_life_add_up_to_the_state(store: Storage, heard: Heard) -> None:
    llm = scripted_facts()
    memory = TieredMemory(
        storage=store, user_id="ada", session_id="one", token_limit=600, token_flush_size=60,
        memory_blocks=[VectorMemoryBlock(), FactExtractionMemoryBlock(llm=llm, max_facts=5)],
    )  # fmt: skip
    for number in range(30):
        await memory.aput_messages(turn(number), uids=[f"q{number}", f"a{number}"])
        await memory.aput_messages(turn(number), uids=[f"q{number}", f"a{number}"])  # a retried put is one put
    await absorb_all(memory)
    contexts = [await memory.aget(f"What was question {number}?") for number in range(4)]
    await memory.aset([*(await memory.aget_all())[-2:], said("user", "one more")])
    await absorb_all(memory)

    assert heard.total(ours.MessagesPut, "stored") == await count(store, "{t}_messages") == 61
    for key in ("RetrievedMessages", "ExtractedFacts"):
        mine = [event for event in heard.of(ours.BatchAbsorbed) if event.block == key]
        assert sum(event.messages for event in mine) == 61
        written = await count(store, f"{{t}}_records WHERE block = '{key}'")
        assert sum(event.added for event in mine) == written > 0
        drafted = [event for event in heard.of(ours.BatchPrepared) if event.block == key]
        assert [event.messages for event in drafted] == [event.messages for event in mine]
    assert heard.total(ours.BatchAbsorbed, "superseded") == await count(
        store, "{t}_records WHERE superseded_by IS NOT NULL"
    )
    evicted = await count(store, "{t}_records WHERE archived_at IS NOT NULL")
    assert heard.total(ours.RecordsEvicted, "count") == heard.total(ours.BatchAbsorbed, "evicted") == evicted
    assert len(heard.of(ours.ModelCalled)) == len(llm.calls) > 0
    assert {event.block for event in heard.of(ours.ModelCalled)} == {"ExtractedFacts"}
    assert len(heard.of(ours.ContextBuilt)) == len(contexts)
    assert Counter(event.block for event in heard.of(ours.BlockRecalled)) == {
        "RetrievedMessages": 4,
        "ExtractedFacts": 4,
    }
    await memory.aclose()


async def test_what_leaves_the_window_is_told_once(store: Storage, heard: Heard) -> None:
    memory = TieredMemory(storage=store, user_id="ada", session_id="one", token_limit=300, memory_blocks=[])
    for number in range(40):
        await memory.aput_messages(turn(number))
    archived = await count(store, "{t}_messages WHERE status = 'archived'")
    assert heard.total(ours.WindowFlushed, "archived") == archived > 0
    await memory.aclose()


async def test_what_is_evicted_by_a_cap_and_by_a_rule_is_told_once(store: Storage, heard: Heard) -> None:
    memory = TieredMemory(
        storage=store, user_id="ada", session_id="one", retention=[ByAge(days=1)],
        memory_blocks=[FactExtractionMemoryBlock(llm=ScriptedLLM(lambda _: "\n".join(map(fact, range(9)))), max_facts=4)],
    )  # fmt: skip
    for number in range(4):
        await memory.aput_messages(turn(number))
    await absorb_all(memory)
    by_cap = await count(store, "{t}_records WHERE archived_at IS NOT NULL")
    assert heard.total(ours.RecordsEvicted, "count") == by_cap
    await memory.aclose()
    later = Storage(store.address, clock=lambda: store.clock().replace(year=store.clock().year + 1))
    tended = TieredMemory(
        storage=later, user_id="ada", session_id="one", retention=[ByAge(days=1)], memory_blocks=memory.memory_blocks
    )
    report = await tended.amaintain(dry_run=False)
    assert len(report.departures) > 0
    assert (
        heard.total(ours.RecordsRetired, "archived")
        == await count(later, "{t}_records WHERE archived_at IS NOT NULL") - by_cap
    )
    await tended.aclose()
    await later.aclose()


async def test_failures_are_told_and_the_batch_that_succeeds_at_last_once(store: Storage, heard: Heard) -> None:
    outage = Outage()
    memory = TieredMemory(
        storage=store, user_id="ada", session_id="one", memory_blocks=[RecordingBlock(on_prepare=outage)]
    )
    await memory.astop()
    await memory.aput_messages(turn(1))
    for _ in range(3):
        await memory.aflush()
    assert len(heard.of(ours.BlockFailed)) == outage.calls == 3
    assert heard.of(ours.BatchPrepared) == heard.of(ours.BatchAbsorbed) == []
    outage.down = False
    await absorb_all(memory)
    assert (len(heard.of(ours.BatchPrepared)), len(heard.of(ours.BatchAbsorbed))) == (1, 1)
    await memory.aclose()


async def test_a_dead_letter_that_is_replayed_is_told_as_absorbed(store: Storage, heard: Heard) -> None:
    block = RecordingBlock(on_prepare=refuse_content("poison"))
    memory = TieredMemory(storage=store, user_id="ada", session_id="one", memory_blocks=[block])
    await memory.astop()
    await memory.aput_messages([said("user", "poison"), said("assistant", "noted")])
    await absorb_all(memory)
    assert heard.total(ours.BlockFailed, "parked") == len(await memory.adead_letters()) == 1
    before = heard.total(ours.BatchAbsorbed, "messages")
    block.on_prepare = None
    await memory.areplay()
    assert heard.total(ours.BatchAbsorbed, "messages") - before == 1
    await memory.aclose()


async def test_what_is_written_by_hand_is_told_as_such(store: Storage, heard: Heard) -> None:
    memory = TieredMemory(storage=store, user_id="ada", session_id="one", memory_blocks=[VectorMemoryBlock()])
    await memory.aremember("Pixel is a dog.")
    assert [(event.block, event.added) for event in heard.of(ours.RecordsChanged)] == [("RetrievedMessages", 1)]
    await memory.aclose()


async def test_what_is_forgotten_is_told_once_and_adds_up(store: Storage, heard: Heard) -> None:
    memory = TieredMemory(storage=store, user_id="ada", session_id="one", memory_blocks=[VectorMemoryBlock()])
    for number in range(3):
        await memory.aput_messages(turn(number))
    await absorb_all(memory)
    receipt = await memory.aforget(scope="user")
    [event] = heard.of(ours.MemoryForgotten)
    assert (event.messages, event.records) == (receipt.removed["messages"], receipt.removed["records"]) == (6, 6)
    assert event.complete
    await memory.aclose()


# --- model calls ----------------------------------------------------------------------------------------------


async def test_every_purpose_of_a_model_call_is_told(store: Storage, heard: Heard) -> None:
    asked = ScriptedLLM(lambda _: "A summary.")
    sorted_by = ScriptedLLM(lambda _: '{"message": 1, "partition": "facts"}')
    taught = ScriptedLLM(lambda _: '{"text": "Try the other door."}')
    episodes = EpisodicMemoryBlock(llm=taught)
    memory = TieredMemory(
        storage=store, user_id="ada", session_id="one",
        memory_blocks=[
            SummaryMemoryBlock(llm=asked, summarize_every=2, window_messages=2),
            VectorMemoryBlock(partitions=Partition.survey(), classifier=sorted_by),
            FactExtractionMemoryBlock(llm=ScriptedLLM(lambda _: "\n".join(map(fact, range(9)))), max_facts=4),
            episodes,
        ],
    )  # fmt: skip
    for number in range(4):
        await memory.aput_messages(turn(number))
    await memory.aflush()  # the summary leaves what is in the window
    async with episodes.of(memory).episode("open the door") as episode:
        await episode.add_step("push")
    calls = heard.of(ours.ModelCalled)
    assert {event.purpose for event in calls} == {"summary", "partitions", "facts", "condense facts", "lessons"}
    assert {event.purpose: event.block for event in calls} == {
        "summary": "Summary", "partitions": "RetrievedMessages", "facts": "ExtractedFacts",
        "condense facts": "ExtractedFacts", "lessons": "Episodes",
    }  # fmt: skip
    assert all(event.tokens > 0 and event.seconds >= 0 and event.model and event.session_id == "one" for event in calls)
    await memory.aclose()


class Priced(ScriptedLLM):
    """A model whose provider counts."""

    async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        message = ChatMessage(role=MessageRole.ASSISTANT, content="Yes.")
        return ChatResponse(message=message, raw={"usage": {"total_tokens": 4711}})


async def test_tokens_are_the_providers_when_it_counts(heard: Heard) -> None:
    await ask(Priced(), [said("user", "Well?")], "test")
    assert heard.of(ours.ModelCalled)[0].tokens == 4711


async def test_a_call_that_fails_is_told_with_the_kind_of_its_error(heard: Heard) -> None:
    with acting("Block", "one"), pytest.raises(ConnectionError):
        await ask(ScriptedLLM([ConnectionError("secret host")]), [said("user", "Well?")], "test")
    [event] = heard.of(ours.ModelCalled)
    assert (event.block, event.session_id, event.error) == ("Block", "one", "ConnectionError")
    assert "secret" not in event.model_dump_json()


async def test_no_event_holds_a_text_unless_it_is_asked_for(store: Storage, heard: Heard) -> None:
    memory = TieredMemory(
        storage=store, user_id="ada", session_id="one", token_limit=400,
        memory_blocks=[VectorMemoryBlock(), FactExtractionMemoryBlock(llm=ScriptedLLM(lambda _: fact(1)), absorb_every=1)],
    )  # fmt: skip
    for number in range(12):
        await memory.aput(said("user", f"xylophone {number}"))
        await memory.aput(said("assistant", f"xylophone answered {number}"))
    await absorb_all(memory)
    await memory.aget("xylophone?")
    await memory.aforget(scope="user")
    told = " ".join(event.model_dump_json() for event in heard._events)
    assert len(heard.of(ours.ModelCalled)) > 0
    assert "xylophone" not in told
    include_texts(True)
    try:
        await ask(ScriptedLLM(["Here you are."]), [said("user", "xylophone?")], "test")
    finally:
        include_texts(False)
    event = heard.of(ours.ModelCalled)[-1]
    assert (event.prompt, event.answer) == ("xylophone?", "Here you are.")
    await memory.aclose()


# --- spans ----------------------------------------------------------------------------------------------------


async def test_put_get_and_flush_are_spans_without_arguments_or_results(
    store: Storage, spans: Spans, heard: Heard
) -> None:
    memory = TieredMemory(storage=store, user_id="ada", session_id="one", memory_blocks=[])
    await memory.aput(said("user", "hello"))
    await memory.aput_messages(turn(1))
    await memory.aget()
    await memory.aflush()
    names = [f"TieredMemory.{name}" for name in ("aput", "aput_messages", "aget", "aflush")]
    assert spans.names() == [(what, name) for name in names for what in ("enter", "exit")]
    assert all(told[0] == {} and told[1] is None for what, _, told in spans._told if what == "enter")
    assert all(told is None for what, _, told in spans._told if what == "exit")
    first = spans._told[0][1]
    assert heard.of(ours.MessagesPut)[0].span_id == first
    await memory.aclose()


async def test_a_span_that_fails_is_dropped_and_its_parent_is_known(spans: Spans) -> None:
    with span("outer"), pytest.raises(KeyError), span("inner"):
        raise KeyError("x")
    assert spans.names() == [("enter", "outer"), ("enter", "inner"), ("drop", "inner"), ("exit", "outer")]
    assert spans._told[1][2][2] == spans._told[0][1]


async def test_without_handlers_a_put_and_a_get_dispatch_no_span_and_count_no_tokens(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (ours.dispatcher, ours.dispatcher.root):  # LlamaIndex attaches some of its own in other tests
        monkeypatch.setattr(each, "event_handlers", [])
        monkeypatch.setattr(each, "span_handlers", [])
    assert not listening()
    assert not watching()
    dispatched: Counter[str] = Counter()

    def counting(name: str) -> Any:
        real = getattr(Dispatcher, name)

        def call(self: Dispatcher, *args: Any, **kwargs: Any) -> Any:
            if self is ours.dispatcher:
                dispatched[name] += 1
            return real(self, *args, **kwargs)

        return call

    for name in ("event", "span_enter", "span_exit", "span_drop"):
        monkeypatch.setattr(Dispatcher, name, counting(name))
    memory = TieredMemory(storage=store, user_id="ada", session_id="one", memory_blocks=[VectorMemoryBlock()])
    await memory.astop()
    await memory.aput(said("user", "hello"))
    assert dispatched == {"event": 1}
    await memory.aget("hello?")
    assert dispatched == {"event": 2}
    await memory.aclose()


# --- documentation --------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "observability.md"


def test_the_page_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)), "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind in ("MessagesPut", "BatchPrepared", "BatchAbsorbed", "BlockRecalled", "ContextBuilt", "MemoryForgotten"):
        assert kind in done.stdout
    assert "TieredMemory.aget" in done.stdout


def test_the_page_names_every_event() -> None:
    kinds = {
        name for name, kind in vars(ours).items()
        if isinstance(kind, type) and issubclass(kind, ours.MemoryEvent) and kind not in {ours.MemoryEvent, ours.SegmentEvent}
    }  # fmt: skip
    page = PAGE.read_text("utf-8")
    assert {kind for kind in kinds if f"`{kind}`" not in page} == set()
