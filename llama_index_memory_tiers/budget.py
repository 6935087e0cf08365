"""Token budget: what a message costs, what a flush moves, what one context holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llama_index.core.base.llms.types import (
    AudioBlock,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)

from llama_index_memory_tiers.errors import InvalidMessageError

if TYPE_CHECKING:
    from llama_index_memory_tiers.records import Place

Tokenizer = Callable[[str], Sequence[Any]]
Reason = Literal["already shown", "no room", "share", "cut", "no call"]

SYSTEM_ROLES = (MessageRole.SYSTEM, MessageRole.DEVELOPER)
RESULT_ROLES = (MessageRole.TOOL, MessageRole.FUNCTION)
_ANSWERING_ROLES = (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL)

# Older tiktoken is quadratic on a long run of one character; 100 000 of them took 0.03 s in 0.14.
_CHUNK = 100_000
# Their split patterns end a piece at a newline that stands between visible characters, unless the second is
# "/", with which o200k continues a run (tiktoken_ext/openai_public.py): counts of such lines add up.
_LINEWISE = ("gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony")
_LINE_START = re.compile(r"(?<=\S\n)(?=[^\s/])")
_LINE = re.compile(r"(?![\s/]).*\S\Z", re.DOTALL)


# --- counting ---------------------------------------------------------------------------------------


class TokenCounter:
    """Counts tokens by one tokenizer, media by estimate.

    Text and media cost what stock `Memory` counts. Tool calls, thinking and citations, which stock leaves
    out, cost their text; a cache point costs nothing. Text of more than 100 000 characters is counted in
    chunks that end at a line or a word where there is one: memory stays bounded, and each cut may add or
    save a token or two.

    Args:
        tokenizer_fn: Turns text into a list whose length is the count.
        name: Name under which stored counts are recognised; by default made from the tokenizer. Tokenizers
            without a stable name (lambdas, nested functions, objects) are all called `custom`.
        image: Tokens of an image.
        audio: Tokens of a recording.
        video: Tokens of a film.
        document: Tokens of a document.
    """

    def __init__(
        self,
        tokenizer_fn: Tokenizer,
        *,
        name: str | None = None,
        image: int = 256,
        audio: int = 256,
        video: int = 256,
        document: int = 2048,
    ) -> None:
        self._tokenizer_fn = tokenizer_fn
        self._media = (
            (ImageBlock, image),
            (AudioBlock, audio),
            (VideoBlock, video),
            (DocumentBlock, document),
        )
        encoding = _encoding_name(tokenizer_fn)
        usual = (("image", image, 256), ("audio", audio, 256), ("video", video, 256))
        changed = [
            f"{what}={size}" for what, size, default in (*usual, ("document", document, 2048)) if size != default
        ]
        self._name = ";".join([name or encoding or _function_name(tokenizer_fn), *changed])
        self._linewise = encoding in _LINEWISE

    @property
    def name(self) -> str:
        """Name of the tokenizer and of estimates that differ from the defaults."""
        return self._name

    @property
    def linewise(self) -> bool:
        """Whether counts of lines are known to add up; see `lines`."""
        return self._linewise

    def text(self, text: str) -> int:
        """Count the tokens of a text of any length."""
        if len(text) <= _CHUNK:
            return self._count(text)
        return sum(self._count(chunk) for chunk in self._chunks(text))

    def block(self, block: ContentBlock) -> int:
        """Count the tokens of one content block.

        Args:
            block: Any block of a message.

        Returns:
            Tokens, media by estimate.

        Raises:
            InvalidMessageError: It is of a type that this version does not know.
        """
        for kind, size in self._media:
            if isinstance(block, kind):
                return size
        written = _written(block)
        if written is None:
            raise InvalidMessageError(
                f"A content block of type {type(block).__name__} was given.",
                allowed="Blocks are text, image, audio, video, document, cache point, citable, citation, "
                "thinking or tool call.",
                remedy="Turn the block into one of these before putting the message.",
            )
        return sum(map(self.text, written)) + self.blocks(_nested(block))

    def blocks(self, blocks: Sequence[ContentBlock]) -> int:
        """Count the tokens of content blocks; raises as `block` does."""
        return sum(map(self.block, blocks))

    def message(self, message: ChatMessage) -> int:
        """Count the tokens of a message: its blocks, and `additional_kwargs` as stock prints them."""
        extra = self.text(str(message.additional_kwargs)) if message.additional_kwargs else 0
        return self.blocks(message.blocks) + extra

    def lines(self, text: str) -> list[str]:
        """Cut a text into pieces whose counts add up to the count of the whole.

        Args:
            text: Any text.

        Returns:
            Lines for the encodings of OpenAI, for which that is known; else the whole text as one piece.
        """
        if not self._linewise or "\n" not in text[:-1]:
            return [text]
        pieces = _LINE_START.split(text)
        return pieces if max(map(len, pieces)) <= _CHUNK else [text]

    def _count(self, text: str) -> int:
        try:
            return len(self._tokenizer_fn(text))
        except ValueError:
            # Some tokenizers refuse lone surrogates, tiktoken's bare `encode` refuses "<|endoftext|>";
            # one such message must not make its session unusable.
            return len(self._tokenizer_fn(text.encode("utf-8", "replace").decode().replace("<|", "< |")))

    def _chunks(self, text: str) -> Iterator[str]:
        start = 0
        while start < len(text):
            end = start + _CHUNK
            if end < len(text):
                end = self._cut(text, start, end)
            yield text[start:end]
            start = end

    def _cut(self, text: str, start: int, end: int) -> int:
        line = text.rfind("\n", start, end)
        while self._linewise and line > start and not _LINE_START.match(text, line + 1):
            line = text.rfind("\n", start, line)
        if line > start:
            return line + 1
        word = text.rfind(" ", start + 1, end)
        return word if word > start else end


def _encoding_name(tokenizer_fn: Tokenizer) -> str | None:
    inner = tokenizer_fn.func if isinstance(tokenizer_fn, partial) else tokenizer_fn
    owner = getattr(inner, "__self__", None)
    name = getattr(owner, "name", None)
    return name if isinstance(name, str) and type(owner).__module__.startswith("tiktoken") else None


def _function_name(tokenizer_fn: Tokenizer) -> str:
    owner = getattr(tokenizer_fn, "__self__", None)
    where = getattr(tokenizer_fn, "__objclass__", tokenizer_fn)
    module, name = getattr(where, "__module__", None), getattr(tokenizer_fn, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return "custom"
    if owner is None or isinstance(owner, type):
        return f"{module}.{name}"
    # A bound method counts by its object's vocabulary: transformers tokenizers tell which.
    vocabulary = getattr(owner, "name_or_path", None)
    return f"{module}.{name}:{vocabulary}" if isinstance(vocabulary, str) and vocabulary else "custom"


def _written(block: ContentBlock) -> tuple[str, ...] | None:
    if isinstance(block, TextBlock):
        return (block.text,)
    if isinstance(block, ToolCallBlock):
        kwargs = block.tool_kwargs
        if not isinstance(kwargs, str):
            kwargs = json.dumps(kwargs, ensure_ascii=False, default=str)
        return (f"{block.tool_name} {kwargs}",)
    if isinstance(block, ThinkingBlock):
        return (block.content,) if block.content else ()
    if isinstance(block, (CitableBlock, CitationBlock)):
        return (block.title, block.source)
    return () if isinstance(block, CachePoint) else None


def _nested(block: ContentBlock) -> Sequence[ContentBlock]:
    if isinstance(block, CitableBlock):
        return block.content
    return (block.cited_content,) if isinstance(block, CitationBlock) else ()


# --- flushing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WindowRow:
    """A message of the window as a plan sees it.

    Args:
        seq: Position in its session.
        role: Role of the message.
        tokens: Its size.
        has_tool_calls: Whether it calls tools; `None` when only the role is known.
        calls: Ids of the tool calls it makes.
        answers: Id of the tool call it answers.
    """

    seq: int
    role: str
    tokens: int
    has_tool_calls: bool | None = None
    calls: tuple[str, ...] = ()
    answers: str = ""


def window_row(seq: int, message: ChatMessage, tokens: int) -> WindowRow:
    """Make the row of a message that is at hand.

    Args:
        seq: Position in its session.
        message: The message.
        tokens: Its size.

    Returns:
        A row that knows which tools the message calls or answers.
    """
    role, kwargs = message.role, message.additional_kwargs
    calls: list[Any] = []
    if role in _ANSWERING_ROLES:
        calls = [block.tool_call_id for block in message.blocks if isinstance(block, ToolCallBlock)]
        older = kwargs.get("tool_calls") if kwargs else None
        if isinstance(older, (list, tuple)):
            calls += [call.get("id") if isinstance(call, Mapping) else getattr(call, "id", None) for call in older]
    answers = kwargs.get("tool_call_id") if kwargs else None
    return WindowRow(
        seq,
        role,
        tokens,
        has_tool_calls=bool(calls),
        calls=tuple(call for call in calls if isinstance(call, str) and call),
        answers=answers if isinstance(answers, str) else "",
    )


def plan_flush(
    window: Sequence[WindowRow], *, limit_tokens: int, flush_tokens: int, window_messages: int | None = None
) -> tuple[int, ...]:
    """Decide which messages leave the window: oldest first, whole turns.

    A turn starts at each user message; turns that a tool call and its result connect are one. Leading system
    messages stay, and so does the newest turn, however large: a turn that alone exceeds the limit causes no
    repeated flush. Without a user message the newest message stays, or the newest tool call with its results.
    After a flush the window is within both limits, unless what stays by these rules is larger.

    Args:
        window: Active messages, oldest first.
        limit_tokens: Size above which the window is flushed.
        flush_tokens: When it is flushed for its size, about that many tokens move: another turn goes while
            that brings their sum nearer to this number.
        window_messages: Number of messages above which it is flushed, leading system messages not counted.
            This alone moves no more than it must, or one message too many would empty a window of short ones.

    Returns:
        Sequence numbers to archive, ascending; empty when there is nothing to do.
    """
    body = window[_lead(window) :]
    tokens, count = sum(row.tokens for row in window), len(body)
    most = count if window_messages is None else window_messages
    wanted = flush_tokens if tokens > limit_tokens else 0
    moved: list[int] = []
    moved_tokens = 0
    for turn in _turns_or_groups(body)[:-1]:
        size = sum(row.tokens for row in turn)
        needed = tokens - moved_tokens > limit_tokens or count - len(moved) > most
        if not needed and moved_tokens + size / 2 >= wanted:
            break
        moved.extend(row.seq for row in turn)
        moved_tokens += size
    return tuple(moved)


def _lead(window: Sequence[WindowRow]) -> int:
    return next((index for index, row in enumerate(window) if row.role not in SYSTEM_ROLES), len(window))


def _calls_tools(row: WindowRow) -> bool:
    return row.role in _ANSWERING_ROLES if row.has_tool_calls is None else row.has_tool_calls


def _turns_or_groups(body: Sequence[WindowRow]) -> list[list[WindowRow]]:
    if any(row.role == MessageRole.USER for row in body):
        return _together(body, lambda row: row.role == MessageRole.USER)
    return _together(body, lambda row: row.role not in RESULT_ROLES)


def _together(rows: Iterable[WindowRow], starts: Callable[[WindowRow], bool]) -> list[list[WindowRow]]:
    """Cut rows where one starts a stretch, and join stretches that a tool call and its result connect."""
    stretches: list[list[WindowRow]] = []
    called_in: dict[str, int] = {}
    latest: int | None = None
    for row in rows:
        if not stretches or starts(row):
            stretches.append([])
        here = len(stretches) - 1
        stretches[here].append(row)
        if row.role in RESULT_ROLES:
            home = called_in.get(row.answers, here if latest is None else latest)
            if home < here:
                stretches[home:] = [[row for stretch in stretches[home:] for row in stretch]]
                called_in = {call: min(at, home) for call, at in called_in.items()}
                latest = here = home
        if _calls_tools(row):
            latest = here
            called_in.update(dict.fromkeys(row.calls, here))
    return stretches


def _groups(rows: Iterable[WindowRow]) -> list[list[WindowRow]]:
    """Cut a turn into single messages and tool calls with their results; results may stand apart."""
    groups: list[list[WindowRow]] = []
    called_in: dict[str, list[WindowRow]] = {}
    caller: list[WindowRow] | None = None
    answer: list[WindowRow] | None = None
    for row in rows:
        home = called_in.get(row.answers, caller or answer) if row.role in RESULT_ROLES else None
        if home is not None:
            home.append(row)
            continue
        groups.append([row])
        caller = groups[-1] if _calls_tools(row) else caller
        answer = groups[-1] if row.role in _ANSWERING_ROLES else answer
        called_in.update(dict.fromkeys(row.calls, groups[-1]))
    return groups


# --- packing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One whole thing that a block offers: kept or left out, never cut.

    Args:
        text: As rendered, escaped, no newline at its end.
        score: How much it is worth; for reports, the order of `Part.items` decides.
        group: Items of one group share a header and a footer, paid with the first of them; an item without
            a group has its own.
        header: Line before the group; empty is none.
        footer: Line after the group; empty is none.
        order: Where it stands when rendered; groups stand by their smallest order, ties as offered.
        sources: The messages it shows; it is left out when the window shows all of them.
        legs: What found it, leg → score.
        record_id: The record it comes from.
    """

    text: str
    score: float = 0.0
    group: str = ""
    header: str = ""
    footer: str = ""
    order: tuple[float, ...] = ()
    sources: frozenset[Place] = frozenset()
    legs: Mapping[str, float] = field(default_factory=dict, hash=False)
    record_id: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What one block offers.

    Args:
        name: Name of the block.
        priority: 0 is kept whole; then 1 claims before 2.
        items: Best first.
        blocks: Whole content, one piece: static, or a foreign block's.
        messages: Chat messages of a foreign block, one piece, put before the window.
        share_tokens: What it may claim before the unused rest is lent; `None` is all that is free.
        stable: Rendered before the parts that change from turn to turn.
    """

    name: str
    priority: int
    items: tuple[Item, ...] = ()
    blocks: tuple[ContentBlock, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    share_tokens: int | None = None
    stable: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A message of the window.

    Args:
        message: The message; never changed.
        tokens: Its size by the packer's counter.
        place: Where it stands in the log, if it stands there.
    """

    message: ChatMessage
    tokens: int
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class PackedPart:
    """What is kept of a part.

    Args:
        part: As it was offered.
        items: The kept items, best first.
        tokens: Its size with its tags, by summing up lines.
    """

    part: Part
    items: tuple[Item, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that is not in the context, and why.

    Args:
        part: Name of the part; empty for a message of the window.
        reason: `already shown` by the window; `no room`; over the `share` of its part, and nothing was left
            to lend; `cut` by the block itself; `no call` for a tool result whose call is not in the window.
        item: The item, when it is one.
        row: The message of the window, when it is one.
    """

    part: str
    reason: Reason
    item: Item | None = None
    row: Row | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """One context, decided.

    Args:
        rows: Messages of the window that are shown, oldest first.
        parts: What is kept of each part, by priority.
        left_out: What is not shown.
        total: Tokens of the rendered messages.
        overflow: Priority 0 and the newest user message alone exceed the limit; nothing else is shown.
    """

    rows: tuple[Row, ...]
    parts: tuple[PackedPart, ...]
    left_out: tuple[LeftOut, ...] = ()
    total: int = 0
    overflow: bool = False


def section_text(items: Sequence[Item]) -> str:
    """Write items as lines, each group between its header and footer.

    Args:
        items: The items that are kept.

    Returns:
        Lines joined by newlines, without one at the end.
    """
    groups: dict[str | int, list[tuple[tuple[tuple[float, ...], int], Item]]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.group or index, []).append(((item.order, index), item))
    lines: list[str] = []
    for members in sorted(groups.values(), key=lambda pairs: min(key for key, _ in pairs)):
        members.sort(key=lambda pair: pair[0])
        frame = next((item for _, item in members if item.header or item.footer), members[0][1])
        lines += [frame.header] if frame.header else []
        lines += [item.text for _, item in members]
        lines += [frame.footer] if frame.footer else []
    return "\n".join(lines)


def tag_name(name: str) -> str:
    """Make the name of a block safe as a tag.

    Args:
        name: Any text.

    Returns:
        Letters, digits, `_`, `-` and `.`, beginning with a letter or `_`; never `memory`, the wrapper's name.
    """
    tag = re.sub(r"[^\w.-]+", "_", name)
    if not re.match(r"[^\W\d]", tag):
        tag = f"_{tag}"
    return f"{tag}_" if tag.lower() == "memory" else tag


Render = Callable[[Packed], Sequence[ChatMessage]]


class _Claim(NamedTuple):
    """Something that may be added: a unit of the window, an item, or the one piece of a part."""

    section: int  # -1 is the window
    piece: int  # -1 is the one piece of a part


@dataclass(frozen=True, slots=True)
class _Unit:
    """Messages of the window that come and go together."""

    rows: tuple[int, ...]
    tokens: int
    kind: Literal["lead", "newest", "older"]


@dataclass(slots=True)
class _Section:
    """A part while it is being packed. Its sums are estimates: lines are counted one by one."""

    part: Part
    frame: int
    whole: int
    lines: dict[int, int] = field(default_factory=dict)
    frames: dict[str | int, int] = field(default_factory=dict)
    kept: dict[int, None] = field(default_factory=dict)
    open: dict[str | int, int] = field(default_factory=dict)
    tokens: int = 0

    def cost(self, index: int) -> int:
        """What adding this costs now; `kept` does not hold it."""
        cost = 0 if self.kept else self.frame
        if index < 0:
            return cost + self.whole
        key = self.part.items[index].group or index
        return cost + self.lines[index] + (0 if self.open.get(key) else self.frames[key])

    def add(self, index: int) -> None:
        self.tokens += self.cost(index)
        self.kept[index] = None
        if index >= 0:
            key = self.part.items[index].group or index
            self.open[key] = self.open.get(key, 0) + 1

    def remove(self, index: int) -> None:
        del self.kept[index]
        if index >= 0:
            self.open[self.part.items[index].group or index] -= 1
        self.tokens -= self.cost(index)

    def packed(self) -> PackedPart:
        items = tuple(self.part.items[index] for index in sorted(self.kept) if index >= 0)
        return PackedPart(self.part, items, self.tokens)


class Packer:
    """Decides what one context holds; the orchestrator drives it and fetches what it asks for.

    Order of claims: `begin` takes priority 0 whole, the newest user message, leading system messages, the
    rest of the newest turn (when it is too large its oldest messages go first, a tool call always with its
    results), then older turns, newest first, up to the window's share. `take` gives each part what it may
    claim, whole items, best first. `fill` lends what nobody claimed: to older turns, then to items left out.
    A message or item that was left out but would still fit by itself does not exist in the `result`, except
    within an oversize newest turn and for items that the window shows already.

    Costs are summed up line by line, then the whole is rendered and counted, and what differs is repaired:
    the total is exact for every tokenizer.

    Args:
        counter: Counts tokens.
        limit: Tokens that the rendered messages may have: the token limit less the reserve.
        rows: The window, oldest first; their `tokens` are taken as counted.
        render: Turns a packed context into messages; messages that it does not change are passed on as they
            are, not copied.
        window_share: Tokens that the window may claim before parts of priority 1 and more; default `limit`.
        plan: The plan of these rows, when there is one already.
    """

    def __init__(
        self,
        counter: TokenCounter,
        *,
        limit: int,
        rows: Sequence[Row],
        render: Render,
        window_share: int | None = None,
        plan: WindowPlan | None = None,
    ) -> None:
        self._limit = limit
        self._rows = rows
        self._render = render
        self._share = limit if window_share is None else window_share
        self._plan = WindowPlan(rows) if plan is None else plan
        self._meter = _Meter(counter, self._plan.counted)
        self._wrapper = self._meter.line("<memory>") + self._meter.text("</memory>")
        self._sections: list[_Section] = []
        self._order: list[int] = []
        self._journal: list[_Claim] = []
        self._popped: dict[_Claim, int] = {}
        self._reasons: dict[_Claim, Reason] = {}
        self._cut: list[str] = []
        self._row_tokens = 0
        self._open_sections = 0
        self._shown_rows: set[int] = set()
        self._shown: set[Place] = set()
        self._drift = 0
        self._overflow = False
        self._loose = False  # Whether a line begins or ends so that `TokenCounter.lines` does not cut there.

    @property
    def overflow(self) -> bool:
        """Whether priority 0 and the newest user message alone exceed the limit."""
        return self._overflow

    @property
    def shown(self) -> frozenset[Place]:
        """Messages that the window shows so far; a recall may leave them out."""
        return frozenset(self._shown)

    def begin(self, parts: Sequence[Part] = ()) -> None:
        """Take what must be there, then the window's share.

        Args:
            parts: The parts of priority 0.
        """
        for part in parts:
            section = self._enter(part)
            for claim in self._claims(section):
                self._put(claim)
        if self._shows_all():
            return
        self._show(self._plan.must, sum(self._rows[index].tokens for index in self._plan.must))
        total = self._measure()
        self._drift = total - self._ledger()
        self._overflow = total > self._limit
        if not self._overflow:
            self._claim_window()

    def room(self, part: Part) -> int:
        """Tell how many tokens the content of a part may have now.

        Args:
            part: A part of one piece that is going to be taken; what it holds does not matter.

        Returns:
            Tokens by `TokenCounter.blocks` or `TokenCounter.message`; 0 or more.
        """
        frame, free = 0, self._free()
        if not part.messages:
            # Each text block ends a line, which may cost a token.
            frame = self._tags(part) + max(1, len(part.blocks))
            free -= 0 if self._open_sections else self._wrapper
        share = free if part.share_tokens is None else min(free, part.share_tokens)
        return 0 if self._overflow else max(0, share - frame)

    def take(self, part: Part, *, cut: bool = False) -> None:
        """Let a part claim what it may; call it in order of priority.

        Args:
            part: The part, priority 1 or more.
            cut: Its block has already left something out to fit into `room`.
        """
        section = self._enter(part)
        if cut:
            self._cut.append(part.name)
        if self._overflow:
            return
        share = self._limit if part.share_tokens is None else part.share_tokens
        free, state = self._free(), self._sections[section]
        for claim in self._claims(section):
            if self._redundant(claim) or (cost := self._cost(claim)) > free:
                continue
            if state.tokens + state.cost(claim.piece) > share:
                self._reasons[claim] = "share"
            else:
                self._add(claim)
                free -= cost

    def fill(self) -> None:
        """Lend what nobody claimed, by estimate; `result` settles it exactly."""
        if not self._overflow:
            self._drop_redundant()
            self._grow()
            self._drop_redundant()

    def result(self) -> Packed:
        """Settle the context exactly.

        Returns:
            What is shown and what is left out; its total is within the limit unless it overflows.
        """
        total = self._measure() if self._overflow else self._settle()
        packed = self._packed()
        return Packed(packed.rows, packed.parts, tuple(self._left_out()), total, self._overflow)

    # What may be added, and what it costs.

    def _enter(self, part: Part) -> int:
        line = self._meter.line
        whole = sum(map(self._meter.message, part.messages))
        whole += sum(line(b.text) if isinstance(b, TextBlock) else self._meter.block(b) for b in part.blocks)
        frame = self._tags(part) if part.blocks or part.items else 0
        section = _Section(part, frame, whole)
        for index, item in enumerate(part.items):
            section.lines[index] = line(item.text)
            self._loose = self._loose or not _LINE.match(item.text)
            if (key := item.group or index) not in section.frames:
                section.frames[key] = sum(line(edge) for edge in (item.header, item.footer) if edge)
        self._sections.append(section)
        self._order = sorted(range(len(self._sections)), key=lambda at: self._sections[at].part.priority)
        return len(self._sections) - 1

    def _tags(self, part: Part) -> int:
        tag = tag_name(part.name)
        return self._meter.line(f"<{tag}>") + self._meter.line(f"</{tag}>")

    def _claims(self, section: int) -> Iterator[_Claim]:
        part = self._sections[section].part
        if part.blocks or part.messages:
            yield _Claim(section, -1)
        for index in range(len(part.items)):
            yield _Claim(section, index)

    def _candidates(self) -> list[_Claim]:
        """What is left out and may come in, in the order in which it is lent to."""
        found: list[_Claim] = []
        newest_closed = False
        for index, unit in enumerate(() if len(self._shown_rows) == len(self._rows) else self._plan.units):
            if unit.rows[0] in self._shown_rows or (unit.kind == "newest" and newest_closed):
                continue
            newest_closed = newest_closed or unit.kind == "newest"
            found.append(_Claim(-1, index))
        for section in self._order:
            kept = self._sections[section].kept
            found += [c for c in self._claims(section) if c.piece not in kept and not self._redundant(c)]
        return found

    def _redundant(self, claim: _Claim) -> bool:
        if claim.section < 0 or claim.piece < 0 or self._sections[claim.section].part.priority <= 0:
            return False
        sources = self._sections[claim.section].part.items[claim.piece].sources
        return bool(sources) and sources <= self._shown

    def _cost(self, claim: _Claim) -> int:
        if claim.section < 0:
            return self._plan.units[claim.piece].tokens
        opens = not self._open_sections and self._sections[claim.section].frame > 0
        return self._sections[claim.section].cost(claim.piece) + (self._wrapper if opens else 0)

    def _frame(self, claim: _Claim) -> int:
        """The part of `_cost` that pays for tags."""
        if claim.section < 0 or self._sections[claim.section].kept:
            return 0
        frame = self._sections[claim.section].frame
        return frame + (self._wrapper if frame and not self._open_sections else 0)

    def _ledger(self) -> int:
        wrapper = self._wrapper if self._open_sections else 0
        return self._row_tokens + wrapper + sum(section.tokens for section in self._sections)

    def _free(self) -> int:
        return self._limit - self._ledger() - self._drift

    # Adding and removing.

    def _show(self, rows: Sequence[int], tokens: int) -> None:
        self._row_tokens += tokens
        self._shown_rows.update(rows)
        self._shown.update(place for index in rows if (place := self._rows[index].place) is not None)

    def _shows_all(self) -> bool:
        """Show the whole window if it is within its share: the usual case, in which there is nothing to weigh."""
        if self._plan.tokens > self._share or self._plan.orphans:
            return False
        self._row_tokens = self._plan.tokens
        self._shown_rows, self._shown = set(range(len(self._rows))), set(self._plan.places)
        total = self._measure()
        self._drift = total - self._ledger()
        if total <= self._limit:
            return True
        self._row_tokens = 0
        self._shown_rows, self._shown = set(), set()
        return False

    def _put(self, claim: _Claim) -> None:
        if claim.section < 0:
            self._show(self._plan.units[claim.piece].rows, self._plan.units[claim.piece].tokens)
            return
        section = self._sections[claim.section]
        self._open_sections += not section.kept and section.frame > 0
        section.add(claim.piece)

    def _add(self, claim: _Claim) -> None:
        self._put(claim)
        self._journal.append(claim)

    def _remove(self, claim: _Claim) -> None:
        self._journal.remove(claim)
        if claim.section < 0:
            unit = self._plan.units[claim.piece]
            self._row_tokens -= unit.tokens
            self._shown_rows.difference_update(unit.rows)
            self._shown.difference_update(p for row in unit.rows if (p := self._rows[row].place) is not None)
            return
        section = self._sections[claim.section]
        section.remove(claim.piece)
        self._open_sections -= not section.kept and section.frame > 0

    # The steps.

    def _claim_window(self) -> None:
        """Leading system messages, the newest turn, then older turns up to the window's share."""
        closed: set[str] = set()
        free = self._free()
        for index, unit in enumerate(self._plan.units):
            if unit.kind in closed:
                continue
            over_share = unit.kind == "older" and self._row_tokens + unit.tokens > self._share
            if not over_share and unit.tokens <= free:
                self._add(_Claim(-1, index))
                free -= unit.tokens
            elif unit.kind != "lead":
                closed.add(unit.kind)

    def _drop_redundant(self) -> None:
        for claim in [claim for claim in self._journal if self._redundant(claim)]:
            self._remove(claim)

    def _grow(self) -> bool:
        """Add what fits by estimate; what was popped once is left to `_squeeze`."""
        before, free = len(self._journal), self._free()
        for claim in self._candidates():
            if claim in self._popped or self._redundant(claim):
                continue
            cost = self._cost(claim)
            if cost <= free:
                self._add(claim)
                free -= cost
        return len(self._journal) > before

    def _shrink(self) -> None:
        """Take back the newest additions until the rest fits by estimate; at least one goes."""
        while self._journal:
            claim = self._journal[-1]
            self._remove(claim)
            self._popped[claim] = self._popped.get(claim, 0) + 1
            if self._free() >= 0:
                return

    def _squeeze(self, total: int) -> bool:
        """Add one thing that fits when rendered although its estimate is too large."""
        slack, trusted = self._slack()
        for claim in self._candidates():
            # Twice popped means that adding it made room for what then left none: leave it out for good.
            if self._popped.get(claim, 0) > 1:
                continue
            # A template of the user's frames sections in its own way and may leave media out. Whole parts are
            # few: they are always tried.
            least = self._cost(claim) - (0 if trusted else self._frame(claim))
            if claim.piece >= 0 and least > self._limit - total + slack:
                continue
            self._add(claim)
            if self._measure() <= self._limit:
                return True
            self._remove(claim)
        return False

    def _slack(self) -> tuple[int, bool]:
        """How far the estimate of one thing may be off, judged by this context, and whether frames are right."""
        drift, estimated = abs(self._drift), self._ledger() - self._row_tokens
        if self._meter.linewise:
            return 2 if self._loose else min(1, drift), not drift and self._open_sections > 0
        if not self._open_sections or drift * 8 >= estimated:
            return self._limit, False  # Sums tell nothing about this tokenizer: everything is tried.
        return 1 + ceil(2 * drift / (1 + sum(len(section.kept) for section in self._sections))), not drift

    def _settle(self) -> int:
        while True:
            self._drop_redundant()
            total = self._measure()
            self._drift = total - self._ledger()
            if total > self._limit and self._journal:
                self._shrink()
            elif not self._grow() and not self._squeeze(total):
                return total

    # What comes out.

    def _measure(self) -> int:
        return self._meter.total(self._render(self._packed()))

    def _packed(self) -> Packed:
        every = len(self._shown_rows) == len(self._rows)
        rows = tuple(self._rows) if every else tuple(self._rows[index] for index in sorted(self._shown_rows))
        sections = (self._sections[index] for index in self._order)
        return Packed(rows, tuple(section.packed() for section in sections if section.kept))

    def _left_out(self) -> Iterator[LeftOut]:
        for index, row in enumerate(self._rows):
            if index not in self._shown_rows:
                yield LeftOut("", "no call" if index in self._plan.orphans else "no room", row=row)
        for at in self._order:
            section = self._sections[at]
            for claim in self._claims(at):
                if claim.piece not in section.kept:
                    reason = "already shown" if self._redundant(claim) else self._reasons.get(claim, "no room")
                    item = section.part.items[claim.piece] if claim.piece >= 0 else None
                    yield LeftOut(section.part.name, reason, item)
        for name in self._cut:
            yield LeftOut(name, "cut")


class WindowPlan:
    """A window cut into pieces that come and go together; it holds until the window changes.

    Args:
        rows: The window, oldest first.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.tokens = sum(row.tokens for row in rows)
        """Size of the whole window."""
        self.places = frozenset(row.place for row in rows if row.place is not None)
        """Where its messages stand in the log."""
        self.counted = {id(row.message): (row.message, row.tokens) for row in rows}
        """Messages and their sizes, by identity."""
        lead = next((at for at, row in enumerate(rows) if row.message.role not in SYSTEM_ROLES), len(rows))
        first = next((at for at in range(lead, len(rows)) if rows[at].message.role not in RESULT_ROLES), len(rows))
        self.orphans = frozenset(range(lead, first))
        """Indexes of tool results whose call is not in the window."""

    @property
    def must(self) -> tuple[int, ...]:
        """Index of the newest user message, if there is one."""
        return self._cut[0]

    @property
    def units(self) -> tuple[_Unit, ...]:
        """The rest, in order of claim."""
        return self._cut[1]

    @cached_property
    def _cut(self) -> tuple[tuple[int, ...], tuple[_Unit, ...]]:
        # Only when the window does not fit: a window of 1 000 messages takes 3 ms to cut.
        window = [window_row(index, row.message, row.tokens) for index, row in enumerate(self._rows)]
        lead = _lead(window)
        turns = _turns_or_groups(window[lead + len(self.orphans) :])
        newest = turns.pop() if turns else []
        must = next((row.seq for row in reversed(newest) if row.role == MessageRole.USER), None)

        def unit(members: Sequence[WindowRow], kind: Literal["lead", "newest", "older"]) -> _Unit:
            return _Unit(tuple(row.seq for row in members), sum(row.tokens for row in members), kind)

        units = [unit([row], "lead") for row in window[:lead]]
        units += [unit(group, "newest") for group in reversed(_groups(r for r in newest if r.seq != must))]
        units += [unit(turn, "older") for turn in reversed(turns)]
        return () if must is None else (must,), tuple(units)


class _Meter:
    """Counts each text and message of one packing once."""

    def __init__(self, counter: TokenCounter, counted: Mapping[int, tuple[ChatMessage, int]]) -> None:
        self._counter = counter
        self._empty = counter.text("")
        self._texts: dict[str, int] = {}
        # By identity; the object is held so that its id is not given to another one.
        self._blocks: dict[int, tuple[ContentBlock, int]] = {}
        self._window = counted
        self._messages: dict[int, tuple[ChatMessage, int]] = {}

    @property
    def linewise(self) -> bool:
        return self._counter.linewise

    def line(self, text: str) -> int:
        """Cost of a line within a text; tokenizers that frame each text (BOS, EOS) do so once."""
        return self.text(f"{text}\n") - self._empty

    def text(self, text: str) -> int:
        known = self._texts.get(text)
        if known is None:
            pieces = self._counter.lines(text)
            known = self._counter.text(text) if len(pieces) == 1 else sum(map(self.text, pieces))
            self._texts[text] = known
        return known

    def block(self, block: ContentBlock) -> int:
        known = self._blocks.get(id(block))
        if known is None:
            tokens = self.text(block.text) if isinstance(block, TextBlock) else self._counter.block(block)
            known = self._blocks[id(block)] = (block, tokens)
        return known[1]

    def message(self, message: ChatMessage) -> int:
        known = self._messages.get(id(message))
        if known is None:
            known = self._messages[id(message)] = (message, self._edited(message))
        return known[1]

    def total(self, messages: Sequence[ChatMessage]) -> int:
        window, known = self._window, self._messages
        return sum(seen[1] if (seen := window.get(id(m)) or known.get(id(m))) else self._edited(m) for m in messages)

    def _edited(self, message: ChatMessage) -> int:
        extra = self._counter.text(str(message.additional_kwargs)) if message.additional_kwargs else 0
        return sum(map(self.block, message.blocks)) + extra
