"""What a user's words ask for: a tool, an answer, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.tools.types import BaseTool

from llama_index_memory_tiers.testing.models.answering import ToolCall


@dataclass(frozen=True, slots=True)
class ToolRule:
    """When a user's words ask for a tool, and with which arguments.

    Args:
        name: Searched in the tool's name; a pattern, or its text.
        regex: Searched in the newest user message; a pattern, or its text.
        kwargs: From the match and the names of the tool's parameters to its arguments; `None` when they don't fit.
    """

    name: re.Pattern[str] | str
    regex: re.Pattern[str] | str
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


def called(text: str, tools: Sequence[BaseTool], rules: Sequence[ToolRule]) -> ToolCall | None:
    """The call that a text asks for by the first rule that fits, and a tool that was offered; `None` for none."""
    for rule in rules if tools else ():
        match = re.search(rule.regex, text)
        for tool in tools if match else ():
            name = tool.metadata.get_name()
            parameters = list(tool.metadata.get_parameters_dict().get("properties", {}))
            if match and re.search(rule.name, name) and (kwargs := rule.kwargs(match, parameters)) is not None:
                return ToolCall(name, kwargs)
    return None


# --- questions --------------------------------------------------------------------------------------------------

_SENTENCE_END = re.compile(
    r"(?<!\bDr\.)(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bSt\.)(?<=[.!?])\s+(?=[\"'“‘(]?[A-Z0-9\u00c0-\u00de])|(?<=[。！？])(?![”’」』）])\s*|\n+"
)
_QUESTION_END = re.compile(r"[?？][\"'”’)\]」』）]*\s*$")
_STATEMENT_END = re.compile(r"[.!。！…～~][\"'”’)\]」』）]*\s*$")
_OPENING = re.compile(
    r"(?i)^\W*(?:(?:and|so|but|ok|okay|please|hey|hi|well)\b\W*)*"
    r"(?:what|who|whom|whose|which|when|where|why|how|is|are|am|was|were|do|does|did|can|could|will|would|shall|should"
    r"|may|might|have|has|had)(?:'s|’s|n't|n’t)?\s"
    "|什么|谁|哪|几|多少|怎么|怎样|为何|是否|是不是|有没有|如何"
)
_REQUEST = re.compile(
    r"(?i)(?:^\W*|\b(?:please|you|and)\s+)"
    r"(?:(?:tell|remind|show|give) (?:me|us)|list|name|describe|explain|repeat|recall|summari[sz]e)\b"
    r"|告诉我|提醒我|请问|说说|讲讲|列出|总结|(?:吗|呢)[。！!~～]*\s*$"
)


def sentences_of(text: str) -> list[str]:
    """Cut a text into its sentences."""
    return [sentence.strip() for sentence in _SENTENCE_END.split(text) if sentence.strip()]


def is_question(sentence: str) -> bool:
    """Whether a sentence ends with a question mark."""
    return _QUESTION_END.search(sentence) is not None


def asks(text: str) -> bool:
    """Whether a text, English or Chinese, wants an answer: by its question mark, its first words, or a request."""
    return any(
        is_question(sentence)
        or _REQUEST.search(sentence)
        or (_OPENING.search(sentence) and not _STATEMENT_END.search(sentence))
        for sentence in sentences_of(text)
    )
