"""The models that we ship for tests and demos behave like models, with LlamaIndex's real agents."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, TextBlock
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from pydantic import ValidationError

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.sample import load_questions
from llama_index_memory_tiers.testing import (
    DEFAULT_TOOL_RULES,
    HashEmbedding,
    QuotingLLM,
    ScriptedFunctionCallingLLM,
    ScriptedLLM,
    ToolCall,
    ToolRule,
    WordLlamaEmbedding,
)
from llama_index_memory_tiers.testing.models.asking import asks

# Building an agent makes LlamaIndex's workflows read every attribute of it, pydantic's deprecated ones too.
builds_agents = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")

USER = [ChatMessage(content="hi")]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def calculator(expression: str) -> str:
    """Evaluate an expression."""
    return f"{expression} is easy"


def time_in(city: str) -> str:
    """Tell the time in a city."""
    return f"It is noon in {city}."


MULTIPLY, CALCULATOR, TIME = (FunctionTool.from_defaults(fn) for fn in (multiply, calculator, time_in))


# --- scripted ---


async def test_each_way_to_call_takes_the_next_step_of_the_script() -> None:
    llm = ScriptedLLM([f"answer {n}" for n in range(8)])
    got = [
        llm.chat(USER).message.content,
        (await llm.achat(USER)).message.content,
        [r.message.content for r in llm.stream_chat(USER)][-1],
        [r.message.content async for r in await llm.astream_chat(USER)][-1],
        llm.complete("hi").text,
        (await llm.acomplete("hi")).text,
        [r.text for r in llm.stream_complete("hi")][-1],
        [r.text async for r in await llm.astream_complete("hi")][-1],
    ]
    assert got == [f"answer {n}" for n in range(8)]
    assert [[m.content for m in call] for call in llm.calls] == [["hi"]] * 8


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=40))
def test_the_pieces_of_a_stream_add_up_to_the_answer(text: str) -> None:
    pieces = list(ScriptedLLM([text]).stream_chat(USER))
    assert "".join(piece.delta or "" for piece in pieces) == text
    assert (pieces[-1].message.content or "") == text


def test_a_step_is_text_a_message_an_exception_or_a_function_of_the_messages() -> None:
    whole = ChatMessage(role="assistant", content="whole")
    llm = ScriptedLLM(["text", whole, TimeoutError("slow"), lambda messages: f"{len(messages)} seen"])
    assert llm.chat(USER).message.content == "text"
    assert llm.chat(USER).message == whole
    with pytest.raises(TimeoutError, match="slow"):
        llm.chat(USER)
    assert llm.chat(USER * 3).message.content == "3 seen"


def test_a_function_as_script_answers_every_call() -> None:
    llm = ScriptedLLM(lambda messages: (messages[-1].content or "").upper())
    assert [llm.complete(text).text for text in ("a", "b", "c")] == ["A", "B", "C"]


def test_a_script_that_has_run_out_says_which_call_found_it_empty() -> None:
    llm = ScriptedLLM(["only"])
    llm.complete("x")
    with pytest.raises(ConfigurationError, match=r"Call 2 .* 1 steps"):
        llm.complete("x")


def test_recorded_calls_do_not_follow_later_changes() -> None:
    llm, message = ScriptedLLM(["a"]), ChatMessage(content="before")
    llm.chat([message])
    message.blocks = [TextBlock(text="after")]
    assert llm.calls[0][0].content == "before"


def test_threads_share_a_script_without_taking_a_step_twice() -> None:
    llm = ScriptedLLM([str(n) for n in range(200)])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: llm.complete("x").text, range(200)))
    assert sorted(answers, key=int) == [str(n) for n in range(200)]
    assert len(llm.calls) == 200


@builds_agents
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_scripted_model_calls_tools_in_a_real_function_agent(streaming: bool) -> None:
    llm = ScriptedFunctionCallingLLM([ToolCall("multiply", {"a": 17, "b": 23}), "It is 391."])
    agent = FunctionAgent(llm=llm, tools=[MULTIPLY], streaming=streaming)
    handler = agent.run("17 * 23?")
    events = [event async for event in handler.stream_events()]
    response = await handler
    results = [event for event in events if isinstance(event, ToolCallResult)]
    assert str(response) == "It is 391."
    assert [result.tool_output.content for result in results] == ["391"]
    assert any(isinstance(event, AgentStream) for event in events) == streaming
    assert [message.role.value for message in llm.calls[1]] == ["user", "assistant", "tool"]


@builds_agents
async def test_parallel_calls_have_ids_of_their_own_and_given_ids_stay() -> None:
    calls = [ToolCall("multiply", {"a": 2, "b": n}, id="mine" if n == 0 else None) for n in range(3)]
    llm = ScriptedFunctionCallingLLM([calls, "done"])
    await FunctionAgent(llm=llm, tools=[MULTIPLY]).run("go")
    ids = [message.additional_kwargs["tool_call_id"] for message in llm.calls[1] if message.role == MessageRole.TOOL]
    assert "mine" in ids  # the agent runs them at once: results come in any order
    assert len(set(ids)) == 3


@builds_agents
async def test_a_scripted_model_hands_over_in_a_real_agent_workflow() -> None:
    first = ScriptedFunctionCallingLLM([ToolCall("handoff", {"to_agent": "second", "reason": "numbers"})])
    second = ScriptedFunctionCallingLLM([ToolCall("multiply", {"a": 3, "b": 4}), "Twelve."])
    workflow = AgentWorkflow(
        agents=[
            FunctionAgent(name="first", description="talks", llm=first, tools=[], can_handoff_to=["second"]),
            FunctionAgent(name="second", description="counts", llm=second, tools=[MULTIPLY]),
        ],
        root_agent="first",
    )
    assert str(await workflow.run("3 times 4?")) == "Twelve."


@builds_agents
@pytest.mark.filterwarnings("ignore:is_running called from within a step")  # LlamaIndex's own loop asks that
async def test_a_scripted_model_without_tools_serves_a_react_agent() -> None:
    llm = ScriptedLLM(
        [
            'Thought: I need a tool.\nAction: multiply\nAction Input: {"a": 6, "b": 7}',
            "Thought: I can answer without using any more tools.\nAnswer: 42",
        ]
    )
    assert not llm.metadata.is_function_calling_model
    assert str(await ReActAgent(llm=llm, tools=[MULTIPLY]).run("6 * 7?")) == "42"


def test_predict_and_call_works_and_a_missing_call_is_an_error() -> None:
    llm = ScriptedFunctionCallingLLM([ToolCall("multiply", {"a": 6, "b": 7})])
    assert llm.predict_and_call([MULTIPLY], user_msg="6 * 7").response == "42"
    none = ChatResponse(message=ChatMessage(role="assistant", content="no"))
    assert llm.get_tool_calls_from_response(none, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="calls no tool"):
        llm.get_tool_calls_from_response(none)


# --- quoting ---

MEMORY = """You are a helpful assistant.

<memory>
<profile>
The user is called Logan &amp; likes tea &lt;black&gt;.
</profile>
<recalled>
<8 May 2023>
Logan: My cat Tom is allergic to fish.
Assistant: I will keep fish away from the cat!
Logan: What is Tom allergic to?
<2 June 2023>
Logan: We moved to Saskatoon last week.
  The new flat has a balcony.
Logan: 我的女儿小雨在学大提琴。
<message role='user'>The boiler is called &lt;Bertha&gt;
  and hums at night.</message>
<message role='assistant'>I don't know.</message>
</recalled>
</memory>"""


def _ask(question: str, *context: ChatMessage, **kwargs: object) -> str:
    return QuotingLLM(**kwargs).chat([*context, ChatMessage(content=question)]).message.content or ""


REMEMBERS = ChatMessage(role="system", content=MEMORY)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is Tom allergic to?", "Logan: My cat Tom is allergic to fish. (8 May 2023)"),
        (
            "Which city did we move to?",
            "Logan: We moved to Saskatoon last week. The new flat has a balcony. (2 June 2023)",
        ),
        ("Is there a balcony?", "Logan: We moved to Saskatoon last week. The new flat has a balcony. (2 June 2023)"),
        ("Which tea does Logan like?", "The user is called Logan & likes tea <black>."),
        ("What is the boiler called?", "The boiler is called <Bertha> and hums at night. (2 June 2023)"),
        ("小雨在学什么乐器？", "Logan: 我的女儿小雨在学大提琴。 (2 June 2023)"),
    ],
)
def test_it_quotes_the_line_that_answers(question: str, answer: str) -> None:
    assert _ask(question, REMEMBERS) == answer


@pytest.mark.parametrize("question", ["Who painted the ceiling?", "火车几点出发？", "?", "", "🐈"])
def test_it_does_not_know_what_it_was_not_given(question: str) -> None:
    assert _ask(question, REMEMBERS) == "I don't know."


@pytest.mark.parametrize(
    "text",
    [
        "My dog is called Rex.", "my name is Logan", "When I was young, I lived in Rome.", "I moved. Then I slept!",
        "You never tell me anything.", "我的狗叫小黑。", "请记住：我住在杭州", "我不知道为什么。", "17 * 23 is a sum.",
    ],
)  # fmt: skip
def test_what_only_states_something_is_noted(text: str) -> None:
    assert _ask(text, REMEMBERS) == "Noted."


@pytest.mark.parametrize(
    "text",
    [
        "My dog is Rex. What is my cat called?", "what is tom allergic to", "Tell me what Tom is allergic to.",
        "Can you name my cat", "ok, and where does she live", "小雨在学什么", "告诉我小雨在学什么。", "小雨学琴吗",
    ],
)  # fmt: skip
def test_what_asks_is_never_noted(text: str) -> None:
    assert _ask(text, REMEMBERS) != "Noted."
    assert _ask(text) == "I don't know."


def test_every_question_of_the_sample_chats_is_taken_for_one() -> None:
    assert [question.question for question in load_questions() if not asks(question.question)] == []


def test_its_own_note_is_not_quoted() -> None:
    history = [ChatMessage(content="My dog is Rex."), ChatMessage(role="assistant", content="Noted.")]
    assert _ask("What was noted?", *history) == "I don't know."


def test_without_memory_it_does_not_know() -> None:
    assert _ask("What is Tom allergic to?") == "I don't know."
    assert _ask("What is Tom allergic to?", ChatMessage(role="system", content="You help Logan.")) == "I don't know."


def test_it_quotes_earlier_messages_and_the_newest_of_two_that_fit_alike() -> None:
    history = [ChatMessage(content=f"My favourite colour is {colour}.") for colour in ("teal", "pink")]
    assert _ask("What is my favourite colour?", *history) == "My favourite colour is pink."


def test_it_quotes_neither_a_question_nor_its_own_ignorance() -> None:
    history = [
        ChatMessage(content="What is Tom allergic to?"),
        ChatMessage(role="assistant", content="I don't know."),
        ChatMessage(content="汤姆对什么过敏？"),
    ]
    assert _ask("What is Tom allergic to?", *history) == "I don't know."
    assert _ask("汤姆对什么过敏？", *history) == "I don't know."


def test_memory_inside_the_newest_user_message_is_context_and_the_rest_is_the_question() -> None:
    section = re.search(r"<memory>.*</memory>", MEMORY, re.DOTALL)
    assert section is not None
    assert _ask(f"{section[0]}\nWhat is Tom allergic to?").startswith("Logan: My cat Tom is allergic to fish.")


def test_of_a_long_message_it_quotes_the_sentence_that_fits_and_what_follows() -> None:
    filler = "The weather was fine and Dr. Smith came for a walk with us. " * 10
    message = ChatMessage(content=f"{filler}We named the boat Calypso. She is blue. {filler}")
    answer = _ask("What did we name the boat?", message, max_quote_chars=60)
    assert answer == "We named the boat Calypso. She is blue."


def test_it_asks_a_higher_share_of_the_question_when_told_to() -> None:
    history = ChatMessage(content="The boat is blue.")
    assert _ask("Which harbour is the boat in?", history, threshold=0.2) == "The boat is blue."
    assert _ask("Which harbour is the boat in?", history, threshold=0.9) == "I don't know."


@pytest.mark.parametrize(
    ("text", "tool", "kwargs"),
    [
        ("What is 17 * 23?", MULTIPLY, {"a": 17, "b": 23}),
        ("请算一下17×23", MULTIPLY, {"a": 17, "b": 23}),
        ("What is 17 * 23 + 4.5?", CALCULATOR, {"expression": "17 * 23 + 4.5"}),
        ("What time is it in New York?", TIME, {"city": "New York"}),
        ("Tell me the current time in Tokyo, please.", TIME, {"city": "Tokyo"}),
        ("请问东京现在几点？", TIME, {"city": "东京"}),
    ],
)
def test_it_calls_the_tool_that_was_asked_for(text: str, tool: FunctionTool, kwargs: dict[str, object]) -> None:
    llm = QuotingLLM()
    response = llm.chat_with_tools([TIME, MULTIPLY, CALCULATOR] if tool is TIME else [tool], user_msg=text)
    [call] = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == (tool.metadata.name, kwargs)


@pytest.mark.parametrize(
    "text",
    [
        "We met on 2023-05-08.",
        "The shop is open 24/7.",
        "Last time in Paris was fun.",
        "Pages 3-5, please.",
        "BK-48213",
    ],
)
def test_it_calls_no_tool_for_what_only_looks_like_a_request(text: str) -> None:
    llm = QuotingLLM()
    response = llm.chat_with_tools([MULTIPLY, CALCULATOR, TIME], user_msg=text)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []


def test_it_calls_only_tools_that_were_offered_and_whose_parameters_fit() -> None:
    llm = QuotingLLM()
    for tools in ([], [TIME], [FunctionTool.from_defaults(lambda: 1, name="multiply")]):
        response = llm.chat_with_tools(tools, user_msg="17 * 23?")
        assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []


@builds_agents
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_real_agent_answers_with_the_result_of_the_tool_and_then_from_memory(streaming: bool) -> None:
    agent = FunctionAgent(llm=QuotingLLM(), tools=[MULTIPLY, TIME], streaming=streaming)
    memory = ChatMemoryBuffer.from_defaults(token_limit=4000)
    assert str(await agent.run("What is 17 * 23?", memory=memory)) == "391"
    await agent.run("My cat Tom is allergic to fish.", memory=memory)
    assert str(await agent.run("What is Tom allergic to?", memory=memory)) == "My cat Tom is allergic to fish."


@pytest.mark.parametrize("pattern", [re.compile, str])
def test_rules_of_the_user_are_used(pattern: Any) -> None:
    rule = ToolRule(pattern("^multiply$"), pattern(r"double (\d+)"), lambda m, _: {"a": int(m[1]), "b": 2})
    llm = QuotingLLM(rules=[rule, *DEFAULT_TOOL_RULES])
    assert llm.predict_and_call([MULTIPLY], user_msg="Please double 21.").response == "42"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=30), max_size=4), st.text(max_size=30))
def test_any_text_gets_an_answer_made_of_the_context(lines: list[str], question: str) -> None:
    context = [ChatMessage(content=line) for line in lines]
    answer = _ask(question, *context)
    assert answer in {"I don't know.", "Noted."} or any(answer in line or answer in line.strip() for line in lines)


# --- embedding ---


def _cosine(one: list[float], two: list[float]) -> float:
    return sum(a * b for a, b in zip(one, two, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=60), st.integers(2, 300))
def test_an_embedding_has_unit_length_and_the_wanted_dimensions(text: str, dims: int) -> None:
    vector = HashEmbedding(dims=dims).get_text_embedding(text)
    assert len(vector) == dims
    assert math.isclose(sum(number * number for number in vector), 1.0, rel_tol=1e-9)


async def test_embeddings_are_equal_by_word_stems_whichever_way_they_are_asked_for() -> None:
    model = HashEmbedding()
    one = model.get_text_embedding("The cats are running")
    assert len(one) == 128
    assert one == model.get_query_embedding("a CAT runs") == await model.aget_text_embedding("cat run")
    assert one == await model.aget_query_embedding("cats, running!") == model.get_text_embedding_batch(["cat runs"])[0]


@pytest.mark.parametrize(
    "make", [HashEmbedding, QuotingLLM, WordLlamaEmbedding, ScriptedLLM, ScriptedFunctionCallingLLM]
)
def test_a_misspelt_name_is_no_silent_default(make: Any) -> None:
    with pytest.raises(ValidationError, match="dimensions"):
        make(dimensions=32)


def test_texts_that_share_words_are_nearer_than_texts_that_do_not() -> None:
    model = HashEmbedding()
    cat, fish, train = map(
        model.get_text_embedding, ("my cat eats fish", "which fish does the cat eat", "the train leaves at noon")
    )
    assert _cosine(cat, fish) > 0.9
    assert abs(_cosine(cat, train)) < 0.5


def test_an_embedding_is_the_same_in_every_process() -> None:
    assert [round(number, 3) for number in HashEmbedding(dims=8).get_text_embedding("my cat 猫")] == [
        0.0,
        0.707,
        0.0,
        0.0,
        -0.707,
        0.0,
        0.0,
        0.0,
    ]
