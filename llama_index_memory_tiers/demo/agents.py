"""An agent with two tools, its model, and what it was given."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from importlib import import_module
from importlib.util import find_spec
from operator import add, mul, sub, truediv
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from llama_index.core.agent.workflow import AgentInput, FunctionAgent
from llama_index.core.agent.workflow import ToolCallResult as AgentToolResult
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool

from llama_index_memory_tiers.chats import ChatTurn
from llama_index_memory_tiers.errors import ConfigurationError, MissingExtraError
from llama_index_memory_tiers.testing import QuotingLLM, WordLlamaEmbedding

# --- models -----------------------------------------------------------------------------------------------------


def make_llm(address: str | None) -> FunctionCallingLLM:
    """The model that all contenders share.

    Args:
        address: Of an OpenAI-compatible server, such as `http://localhost:8000/v1#model-name`; `None` is the
            keyless model that quotes. The key is read from OPENAI_API_KEY, the model's name also from
            OPENAI_MODEL.

    Returns:
        The model.

    Raises:
        MissingExtraError: An address was given, but LlamaIndex's client is not installed.
        ConfigurationError: It is no address.
    """
    if address is None:
        return QuotingLLM()
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigurationError(
            f"--llm={shown_address(address)!r} was given.",
            allowed="It is the address of an OpenAI-compatible server.",
            remedy="Write --llm http://localhost:8000/v1#model-name, or make demo LLM=http://localhost:8000/v1#model-name.",
        )
    try:
        client = import_module("llama_index.llms.openai_like")
    except ImportError:
        raise MissingExtraError(
            f"--llm={shown_address(address)!r} was given, but its client is not installed.",
            allowed="OpenAI-compatible servers are reached through llama-index-llms-openai-like.",
            remedy=f"Run: {sys.executable} -m pip install llama-index-llms-openai-like",
        ) from None
    made: FunctionCallingLLM = client.OpenAILike(
        model=parts.fragment or os.environ.get("OPENAI_MODEL", "default"),
        api_base=urlunsplit(parts._replace(fragment="")),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0.0,
    )
    return made


def shown_address(address: str) -> str:
    """An address without name, password and query: those may be secrets."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", parts.fragment))


def make_embedding() -> BaseEmbedding | None:
    """The embedding model, or `None` when wordllama is not installed: recall is BM25 alone then."""
    return WordLlamaEmbedding() if find_spec("wordllama") is not None else None


# --- tools ------------------------------------------------------------------------------------------------------

TimeRule = Callable[[str], datetime | None]
"""From the name of a place to the time there; `None` when the place is unknown."""

_TOOL_TURN = re.compile(
    r"What is -?[\d.]+(?: [*+/-] -?[\d.]+)+\?|What time is it in [\w ]+\?"
    r"|-?[\d.]+(?: [*+/-] -?[\d.]+)+ ?等于多少？|[\u4e00-\u9fff]{2,8}现在几点？"
)
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
}
_HOURS = {"lisbon": 0, "里斯本": 0, "oslo": 1, "奥斯陆": 1, "rotterdam": 1, "utrecht": 1}
_ASIA = {"hangzhou": 8, "杭州": 8, "beijing": 8, "北京": 8}


def wants_tool(line: ChatTurn) -> bool:
    """Whether somebody asks for one of the tools: then the agent really runs."""
    return line.role == "user" and _TOOL_TURN.fullmatch(line.text.strip()) is not None


def place_time(now: datetime) -> TimeRule:
    """The time in a few places, without a time zone database, which small machines lack.

    Args:
        now: The time, aware.

    Returns:
        The rule.
    """

    def there(place: str) -> datetime | None:
        name = place.strip().casefold()
        if name in _ASIA:
            return now.astimezone(timezone(timedelta(hours=_ASIA[name])))
        if name not in _HOURS:
            return None
        hours = _HOURS[name] + _european_summer(now.astimezone(timezone.utc))
        return now.astimezone(timezone(timedelta(hours=hours)))

    return there


def _european_summer(now: datetime) -> bool:
    """From the last Sunday of March to the last of October, at 01:00 UTC."""

    def last_sunday(month: int) -> datetime:
        last = datetime(now.year, month, 31, 1, tzinfo=timezone.utc)
        return last - timedelta(days=(last.weekday() + 1) % 7)

    return last_sunday(3) <= now < last_sunday(10)


def calculate(expression: str) -> str:
    """Work out a sum such as 17 * 23."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) in {int, float}:
            return float(node.value)  # type: ignore[arg-type]  # a number, as just asked
        raise ValueError(f"{expression!r:.80} is no sum.")

    try:
        return f"{expression} = {value(ast.parse(expression, mode='eval')):.12g}"
    except (SyntaxError, ZeroDivisionError, ValueError) as error:
        return f"No result: {error}"


def make_tools(time_rule: Callable[[], TimeRule]) -> list[Callable[..., str]]:
    """The agent's tools.

    Args:
        time_rule: Gives the rule for this moment.

    Returns:
        A calculator and a clock.
    """

    def time_in(place: str) -> str:
        """Tell the time in a place."""
        there = time_rule()(place)
        return f"{there:%H:%M} in {place}" if there is not None else f"There is no clock for {place}."

    return [calculate, time_in]


# --- an agent and what it was given -----------------------------------------------------------------------------


@dataclass(slots=True)
class Clock:
    """The time in the chat's world.

    Args:
        now: Aware.
    """

    now: datetime = field(default_factory=lambda: datetime(2025, 1, 1, tzinfo=timezone.utc))

    def __call__(self) -> datetime:
        """The time."""
        return self.now


@dataclass(frozen=True, slots=True)
class Heard:
    """One run of an agent.

    Args:
        context: The messages that the memory gave to the model at first.
        reply: What the agent said.
        tools: Names of the tools that ran.
    """

    context: tuple[ChatMessage, ...]
    reply: str
    tools: tuple[str, ...] = ()


def make_agent(llm: FunctionCallingLLM, clock: Clock) -> FunctionAgent:
    """An agent with a calculator and a clock; it has no system prompt, so all it is given comes from its memory."""
    tools: list[Any] = [FunctionTool.from_defaults(fn=tool) for tool in make_tools(lambda: place_time(clock.now))]
    return FunctionAgent(tools=tools, llm=llm)


async def run_agent(agent: FunctionAgent, memory: Memory | None, text: str) -> Heard:
    """Run an agent and note what its model was given."""
    context: tuple[ChatMessage, ...] | None = None
    tools: list[str] = []
    handler = agent.run(text, memory=memory)
    async for event in handler.stream_events():
        if isinstance(event, AgentInput) and context is None:
            context = tuple(event.input)
        elif isinstance(event, AgentToolResult):
            tools.append(event.tool_name)
    result: Any = await handler
    return Heard(context or (), result.response.content or "", tuple(tools))


async def replay(
    lines: Sequence[ChatTurn],
    agent: FunctionAgent,
    memory: Memory,
    clock: Clock,
    put: Callable[[ChatTurn], Any],
) -> list[str]:
    """Live through one session: what was said is put, what asks for a tool is really run.

    Args:
        lines: The session.
        agent: Answers the tool turns.
        memory: Of the session.
        clock: Follows the chat.
        put: Stores one message.

    Returns:
        The tools that ran.
    """
    tools: list[str] = []
    put_ids = {line.id for line in put_lines(lines)}
    for line in lines:
        clock.now = max(clock.now, line.said_at)
        if line.id in put_ids:
            await put(line)
        elif wants_tool(line):
            tools += (await run_agent(agent, memory, line.text)).tools
    return tools


def put_lines(lines: Sequence[ChatTurn]) -> list[ChatTurn]:
    """What is put as it was said: all but the turns that ask for a tool, in which the agent answers itself."""
    found: list[ChatTurn] = []
    asked = False
    for line in lines:
        told_by_agent = asked and line.role == "assistant"
        asked = wants_tool(line)
        if not asked and not told_by_agent:
            found.append(line)
    return found


def as_message(line: ChatTurn) -> ChatMessage:
    """A line as LlamaIndex's message."""
    return ChatMessage(role=MessageRole(line.role), content=line.text)
