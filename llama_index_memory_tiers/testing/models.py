"""Language and embedding models that need neither key nor network."""

from __future__ import annotations

import html
import json
import math
import re
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias
from uuid import uuid4

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.tools.types import BaseTool
from pydantic import Field, PrivateAttr

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.text import analyse

_PIECE = re.compile(r"\s*\S+|\s+\Z")


def _call_id() -> str:
    return f"call_{uuid4().hex[:12]}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that a scripted model calls.

    Args:
        name: Name of the tool.
        kwargs: Its arguments.
        id: Id of the call; `None` (the default) lets the model make one.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


_Answer: TypeAlias = "str | ChatMessage | ToolCall | Sequence[ToolCall]"
_Step: TypeAlias = "_Answer | Exception | Callable[[Sequence[ChatMessage]], _Answer]"


class _Answering(LLM):
    """Every way to call a model leads to `_reply`, which sees the messages and the tools."""

    @abstractmethod
    def _reply(self, messages: Sequence[ChatMessage], tools: Sequence[BaseTool]) -> ChatMessage:
        """Answer."""

    @property
    def metadata(self) -> LLMMetadata:
        """Name and abilities, as LlamaIndex asks for them."""
        return LLMMetadata(
            is_chat_model=True,
            is_function_calling_model=isinstance(self, FunctionCallingLLM),
            model_name=type(self).__name__,
        )

    def _respond(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> ChatResponse:
        message = self._reply(messages, kwargs.get("tools") or ())
        return ChatResponse(message=message, raw={"model": type(self).__name__}, delta=message.content or "")

    def _complete(self, prompt: str) -> CompletionResponse:
        text = self._reply([ChatMessage(content=prompt)], ()).content or ""
        return CompletionResponse(text=text, delta=text)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return self._respond(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return self._respond(messages, kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages, word by word; a tool call comes with the last piece."""
        return _chunks(self._respond(messages, kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer messages, word by word; a tool call comes with the last piece."""
        return _awaited(_chunks(self._respond(messages, kwargs)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt, which counts as one user message."""
        return self._complete(prompt)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt, which counts as one user message."""
        return self._complete(prompt)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:  # noqa: ARG002
        """Answer a prompt, word by word."""
        return _text_chunks(self._complete(prompt))

    @llm_completion_callback()
    async def astream_complete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002 -- LlamaIndex's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> CompletionResponseAsyncGen:
        """Answer a prompt, word by word."""
        return _awaited(_text_chunks(self._complete(prompt)))


def _chunks(whole: ChatResponse) -> Generator[ChatResponse, None, None]:
    message, text = whole.message, ""
    for piece in _PIECE.findall(message.content or ""):
        text += piece
        partial = message.model_copy(update={"blocks": [TextBlock(text=text)]})
        yield ChatResponse(message=partial, delta=piece, raw=whole.raw)
    yield ChatResponse(message=message, delta="", raw=whole.raw)


def _text_chunks(whole: CompletionResponse) -> Generator[CompletionResponse, None, None]:
    text = ""
    for piece in _PIECE.findall(whole.text):
        text += piece
        yield CompletionResponse(text=text, delta=piece)
    yield CompletionResponse(text=whole.text, delta="")


async def _awaited(pieces: Iterator[Any]) -> AsyncGenerator[Any, None]:
    for piece in pieces:
        yield piece


class _ToolCalling(_Answering, FunctionCallingLLM):
    """What LlamaIndex asks of a model that calls tools."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002 -- LlamaIndex's signature
        allow_parallel_tool_calls: bool = False,  # noqa: ARG002
        tool_required: bool = False,  # noqa: ARG002
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(content=user_msg) if isinstance(user_msg, str) else user_msg)
        return {"messages": messages, "tools": tools, **kwargs}

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ARG002 -- LlamaIndex's signature
    ) -> list[ToolSelection]:
        """Read the tool calls of an answer.

        Args:
            response: The answer.
            error_on_no_tool_call: Whether an answer without any is an error.
            kwargs: Ignored.

        Returns:
            The calls in order.

        Raises:
            ValueError: There is none, and one was wanted.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if error_on_no_tool_call and not calls:
            raise ValueError(f"The answer of {type(self).__name__} calls no tool: {response.message.content!r}.")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=json.loads(call.tool_kwargs) if isinstance(call.tool_kwargs, str) else call.tool_kwargs,
            )
            for call in calls
        ]


def _call_message(calls: Sequence[ToolCall]) -> ChatMessage:
    blocks = [
        ToolCallBlock(tool_call_id=call.id or _call_id(), tool_name=call.name, tool_kwargs=dict(call.kwargs))
        for call in calls
    ]
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)


class ScriptedLLM(_Answering):
    """Answers from a script, one step a call; calls are kept; safe to use from several threads.

    Args:
        script: The steps, each text, a whole message, an exception to raise, or a function of the messages that
            returns one of these. A single function instead of a list answers every call.
        kwargs: What LlamaIndex's `LLM` takes.
    """

    _script: Sequence[_Step] | Callable[[Sequence[ChatMessage]], _Answer] = PrivateAttr()
    _calls: list[list[ChatMessage]] = PrivateAttr(default_factory=list)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def __init__(
        self, script: Sequence[_Step] | Callable[[Sequence[ChatMessage]], _Answer] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._script = script if callable(script) else [script] if isinstance(script, str) else list(script)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return cls.__name__

    @property
    def calls(self) -> list[list[ChatMessage]]:
        """The messages of every call so far, as they were then."""
        with self._lock:
            return list(self._calls)

    def _reply(self, messages: Sequence[ChatMessage], tools: Sequence[BaseTool]) -> ChatMessage:  # noqa: ARG002
        seen = [message.model_copy(deep=True) for message in messages]
        with self._lock:
            self._calls.append(seen)
            number = len(self._calls)
        return _as_message(self._step(number), messages)

    def _step(self, number: int) -> _Step:
        if callable(self._script):
            return self._script
        if number > len(self._script):
            raise ConfigurationError(
                f"Call {number} came to a {type(self).__name__} whose script has {len(self._script)} steps.",
                allowed="Each call of the model takes one step.",
                remedy="Add steps, or pass a function of the messages, which answers every call.",
            )
        return self._script[number - 1]


def _as_message(step: _Step, messages: Sequence[ChatMessage]) -> ChatMessage:
    if isinstance(step, Exception):
        raise step
    if isinstance(step, ChatMessage):
        return step.model_copy(deep=True)
    if isinstance(step, str):
        return ChatMessage(role=MessageRole.ASSISTANT, content=step)
    if isinstance(step, ToolCall):
        return _call_message([step])
    if callable(step):
        return _as_message(step(messages), messages)
    return _call_message(step)


class ScriptedFunctionCallingLLM(ScriptedLLM, _ToolCalling):
    """A scripted model that also calls tools.

    Args:
        script: Steps as of `ScriptedLLM`; also a `ToolCall`, or a list of them for parallel calls.
        kwargs: What LlamaIndex's `LLM` takes.
    """


# --- A model that quotes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolRule:
    """When a user's words ask for a tool, and with which arguments.

    Args:
        name: Searched in the tool's name.
        regex: Searched in the newest user message.
        kwargs: From the match and the names of the tool's parameters to its arguments; `None` when they don't fit.
    """

    name: re.Pattern[str]
    regex: re.Pattern[str]
    kwargs: Callable[[re.Match[str], Sequence[str]], Mapping[str, Any] | None]


_NUMBER = r"-?\d+(?:\.\d+)?"
# Minus and slash need blanks around them: 2023-05-08 and 24/7 are no sums.
_SUM = re.compile(
    rf"(?<![A-Za-z0-9_.])(?P<a>{_NUMBER})(?P<rest>(?:\s*[*×+]\s*{_NUMBER}|\s+[-−/÷x]\s+{_NUMBER})+)(?![A-Za-z0-9_]|\.\d)"
)
_SIGNS = str.maketrans("×−÷x", "*-/*")


def _expression(match: re.Match[str], parameters: Sequence[str]) -> Mapping[str, Any] | None:
    known = ("expression", "expr", "formula", "input", "query")
    name = next((each for each in known if each in parameters), parameters[0] if len(parameters) == 1 else None)
    return None if name is None else {name: match[0].translate(_SIGNS)}


def _operands(sign: str) -> Callable[[re.Match[str], Sequence[str]], Mapping[str, Any] | None]:
    def build(match: re.Match[str], parameters: Sequence[str]) -> Mapping[str, Any] | None:
        found = re.fullmatch(rf"({_NUMBER})\s*([*/+-])\s*({_NUMBER})", match[0].translate(_SIGNS))
        if found is None or found[2] != sign or len(parameters) < 2:  # noqa: PLR2004 -- it takes two
            return None
        numbers = (float(text) if "." in text else int(text) for text in (found[1], found[3]))
        return dict(zip(parameters[:2], numbers, strict=True))

    return build


def _place(match: re.Match[str], parameters: Sequence[str]) -> Mapping[str, Any] | None:
    known = ("place", "city", "location", "timezone", "zone", "tz")
    name = next((each for each in known if each in parameters), parameters[0] if len(parameters) == 1 else None)
    return ({} if not parameters else None) if name is None else {name: match["place"].strip()}


_WHERE = (
    r"[^.?!\n]{0,40}?\s(?:in|at|for)\s+(?:the\s+)?(?P<place>[^\W\d_][\w '’/-]{0,40}?)"
    r"(?=\s*(?:[?.!,;\n]|$|\b(?:now|right now|today|please)\b))"
)
_TIME = re.compile(rf"(?i)\b(?:what|tell|current|local)\b[^.?!\n]{{0,20}}?\btime\b{_WHERE}")
_WEATHER = re.compile(rf"(?i)\b(?:what|how|tell|current)\b[^.?!\n]{{0,20}}?\b(?:weather|forecast)\b{_WHERE}")
_PLACE_ZH = "(?:请问|告诉我|现在|查一下|我想知道)*(?P<place>[\u4e00-\u9fff]{2,8}?)(?:现在|今天)?"
_TIME_ZH = re.compile(f"{_PLACE_ZH}是?(?:几点|的?时间是)")
_WEATHER_ZH = re.compile(f"{_PLACE_ZH}的?天气")

DEFAULT_TOOL_RULES: tuple[ToolRule, ...] = (
    ToolRule(re.compile("(?i)calc|math|arith|eval"), _SUM, _expression),
    ToolRule(re.compile("(?i)mul|times|product"), _SUM, _operands("*")),
    ToolRule(re.compile("(?i)add|sum|plus"), _SUM, _operands("+")),
    ToolRule(re.compile("(?i)sub|minus|difference"), _SUM, _operands("-")),
    ToolRule(re.compile("(?i)div|quotient"), _SUM, _operands("/")),
    ToolRule(re.compile("(?i)time|clock"), _TIME, _place),
    ToolRule(re.compile("(?i)time|clock"), _TIME_ZH, _place),
    ToolRule(re.compile("(?i)weather|forecast"), _WEATHER, _place),
    ToolRule(re.compile("(?i)weather|forecast"), _WEATHER_ZH, _place),
)
"""Arithmetic (`17 * 23`), the time and the weather in a place, in English and Chinese."""

UNKNOWN = "I don't know."

_MEMORY = re.compile(r"<memory>\n?(.*?)</memory>", re.DOTALL)
_TAG_LINE = re.compile(r"\s*</?[\w.-]+(?:\s[^<>]*)?>\s*")
_WRAPPED = re.compile(r"<(?P<tag>[\w.-]+)(?:\s[^<>]*)?>(?P<text>.*)</(?P=tag)>", re.DOTALL)
_DATE = re.compile(r"<(?:notes )?(\d{1,2} \w+ \d{4})>")
_SENTENCE_END = re.compile(
    r"(?<!\bDr\.)(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bSt\.)(?<=[.!?])\s+(?=[\"'“‘(]?[A-Z0-9\u00c0-\u00de])|(?<=[。！？])(?![”’」』）])\s*|\n+"
)
_QUESTION_END = re.compile(r"[?？][\"'”’)\]」』）]*\s*$")


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the context: what can be quoted, when it was said, and what it is found by."""

    text: str
    date: str
    terms: Mapping[str, int]


class QuotingLLM(_ToolCalling):
    """An honest model without a key: it calls a tool when asked to, else it quotes what it was given.

    1. After a tool's result it answers with that result.
    2. When the newest user message fits a rule and a tool of that name was offered, it calls the tool.
    3. Otherwise it quotes the line of its context (system text, memory, earlier messages) that fits the newest user
       message best by BM25, or one or more sentences of a long line, with the date under which the memory keeps it;
       or it says "I don't know." So its answer depends on what the memory put into the context, and on nothing else.
       Questions are never quoted.

    Args:
        rules: When to call a tool; `DEFAULT_TOOL_RULES` unless given.
        threshold: Share, 0 to 1, of the question's words, weighed by their rarity, that a quote must hold; 0.1.
        max_quote_chars: A longer line is cut to the sentences that fit best; 300.
    """

    rules: Sequence[ToolRule] = DEFAULT_TOOL_RULES
    threshold: float = Field(default=0.1, ge=0, le=1)
    max_quote_chars: int = Field(default=300, ge=1)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return cls.__name__

    def _reply(self, messages: Sequence[ChatMessage], tools: Sequence[BaseTool]) -> ChatMessage:
        if messages and messages[-1].role in {MessageRole.TOOL, MessageRole.FUNCTION}:
            return ChatMessage(role=MessageRole.ASSISTANT, content=_tool_results(messages))
        at = max((i for i, m in enumerate(messages) if m.role == MessageRole.USER), default=-1)
        question = _MEMORY.sub("", messages[at].content or "").strip() if at >= 0 else ""
        call = _called(question, tools, self.rules)
        if call is not None:
            return _call_message([call])
        lines = [line for i, m in enumerate(messages) for line in _lines(m, only_memory=i == at)]
        quote = _best_quote(question, lines, self.threshold, self.max_quote_chars)
        return ChatMessage(role=MessageRole.ASSISTANT, content=quote)


def _tool_results(messages: Sequence[ChatMessage]) -> str:
    results: list[str] = []
    for message in reversed(messages):
        if message.role not in {MessageRole.TOOL, MessageRole.FUNCTION}:
            break
        results.append(message.content or "")
    return "\n".join(reversed(results))


def _called(text: str, tools: Sequence[BaseTool], rules: Sequence[ToolRule]) -> ToolCall | None:
    for rule in rules if tools else ():
        match = rule.regex.search(text)
        for tool in tools if match else ():
            name = tool.metadata.get_name()
            parameters = list(tool.metadata.get_parameters_dict().get("properties", {}))
            if match and rule.name.search(name) and (kwargs := rule.kwargs(match, parameters)) is not None:
                return ToolCall(name, kwargs)
    return None


def _lines(message: ChatMessage, *, only_memory: bool) -> Iterator[_Line]:
    content = message.content or ""
    for section in _MEMORY.findall(content):
        yield from _memory_lines(section)
    rest = _MEMORY.sub("\n", content).strip()
    if only_memory or not rest:
        return
    parts = rest.split("\n") if message.role in {MessageRole.SYSTEM, MessageRole.DEVELOPER} else [rest]
    yield from filter(None, (_line(part, "") for part in parts))


def _memory_lines(section: str) -> Iterator[_Line]:
    """Read a section as our memory writes it; a line indented by two blanks continues the one before."""
    date, open_line = "", ""
    for raw in [*section.split("\n"), "<end>"]:
        if raw.startswith("  ") and open_line and not _TAG_LINE.fullmatch(raw):
            open_line += " " + raw.strip()
            continue
        wrapped = _WRAPPED.fullmatch(open_line)
        if open_line and (line := _line(html.unescape(wrapped["text"] if wrapped else open_line), date)):
            yield line
        open_line = raw
        if _TAG_LINE.fullmatch(raw):
            found = _DATE.fullmatch(raw)
            date = found[1] if found else "" if raw.strip().startswith("</") else date
            open_line = ""


def _line(text: str, date: str) -> _Line | None:
    """Make a line quotable by what it states; `None` when it only asks, or confesses."""
    stated = " ".join(s for s in _sentences(text) if not _QUESTION_END.search(s))
    terms = analyse(stated)
    if not terms or stated.strip().endswith(UNKNOWN):
        return None
    return _Line(text.strip(), date, {**analyse(date), **terms})


def _sentences(text: str) -> list[str]:
    return [sentence.strip() for sentence in _SENTENCE_END.split(text) if sentence.strip()]


# BM25 as commonly set. The phantom lines stand for language at large: in a context of two lines a word is not common
# because one of them holds it.
_K1, _B, _PHANTOM_LINES = 1.2, 0.75, 20


def _best_quote(question: str, lines: Sequence[_Line], threshold: float, max_chars: int) -> str:
    wanted = set(analyse(question))
    if not wanted or not lines:
        return UNKNOWN
    holding = Counter(term for line in lines for term in line.terms if term in wanted)
    idf = {t: math.log(1 + (len(lines) + _PHANTOM_LINES - holding[t] + 0.5) / (holding[t] + 0.5)) for t in wanted}
    average = sum(sum(line.terms.values()) for line in lines) / len(lines)

    def score(terms: Mapping[str, int]) -> float:
        length = _K1 * (1 - _B + _B * sum(terms.values()) / average)
        return sum(idf[t] * n * (_K1 + 1) / (n + length) for t, n in terms.items() if t in wanted)

    best = max(range(len(lines)), key=lambda at: (score(lines[at].terms), at))  # of equals, the newest
    line = lines[best]
    if sum(idf[term] for term in wanted & line.terms.keys()) < threshold * sum(idf.values()):
        return UNKNOWN
    quote = line.text if len(line.text) <= max_chars else _excerpt(_sentences(line.text), score, max_chars)
    return f"{quote} ({line.date})" if line.date else quote


def _excerpt(sentences: Sequence[str], score: Callable[[Mapping[str, int]], float], max_chars: int) -> str:
    """Cut a long line to its best sentence and what follows it, as much as fits."""
    stated = [at for at, sentence in enumerate(sentences) if not _QUESTION_END.search(sentence)]
    first = max(stated, key=lambda at: (score(analyse(sentences[at])), -at))
    quote = sentences[first][:max_chars]
    for sentence in sentences[first + 1 :]:
        if len(quote) + 1 + len(sentence) > max_chars:
            break
        quote += f" {sentence}"
    return quote


class HashEmbedding(BaseEmbedding):
    """Embeds a text as its stemmed words, each hashed to a place and a sign: equal in every process, without a model.

    Args:
        dims: Dimensions of the vectors, 2 or more; 128 unless given.
    """

    model_name: str = "hash"
    dims: int = Field(default=128, ge=2)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return "HashEmbedding"

    def _get_text_embedding(self, text: str) -> list[float]:
        terms = analyse(text) or {text: 1}  # emoji and function words alone have no terms
        vector = [0.0] * self.dims
        for term, count in terms.items():
            place, sign = divmod(_hash(term), 2)
            vector[place % self.dims] += (1 + math.log(count)) * (1 if sign else -1)
        length = math.sqrt(sum(number * number for number in vector))
        if length == 0:  # all words met their opposites
            vector[_hash(text) % self.dims] = length = 1.0
        return [number / length for number in vector]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embedding(text)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
