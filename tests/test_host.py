"""TieredMemory inside LlamaIndex: real agents, workflows and chat engines, with scripted models."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles import answer, user
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    CodeActAgent,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.memory import Memory
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.storage.chat_store.base_db import MessageStatus
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent

from llama_index_memory_tiers import StaticMemoryBlock, Storage, TieredChatStore, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.testing import QuotingLLM, ScriptedFunctionCallingLLM, ScriptedLLM, ToolCall

pytestmark = [
    # LlamaIndex's agents walk over their own attributes, deprecated ones of pydantic among them, and ask whether
    # they run.
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince211"),
    pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Skipping serialization of known unserializable key"),
]


def texts(messages: Sequence[ChatMessage]) -> list[str]:
    return [message.content or "" for message in messages]


def roles(messages: Sequence[ChatMessage]) -> list[str]:
    return [message.role.value for message in messages]


def everything(messages: Sequence[ChatMessage]) -> str:
    return "\n".join(texts(messages))


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def fail(reason: str) -> str:
    """Fail."""
    raise RuntimeError(f"no luck: {reason}")


def no_result_without_its_call(messages: Sequence[ChatMessage]) -> bool:
    called: set[str | None] = set()
    for message in messages:
        called.update(block.tool_call_id for block in message.blocks if isinstance(block, ToolCallBlock))
        if message.role == MessageRole.TOOL and message.additional_kwargs.get("tool_call_id") not in called:
            return False
    return True


@pytest.fixture
async def memory() -> AsyncIterator[TieredMemory]:
    """A memory of a user, with recall by words."""
    made = TieredMemory(
        user_id="maya",
        session_id="today",
        memory_blocks=[
            StaticMemoryBlock(static_content="The user is called Maya."),
            VectorMemoryBlock(embed_model=None),
        ],
    )
    yield made
    await made.aclose()


# --- one agent -------------------------------------------------------------------------------------------------


async def test_a_function_agent_uses_tools_and_the_memory_has_the_whole_turn_in_order(memory: TieredMemory) -> None:
    llm = ScriptedFunctionCallingLLM(
        [ToolCall("multiply", {"a": 6, "b": 7}), [ToolCall("multiply", {"a": 2, "b": 3}), ToolCall("multiply", {"a": 1, "b": 1})], "Done."]
    )  # fmt: skip
    agent = FunctionAgent(tools=[multiply], llm=llm, system_prompt="You calculate.")
    result = await agent.run("What is 6 times 7?", memory=memory)
    assert str(result) == "Done."
    kept = await memory.aget_all()
    assert roles(kept) == ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert texts(kept)[2] == "42"
    assert no_result_without_its_call(kept)
    first = llm.calls[0]
    assert roles(first) == ["system", "system", "user"]
    assert first[0].content == "You calculate."
    assert "called Maya" in texts(first)[1]
    assert all(no_result_without_its_call(call) for call in llm.calls)


async def test_the_next_run_sees_the_last_one_once(memory: TieredMemory) -> None:
    llm = ScriptedFunctionCallingLLM([ToolCall("multiply", {"a": 6, "b": 7}), "42.", "You asked for 6 times 7."])
    agent = FunctionAgent(tools=[multiply], llm=llm)
    await agent.run("What is 6 times 7?", memory=memory)
    await agent.run("What did I ask?", memory=memory)
    seen = llm.calls[-1]
    assert roles(seen)[1:] == ["user", "assistant", "tool", "assistant", "user"]
    assert everything(seen).count("What is 6 times 7?") == 1


async def test_a_run_without_tool_calls_stores_the_question_and_the_answer_only(memory: TieredMemory) -> None:
    agent = FunctionAgent(tools=[multiply], llm=ScriptedFunctionCallingLLM(["Hello!"]))
    await agent.run("Hi", memory=memory)
    assert texts(await memory.aget_all()) == ["Hi", "Hello!"]


async def test_streaming_gives_the_deltas_and_stores_the_whole(memory: TieredMemory) -> None:
    llm = ScriptedFunctionCallingLLM([ToolCall("multiply", {"a": 6, "b": 7}), "It is forty two."])
    handler = FunctionAgent(tools=[multiply], llm=llm).run("6 times 7?", memory=memory)
    deltas, results = [], []
    async for event in handler.stream_events():
        if isinstance(event, AgentStream):
            deltas.append(event.delta)
        if isinstance(event, ToolCallResult):
            results.append(event.tool_output.content)
    await handler
    assert "".join(deltas) == "It is forty two."
    assert results == ["42"]
    assert texts(await memory.aget_all())[-1] == "It is forty two."


async def test_a_tool_that_raises_is_part_of_the_turn_and_the_chat_goes_on(memory: TieredMemory) -> None:
    llm = ScriptedFunctionCallingLLM([ToolCall("fail", {"reason": "rain"}), "It did not work.", "Yes, again."])
    agent = FunctionAgent(tools=[fail], llm=llm)
    await agent.run("Try it", memory=memory)
    await agent.run("Again?", memory=memory)
    kept = await memory.aget_all()
    assert roles(kept) == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert "no luck: rain" in texts(kept)[2]


async def test_a_model_that_fails_leaves_the_question_and_a_retry_is_an_ordinary_turn(memory: TieredMemory) -> None:
    llm = ScriptedFunctionCallingLLM([ValueError("overloaded"), "Hello!"])
    agent = FunctionAgent(tools=[multiply], llm=llm)
    with pytest.raises(ValueError, match="overloaded"):
        await agent.run("Hi", memory=memory)
    assert texts(await memory.aget_all()) == ["Hi"]
    await agent.run("Hi again", memory=memory)
    assert texts(await memory.aget_all()) == ["Hi", "Hi again", "Hello!"]


async def test_an_early_stop_stores_its_final_answer(memory: TieredMemory) -> None:
    llm = ScriptedFunctionCallingLLM(
        [ToolCall("multiply", {"a": 1, "b": 1}), ToolCall("multiply", {"a": 2, "b": 2}), "I had to stop here."]
    )
    agent = FunctionAgent(tools=[multiply], llm=llm, early_stopping_method="generate")
    result = await agent.run("Go on for ever", memory=memory, max_iterations=2)
    assert str(result) == "I had to stop here."
    assert texts(await memory.aget_all()) == ["Go on for ever", "I had to stop here."]
    assert no_result_without_its_call(await memory.aget())


async def test_state_that_the_agent_writes_into_the_last_message_does_not_reach_the_store(
    memory: TieredMemory,
) -> None:
    llm = ScriptedFunctionCallingLLM(["One.", "Two."])
    agent = FunctionAgent(tools=[multiply], llm=llm, initial_state={"mood": "curious"})
    await agent.run("Hi", memory=memory)
    await agent.run("Hi again", memory=memory)
    assert all("curious" in everything(call) for call in llm.calls)
    assert texts(await memory.aget_all()) == ["Hi", "One.", "Hi again", "Two."]


async def test_chat_history_replaces_the_window_and_keeps_the_archive(memory: TieredMemory) -> None:
    llm = ScriptedFunctionCallingLLM(["One.", "Two."])
    agent = FunctionAgent(tools=[multiply], llm=llm)
    await agent.run("The boat is called Petrel.", memory=memory)
    await memory.aflush()
    await agent.run("And now?", chat_history=[user("Another talk"), answer("Indeed.")], memory=memory)
    assert texts(await memory.aget_all(MessageStatus.ACTIVE)) == ["Another talk", "Indeed.", "And now?", "Two."]
    assert texts(await memory.aget_all(MessageStatus.ARCHIVED)) == ["The boat is called Petrel.", "One."]
    assert "Petrel" in everything(await memory.aget("What is the boat called?"))


async def test_a_server_that_resends_the_whole_history_each_turn_stores_nothing_twice(memory: TieredMemory) -> None:
    llm = ScriptedFunctionCallingLLM(lambda messages: f"Answer to {messages[-1].content}")
    agent = FunctionAgent(tools=[multiply], llm=llm)
    client: list[ChatMessage] = []
    for number in range(5):
        result = await agent.run(f"q{number}", chat_history=client, memory=memory)
        client = [*client, user(f"q{number}"), answer(str(result))]
    assert texts(await memory.aget_all()) == texts(client)


async def test_the_last_message_of_chat_history_can_be_the_request(memory: TieredMemory) -> None:
    agent = FunctionAgent(tools=[multiply], llm=ScriptedFunctionCallingLLM(["Hello!"]))
    await agent.run(chat_history=[user("Hi")], memory=memory)
    assert texts(await memory.aget_all()) == ["Hi", "Hello!"]


async def test_the_memory_is_in_the_agents_context_and_can_stand_beside_it(memory: TieredMemory) -> None:
    agent = FunctionAgent(tools=[multiply], llm=ScriptedFunctionCallingLLM(["One.", "Two."]))
    ctx: Context[Any] = Context(agent)
    await agent.run("Hi", memory=memory, ctx=ctx)
    found = await ctx.store.get("memory")
    assert texts(await found.aget_all()) == ["Hi", "One."]
    # Between two runs LlamaIndex writes the context down and leaves the memory out: it is passed each time.
    await agent.run("Again", memory=memory, ctx=ctx)
    assert texts(await memory.aget_all()) == ["Hi", "One.", "Again", "Two."]


async def test_a_context_that_was_stored_is_taken_up_with_the_handle_of_its_memory(tmp_path: Path) -> None:
    agent = FunctionAgent(tools=[multiply], llm=ScriptedFunctionCallingLLM(["One.", "Two."]))
    memory = TieredMemory(storage=tmp_path / "m.db", user_id="maya", session_id="today")
    ctx: Context[Any] = Context(agent)
    await agent.run("Hi", memory=memory, ctx=ctx)
    with pytest.warns(Warning, match="unserializable key: memory"):  # it leaves every memory behind, and says so
        stored, handle = ctx.to_dict(), memory.to_handle()
    await memory.aclose()
    again = TieredMemory.from_handle(handle)
    await agent.run("Again", ctx=Context.from_dict(agent, stored), memory=again)
    assert texts(await again.aget_all()) == ["Hi", "One.", "Again", "Two."]
    await again.aclose()


async def test_a_human_in_the_loop_answers_inside_the_turn(memory: TieredMemory) -> None:
    async def dangerous(ctx: Context) -> str:
        """Ask before doing it."""
        reply = await ctx.wait_for_event(
            HumanResponseEvent, waiter_event=InputRequiredEvent(prefix="Really?"), waiter_id="really"
        )
        return f"The human said {reply.response}."

    llm = ScriptedFunctionCallingLLM([ToolCall("dangerous"), "Done as you wish."])
    agent = FunctionAgent(tools=[dangerous], llm=llm)
    ctx: Context[Any] = Context(agent)
    handler = agent.run("Do it", ctx=ctx, memory=memory)
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            handler.ctx.send_event(HumanResponseEvent(response="yes"))
    await handler
    kept = await memory.aget_all()
    assert roles(kept) == ["user", "assistant", "tool", "assistant"]
    assert "The human said yes." in texts(kept)[2]


async def test_a_react_agent_keeps_its_reasoning_and_recovers_from_bad_format(memory: TieredMemory) -> None:
    llm = ScriptedLLM(
        [
            'Thought: I multiply.\nAction: multiply\nAction Input: {"a": 6, "b": 7}',
            "Thought: something\nAction: multiply\nAction Input: none of this is readable",
            "Thought: I can answer without using any more tools.\nAnswer: It is 42.",
            "Thought: I remember.\nAnswer: You asked for 6 times 7.",
        ]
    )
    agent = ReActAgent(tools=[multiply], llm=llm, system_prompt="Think.")
    assert str(await agent.run("What is 6 times 7?", memory=memory)) == "It is 42."
    await agent.run("What did I ask?", memory=memory)
    assert "Observation: 42" in everything(llm.calls[1])
    seen = everything(llm.calls[-1])
    assert "called Maya" in seen
    assert "It is 42." in seen
    kept = await memory.aget_all()
    assert roles(kept) == ["user", "assistant", "user", "assistant"]
    assert texts(kept)[0] == "What is 6 times 7?"


async def test_a_code_act_agent_stores_code_and_results(memory: TieredMemory) -> None:
    ran: list[str] = []

    async def execute(code: str) -> str:
        ran.append(code)
        return "42"

    llm = ScriptedLLM(["<execute>print(6 * 7)</execute>", "It is 42."])
    agent = CodeActAgent(code_execute_fn=execute, llm=llm, tools=[multiply])
    await agent.run("What is 6 times 7?", memory=memory)
    assert ran == ["print(6 * 7)"]
    kept = await memory.aget_all()
    assert roles(kept) == ["user", "assistant", "user", "assistant"]
    assert "42" in texts(kept)[2]


@pytest.mark.parametrize("kind", ["react", "code"])
async def test_an_agent_that_replaces_the_first_system_message_sees_the_memory_in_the_user_message(kind: str) -> None:
    """LlamaIndex's ReActAgent drops the first system message and its CodeActAgent writes over it, whoever's it is.

    With `insert_method="user"` the memory does not stand there.
    """
    seen = {}
    for method in ("system", "user"):
        llm = ScriptedLLM(["Thought: I can answer without using any more tools.\nAnswer: Hello."])
        memory = TieredMemory(
            session_id="s", insert_method=method, memory_blocks=[StaticMemoryBlock(static_content="Called Maya.")]
        )
        agent = ReActAgent(tools=[], llm=llm) if kind == "react" else CodeActAgent(code_execute_fn=print, llm=llm)
        await agent.run("Hi", memory=memory)
        seen[method] = "Called Maya." in everything(llm.calls[0])
        await memory.aclose()
    assert seen == {"system": False, "user": True}


# --- several agents --------------------------------------------------------------------------------------------


async def test_two_agents_hand_over_and_share_the_memory(memory: TieredMemory) -> None:
    asks = ScriptedFunctionCallingLLM(
        [ToolCall("handoff", {"to_agent": "counter", "reason": "arithmetic"}), "I greet you again."]
    )
    counts = ScriptedFunctionCallingLLM([ToolCall("multiply", {"a": 6, "b": 7}), "It is 42."])
    greeter = FunctionAgent(name="greeter", description="Greets.", llm=asks, can_handoff_to=["counter"])
    counter = FunctionAgent(
        name="counter", description="Counts.", llm=counts, tools=[multiply], can_handoff_to=["greeter"]
    )
    workflow = AgentWorkflow(agents=[greeter, counter], root_agent="greeter")
    result = await workflow.run("What is 6 times 7?", memory=memory)
    assert str(result) == "It is 42."
    assert result.current_agent_name == "counter"
    for call in counts.calls:
        assert "What is 6 times 7?" in everything(call)
        assert "called Maya" in everything(call)
        assert no_result_without_its_call(call)
    kept = await memory.aget_all()
    assert kept[0].content == "What is 6 times 7?"
    assert kept[-1].content == "It is 42."
    assert no_result_without_its_call(kept)


async def test_agents_of_one_user_learn_from_each_others_sessions() -> None:
    async with Storage() as storage:
        blocks = [VectorMemoryBlock(embed_model=None)]
        first = TieredMemory(storage=storage, user_id="maya", session_id="a", agent_id="clerk", memory_blocks=blocks)
        await FunctionAgent(tools=[multiply], llm=ScriptedFunctionCallingLLM(["Noted."])).run(
            "My boat is called Petrel.", memory=first
        )
        await first.aflush()
        second = TieredMemory(storage=storage, user_id="maya", session_id="b", agent_id="guide", memory_blocks=blocks)
        result = await FunctionAgent(tools=[multiply], llm=QuotingLLM()).run("What is my boat called?", memory=second)
        assert "Petrel" in str(result)
        await first.aclose()
        await second.aclose()


# --- restarts --------------------------------------------------------------------------------------------------


async def test_after_restarts_the_agent_still_knows_its_user_and_nobody_elses(tmp_path: Path) -> None:
    async def run(who: str, session: str, text: str) -> str:
        """Everything anew, as in another process."""
        memory = TieredMemory(
            storage=tmp_path / "memory.db",
            user_id=who,
            session_id=session,
            memory_blocks=[VectorMemoryBlock(embed_model=None)],
        )
        result = await FunctionAgent(tools=[multiply], llm=QuotingLLM()).run(text, memory=memory)
        await memory.aclose()
        return str(result)

    await run("maya", "monday", "My sister Ines keeps bees in Porto.")
    await run("maya", "tuesday", "My brother Rui repairs clocks in Braga.")
    assert "Porto" in await run("maya", "wednesday", "Where does my sister Ines keep bees?")
    assert "Braga" in await run("maya", "thursday", "Where does my brother Rui repair clocks?")
    for text in ("Where does my sister Ines keep bees?", "Where does my brother Rui repair clocks?"):
        assert await run("ben", "wednesday", text) == "I don't know."


async def test_a_session_goes_on_where_it_ended(tmp_path: Path) -> None:
    llm = ScriptedFunctionCallingLLM(["One.", "Two."])
    for text in ("first", "second"):
        async with TieredMemory(storage=tmp_path / "memory.db", session_id="chat-1") as memory:
            await FunctionAgent(tools=[multiply], llm=llm).run(text, memory=memory)
    assert texts(llm.calls[-1]) == ["first", "One.", "second"]


# --- budgets ---------------------------------------------------------------------------------------------------


async def test_a_long_chat_with_tools_stays_within_its_budget_and_in_order() -> None:
    memory = TieredMemory(
        user_id="maya",
        session_id="long",
        token_limit=300,
        reserve_tokens=50,
        memory_blocks=[VectorMemoryBlock(embed_model=None)],
    )

    def reply(messages: Sequence[ChatMessage]) -> str | ToolCall:
        if messages[-1].role == MessageRole.USER:
            return ToolCall("multiply", {"a": 6, "b": 7})
        return "It is 42. " + "And so on. " * 5

    llm = ScriptedFunctionCallingLLM(reply)
    agent = FunctionAgent(tools=[multiply], llm=llm)
    for number in range(12):
        await agent.run(f"Question {number}: what is 6 times 7? " + "please " * 10, memory=memory)
        assert sum(map(memory._estimate_token_count, await memory.aget())) <= 250
    assert all(no_result_without_its_call(call) for call in llm.calls)
    assert len(await memory.aget_all()) == 12 * 4
    assert len(await memory.aget_all(MessageStatus.ARCHIVED)) > 0
    await memory.aclose()


# --- combinations with LlamaIndex's own parts ------------------------------------------------------------------


async def test_our_blocks_and_our_store_work_in_llamaindexs_own_memory() -> None:
    vector = VectorMemoryBlock(embed_model=None, similarity_top_k=1)
    store = TieredChatStore()
    memory = Memory.from_defaults(
        session_id="s",
        token_limit=120,
        chat_history_token_ratio=0.5,
        token_flush_size=30,
        chat_store=store,
        memory_blocks=[StaticMemoryBlock(static_content="Maya.", priority=0), vector],
    )
    agent = FunctionAgent(tools=[multiply], llm=ScriptedFunctionCallingLLM(lambda _: "I see. " * 8))
    await agent.run("My boat is called Petrel.", memory=memory)
    for number in range(6):
        await agent.run(f"Filler {number} " + "w " * 20, memory=memory)
    assert "Petrel" in everything(await memory.aget("What is my boat called?"))
    await vector.aclose()
    await store.aclose()


# --- chat engines ----------------------------------------------------------------------------------------------


class OneNode(BaseRetriever):
    """Finds the same text whatever is asked."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text="The harbour opens at six."), score=1.0)]


def simple(llm: ScriptedLLM, memory: TieredMemory) -> BaseChatEngine:
    return SimpleChatEngine.from_defaults(llm=llm, memory=memory)


def context(llm: ScriptedLLM, memory: TieredMemory) -> BaseChatEngine:
    return ContextChatEngine.from_defaults(
        retriever=OneNode(callback_manager=CallbackManager()), llm=llm, memory=memory
    )


def condense(llm: ScriptedLLM, memory: TieredMemory) -> BaseChatEngine:
    return CondensePlusContextChatEngine.from_defaults(
        retriever=OneNode(callback_manager=CallbackManager()), llm=llm, memory=memory
    )


Engine = Callable[[ScriptedLLM, TieredMemory], BaseChatEngine]
engines = pytest.mark.parametrize("engine", [simple, context, condense])


def echo(messages: Sequence[ChatMessage]) -> str:
    newest = [message for message in messages if message.role == MessageRole.USER][-1]
    return f"You said {(newest.content or '').splitlines()[-1]}"


@pytest.fixture
def made() -> Any:
    """Makes memories for the engines and closes them from synchronous code."""
    memories: list[TieredMemory] = []
    loop = asyncio.new_event_loop()  # LlamaIndex's engines ask for one, and leave open what they get
    asyncio.set_event_loop(loop)

    def new() -> TieredMemory:
        memories.append(
            TieredMemory(session_id="s", memory_blocks=[StaticMemoryBlock(static_content="The user is called Maya.")])
        )
        return memories[-1]

    yield new
    for memory in memories:
        memory.close()
    asyncio.set_event_loop(None)
    loop.close()


def wait_for(count: int, memory: TieredMemory) -> list[ChatMessage]:
    """The history is written by a thread of the engine when the stream is read to its end."""
    until = time.monotonic() + 20
    while len(memory.get_all()) < count and time.monotonic() < until:
        time.sleep(0.01)
    return memory.get_all()


@engines
def test_a_chat_engine_talks_in_sync(engine: Engine, made: Any) -> None:
    llm, memory = ScriptedLLM(echo), made()
    chat = engine(llm, memory)
    chat.chat("one")
    chat.chat("two")
    kept = memory.get_all()
    assert roles(kept) == ["user", "assistant"] * 2
    assert texts(kept)[0] == "one"
    assert texts(kept)[2] == "two"
    assert "called Maya" in everything(llm.calls[-1])
    assert "one" in everything(llm.calls[-1])
    assert roles(chat.chat_history) == roles(kept)
    chat.chat("three", chat_history=[])
    assert texts(memory.get_all(MessageStatus.ACTIVE))[0] == "three"
    chat.reset()
    assert memory.get_all() == []


@engines
def test_a_chat_engine_streams_in_sync(engine: Engine, made: Any) -> None:
    memory = made()
    chat = engine(ScriptedLLM(echo), memory)
    for number, text in enumerate(("one", "two"), 1):
        response = chat.stream_chat(text)
        said = "".join(response.response_gen)
        kept = wait_for(2 * number, memory)
        assert roles(kept) == ["user", "assistant"] * number
        assert kept[-1].content == said
        assert kept[-2].content == text


@engines
async def test_a_chat_engine_talks_and_streams_on_a_loop(engine: Engine) -> None:
    memory = TieredMemory(session_id="s", memory_blocks=[StaticMemoryBlock(static_content="The user is called Maya.")])
    llm = ScriptedLLM(echo)
    chat = engine(llm, memory)
    await chat.achat("one")
    response = await chat.astream_chat("two")
    said = "".join([piece async for piece in response.async_response_gen()])
    for _ in range(1000):
        if len(await memory.aget_all()) == 4:
            break
        await asyncio.sleep(0.01)
    kept = await memory.aget_all()
    assert roles(kept) == ["user", "assistant"] * 2
    assert kept[-1].content == said
    assert "called Maya" in everything(llm.calls[-1])
    assert "one" in everything(llm.calls[-1])
    await memory.aclose()


def test_the_prompt_of_a_context_engine_leaves_room_for_its_retrieved_text(made: Any) -> None:
    llm = ScriptedLLM(echo)
    memory = TieredMemory(session_id="s", token_limit=120, tokenizer_fn=str.split)
    chat = context(llm, memory)
    for number in range(12):
        chat.chat(f"question {number} " + "w " * 10)
    kept = llm.calls[-1]
    system = [message for message in kept if message.role == MessageRole.SYSTEM]
    assert "harbour opens" in everything(system)
    shown = [message for message in kept[:-1] if message.role != MessageRole.SYSTEM]
    assert 0 < sum(len(text.split()) for text in texts(shown)) <= 120
    memory.close()
