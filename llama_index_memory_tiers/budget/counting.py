"""Count tokens: of texts, content blocks and messages, by any tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import (
    AudioBlock,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)

from llama_index_memory_tiers.errors import InvalidMessageError

Tokenizer = Callable[[str], Sequence[Any]]

MEDIA_TOKENS = 256
"""Size of an image, a sound or a film, as stock estimates it."""

DOCUMENT_TOKENS = 2048
"""Size of a document, which is not looked into."""

# Older tiktoken is quadratic on a long run of one character; 100 000 of them took 0.03 s in 0.14.
_CHUNK = 100_000
# Their split patterns end a piece at a newline that stands between visible characters, unless the second is
# "/", with which o200k continues a run (tiktoken_ext/openai_public.py): counts of such lines add up.
_LINEWISE = ("gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony")
_LINE_START = re.compile(r"(?<=\S\n)(?=[^\s/])")
# Kinds of text in which tokenizers differ.
_PROBES = (
    "The quick brown fox doesn't jump over 13 lazy dogs, unfortunately; internationalisation helps nobody.",
    "昨天晚上我们在北京吃了烤鸭，味道很好。",
    "def f(x: list[int]) -> dict:\n\treturn {n: n**2 for n in x if n_1 != 'a\\n'}\n",
    "31415926535 2026-11-30T06:54:23+00:00 0xFFFF 1,000,000.00",
    "a  b   c        d\n\n\n   e\t\tf ",
)
# Counts that are remembered, by digests of their texts: 2 MB.
_REMEMBERED = 16_384
STANDS_ALONE = re.compile(r"(?![\s/]).*\S\Z", re.DOTALL)


class TokenCounter:
    """Counts tokens by one tokenizer, media by estimate.

    Text and media cost what stock `Memory` counts. Tool calls, thinking and citations, which stock leaves
    out, cost their text; a cache point costs nothing. Text of more than 100 000 characters is counted in
    chunks that end at a line or a word where there is one: memory stays bounded, and each cut may add or
    save a token or two.

    Args:
        tokenizer_fn: Turns text into a list whose length is the count.
        name: Name under which stored counts are recognised; by default made from the tokenizer. Tokenizers
            without a stable name (lambdas, nested functions, objects) are called `custom:` and a digest of
            what they count in a few fixed texts.
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
        image: int = MEDIA_TOKENS,
        audio: int = MEDIA_TOKENS,
        video: int = MEDIA_TOKENS,
        document: int = DOCUMENT_TOKENS,
    ) -> None:
        self._tokenizer_fn = tokenizer_fn
        self._counts: dict[bytes, int] = {}
        self._media = (
            (ImageBlock, image),
            (AudioBlock, audio),
            (VideoBlock, video),
            (DocumentBlock, document),
        )
        encoding = _encoding_name(tokenizer_fn)
        media = (("image", image), ("audio", audio), ("video", video))
        changed = [f"{what}={size}" for what, size in media if size != MEDIA_TOKENS]
        changed += [f"document={document}"] if document != DOCUMENT_TOKENS else []
        self._name = ";".join([name or encoding or _function_name(tokenizer_fn) or self._probed(), *changed])
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

    def _probed(self) -> str:
        """Counts that another tokenizer made would let a context exceed its limit."""
        digest = hashlib.sha256(repr([self._probe(text) for text in _PROBES]).encode())
        return f"custom:{digest.hexdigest()[:8]}"

    def _probe(self, text: str) -> int | str:
        try:
            return self._count(text)
        except Exception as error:  # noqa: BLE001  # what it cannot count is said when a message holds it
            return type(error).__name__

    def _count(self, text: str) -> int:
        """Count a text, or remember it: the lines of a user's memories come again and again, a digest is quicker."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._counts.get(digest)
        if known is None:
            known = self._counted(text)
            if len(self._counts) >= _REMEMBERED:
                self._counts.clear()
            self._counts[digest] = known
        return known

    def _counted(self, text: str) -> int:
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


def _function_name(tokenizer_fn: Tokenizer) -> str | None:
    owner = getattr(tokenizer_fn, "__self__", None)
    where = getattr(tokenizer_fn, "__objclass__", tokenizer_fn)
    module, name = getattr(where, "__module__", None), getattr(tokenizer_fn, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return None
    if owner is None or isinstance(owner, type):
        return f"{module}.{name}"
    # A bound method counts by its object's vocabulary: transformers tokenizers tell which.
    vocabulary = getattr(owner, "name_or_path", None)
    return f"{module}.{name}:{vocabulary}" if isinstance(vocabulary, str) and vocabulary else None


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
