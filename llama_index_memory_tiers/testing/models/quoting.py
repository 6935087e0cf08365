"""A model that quotes what it was given."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools.types import BaseTool
from pydantic import Field

from llama_index_memory_tiers.testing.models.answering import ToolCalling, call_message
from llama_index_memory_tiers.testing.models.asking import (
    DEFAULT_TOOL_RULES,
    ToolRule,
    asks,
    called,
    is_question,
    sentences_of,
)
from llama_index_memory_tiers.text import analyse

UNKNOWN = "I don't know."
NOTED = "Noted."

_MEMORY = re.compile(r"<memory>\n?(.*?)</memory>", re.DOTALL)
_TAG_LINE = re.compile(r"\s*</?[\w.-]+(?:\s[^<>]*)?>\s*")
_WRAPPED = re.compile(r"<(?P<tag>[\w.-]+)(?:\s[^<>]*)?>(?P<text>.*)</(?P=tag)>", re.DOTALL)
_DATE = re.compile(r"<(?:notes )?(\d{1,2} \w+ \d{4})>")


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the context: what can be quoted, when it was said, and what it is found by."""

    text: str
    date: str
    terms: Mapping[str, int]


class QuotingLLM(ToolCalling):
    """An honest model without a key: it calls a tool when asked to, else it quotes what it was given.

    1. After a tool's result it answers with that result.
    2. When the newest user message fits a rule and a tool of that name was offered, it calls the tool.
    3. When that message only states something, it says "Noted.": whether it is remembered, the memory decides.
    4. Otherwise it quotes the line of its context (system text, memory, earlier messages) that fits the newest user
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
        call = called(question, tools, self.rules)
        if call is not None:
            return call_message([call])
        if analyse(question) and not asks(question):
            return ChatMessage(role=MessageRole.ASSISTANT, content=NOTED)
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
    """Make a line quotable by what it states; `None` when it only asks, or is one of our own phrases."""
    stated = " ".join(s for s in sentences_of(text) if not is_question(s))
    terms = analyse(stated)
    if not terms or stated.strip().endswith((UNKNOWN, NOTED)):
        return None
    return _Line(text.strip(), date, {**analyse(date), **terms})


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
    quote = line.text if len(line.text) <= max_chars else _excerpt(sentences_of(line.text), score, max_chars)
    return f"{quote} ({line.date})" if line.date else quote


def _excerpt(sentences: Sequence[str], score: Callable[[Mapping[str, int]], float], max_chars: int) -> str:
    """Cut a long line to its best sentence and what follows it, as much as fits."""
    stated = [at for at, sentence in enumerate(sentences) if not is_question(sentence)]
    first = max(stated, key=lambda at: (score(analyse(sentences[at])), -at))
    quote = sentences[first][:max_chars]
    for sentence in sentences[first + 1 :]:
        if len(quote) + 1 + len(sentence) > max_chars:
            break
        quote += f" {sentence}"
    return quote
