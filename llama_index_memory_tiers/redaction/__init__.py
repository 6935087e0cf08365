"""Replace secrets in text, messages and JSON-like values by placeholders."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2s
from itertools import pairwise
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, DocumentBlock, TextBlock
from pydantic import AnyUrl, BaseModel

from llama_index_memory_tiers.checks import check_kind, checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.redaction.judging import is_named_token, unset
from llama_index_memory_tiers.redaction.patterns import DEFAULT_PATTERNS, Pattern

__all__ = ["DEFAULT_PATTERNS", "Pattern", "Redactor", "checked_redaction"]

_Model = TypeVar("_Model", bound=BaseModel)

# In a URL that has been parsed, the brackets and colons are percent-encoded.
_PLACEHOLDER = re.compile(r"((?:\[|%5B)REDACTED(?::|%3A)[a-z][a-z0-9-]{0,31}(?::|%3A)[0-9a-f]{6}(?:\]|%5D))")
_DEFAULT_KEY = b"llama-index-memory-tiers"

# --- Where secrets stand in messages ----------------------------------------------------------------------------

# Fields that pair, type or place a message; changing one breaks it, and none holds free text.
_FIXED = "block_type role tool_call_id tool_name path image_mimetype video_mimetype document_mimetype format detail"
_FIXED_FIELDS = frozenset(_FIXED.split())
_ID_KEYS = frozenset({"id", "tool_call_id", "call_id", "tool_id"})
_PASSWORD_NAME = re.compile(r"(?i).*(?:passwords?|passwd|passcode|passphrase|pwd)|pass|pin|.*密码|.*口令")
_SECRET_NAME = re.compile(
    r"(?i).*(?:api|access|secret|auth|account|private|signing|encryption|client)[ _-]?keys?|.*secret|.*token"
    r"|authorization|.*(?:密钥|秘钥|私钥|令牌)"
)
_NAMING = ("name", "key", "field")
_LINE_CHARS = 200  # so much of a block's last line is read together with the next block
_LONG_NUMBER = 10**13  # no card has fewer digits than 14
_DATA_URL = re.compile(r"data:[\w.+/-]{0,100};base64,[A-Za-z0-9+/=]*")
_READABLE = ("text/", "application/json", "application/xml", "application/yaml", "application/x-yaml")


@dataclass(frozen=True, slots=True)
class Redactor:
    """Takes secrets out; immutable, and safe to share between threads and memories.

    A secret becomes `[REDACTED:kind:1a2b3c]`: its kind and 24 bits of a keyed hash (BLAKE2s), so that equal secrets
    have equal placeholders and a message that comes again is recognised, in this process and in the next. That
    needs a key that outlives the process. **Without `key` it is a constant of this package**: then whoever reads a
    placeholder can test guesses of a weak password against its 24 bits. Pass 16 or more random bytes from your
    secret store to prevent that, and keep them: another key makes other placeholders.

    Args:
        patterns: What to look for, in order of precedence where two overlap; `DEFAULT_PATTERNS` unless given. Add your
            own with `(*DEFAULT_PATTERNS, Pattern("employee-number", re.compile(…)))`.
        key: Key of the hash, 1 byte or more; `None` (the default) is the constant.

    Raises:
        ConfigurationError: The key is empty.
    """

    patterns: tuple[Pattern, ...] = field(default=DEFAULT_PATTERNS, repr=False)
    _: KW_ONLY
    key: bytes | None = field(default=None, repr=False)
    _literals: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_kind("patterns", self.patterns, tuple[Pattern, ...])
        if self.key is not None and not (isinstance(self.key, bytes) and self.key):
            raise ConfigurationError(
                f"A key that is {'empty' if self.key == b'' else 'a ' + type(self.key).__name__} was given.",
                allowed="A key is at least one byte, better 16 or more.",
                remedy="Pass random bytes from your secret store, or None for the package's constant.",
            )
        object.__setattr__(self, "patterns", tuple(self.patterns))
        object.__setattr__(self, "_literals", tuple({hint for p in self.patterns for hint in p.hints}))

    @checked
    def text(self, text: str) -> str:
        """Redact free text.

        Args:
            text: Any text; lone surrogates are kept.

        Returns:
            The text with placeholders; the same object when nothing was found. Redacting it again changes nothing.
        """
        while (scrubbed := self._pass(text)) != text:  # each pass leaves less outside of placeholders, so it ends
            text = scrubbed
        return text

    @checked
    def message(self, message: ChatMessage) -> ChatMessage:
        """Redact every part of a message that holds words: blocks, nested blocks, tool arguments, extra arguments.

        Args:
            message: Is never changed.

        Returns:
            The same object when nothing was found, else a copy; ids, names and binary content stay.
        """
        return self._neighbours(self._model(message))

    def value(self, value: Any) -> Any:
        """Redact a JSON-like value; a key such as `password` makes what it holds a secret.

        Args:
            value: Text, dicts, lists, tuples, pydantic models and scalars in any nesting; text that is JSON is
                redacted inside.

        Returns:
            The same object when nothing was found, else a copy of the changed parts.
        """
        return self._value(value, frozenset())

    # -- text

    def _pass(self, text: str) -> str:
        lowered = text.lower()
        seen = {literal for literal in self._literals if literal in lowered}
        due = [p for p in self.patterns if not p.hints or not seen.isdisjoint(p.hints)]
        if not due:
            return text
        parts = _PLACEHOLDER.split(text)  # odd ones are placeholders
        parts[::2] = [self._scrub(part, due) for part in parts[::2]]
        return "".join(parts)

    def _scrub(self, text: str, patterns: list[Pattern]) -> str:
        found = sorted(
            (start, rank, end) for rank, pattern in enumerate(patterns) for start, end in pattern.spans(text)
        )
        if not found:
            return text
        merged: list[tuple[int, int, int]] = []  # start, end, rank of the pattern that names the kind
        for start, rank, end in found:
            if merged and start < merged[-1][1]:
                first, last, named = merged[-1]
                merged[-1] = (first, max(last, end), min(named, rank))
            else:
                merged.append((start, end, rank))
        out: list[str] = []
        at = 0
        for start, end, rank in merged:
            out += (text[at:start], self._placeholder(patterns[rank].kind, text[start:end]))
            at = end
        return "".join((*out, text[at:]))

    def _placeholder(self, kind: str, secret: str) -> str:
        key = blake2s(self.key or _DEFAULT_KEY).digest()  # of the length that BLAKE2s takes
        digest = blake2s(secret.encode("utf-8", "surrogatepass"), digest_size=3, key=key)
        return f"[REDACTED:{kind}:{digest.hexdigest()}]"

    # -- structure

    def _value(self, value: Any, kept: frozenset[str]) -> Any:
        if isinstance(value, str):
            return self._string(value, kept)
        if isinstance(value, dict):
            beside = _name_beside(value)
            changed = {
                self._key(k): self._entry(beside if beside and k == "value" else k, v, kept) for k, v in value.items()
            }
            same = len(changed) == len(value) and all(
                old == new and value[old] is changed[new] for old, new in zip(value, changed, strict=True)
            )
            return value if same else changed
        if isinstance(value, list | tuple):
            items = [self._value(item, kept) for item in value]
            if all(old is new for old, new in zip(value, items, strict=True)):
                return value
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, AnyUrl):
            return self._url(value)
        return self._model(value) if isinstance(value, BaseModel) else self._number(value)

    def _number(self, value: Any) -> Any:
        """A number in JSON that would be a secret as text, such as the one of a card; other values as they are."""
        if not isinstance(value, int) or value < _LONG_NUMBER:
            return value
        written = str(value)
        redacted = self.text(written)
        return value if redacted == written else redacted

    def _key(self, key: Any) -> Any:
        return self.text(key) if isinstance(key, str) else key

    def _entry(self, key: Any, value: Any, kept: frozenset[str]) -> Any:
        if not isinstance(key, str) or key in kept:
            return value if key in kept else self._value(value, kept)
        for kind, name in (("password", _PASSWORD_NAME), ("secret", _SECRET_NAME)):
            if name.fullmatch(key):
                return self._named(kind, value, kept)
        return self._value(value, kept)

    def _named(self, kind: str, value: Any, kept: frozenset[str]) -> Any:
        """Redact what stands under a key that names a secret."""
        if isinstance(value, list):
            items = [self._named(kind, item, kept) for item in value]
            return value if all(old is new for old, new in zip(value, items, strict=True)) else items
        if isinstance(value, int) and not isinstance(value, bool) and kind == "password":
            return self._placeholder(kind, str(value))
        if not isinstance(value, str):
            return self._value(value, kept)
        redacted = self._string(value, kept)
        secret = not (unset(value) or _PLACEHOLDER.search(redacted)) and (kind == "password" or is_named_token(value))
        return self._placeholder(kind, value) if secret else redacted

    def _string(self, text: str, kept: frozenset[str]) -> str:
        if text.lstrip()[:1] not in {"{", "["}:
            return text if _DATA_URL.fullmatch(text) else self.text(text)
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return self.text(text)
        redacted = self._value(parsed, kept)
        return text if redacted is parsed else json.dumps(redacted, ensure_ascii=False)

    def _url(self, url: AnyUrl) -> AnyUrl:
        old = str(url)
        new = self._string(old, frozenset())
        return url if new == old else type(url)(new)

    def _model(self, model: _Model) -> _Model:
        update = {}
        for name in type(model).model_fields:
            if name in _FIXED_FIELDS:
                continue
            old = getattr(model, name)
            new = self._value(old, _ID_KEYS if name == "additional_kwargs" else frozenset())
            if new is not old:
                update[name] = new
        if isinstance(model, DocumentBlock) and (data := self._document(model)) is not None:
            update["data"] = data
        return model.model_copy(update=update) if update else model

    def _neighbours(self, message: ChatMessage) -> ChatMessage:
        """Redact what is a secret after the text block in front of it: together they are read as lines of one text."""
        blocks = list(message.blocks)
        for at, (above, block) in enumerate(pairwise(message.blocks), 1):
            if not (isinstance(above, TextBlock) and isinstance(block, TextBlock)):
                continue
            last = above.text.rstrip().rpartition("\n")[2][-_LINE_CHARS:]
            first, end, rest = block.text.partition("\n")
            redacted = self.text(f"{last}\n{first}")
            if redacted != f"{last}\n{first}" and redacted.startswith(f"{last}\n"):
                blocks[at] = block.model_copy(update={"text": f"{redacted[len(last) + 1 :]}{end}{rest}"})
        same = all(old is new for old, new in zip(message.blocks, blocks, strict=True))
        return message if same else message.model_copy(update={"blocks": blocks})

    def _document(self, block: DocumentBlock) -> bytes | None:
        """Redact the text of a document; `None` when nothing was found or it is no text."""
        if not isinstance(block.data, bytes) or not (block.document_mimetype or "").startswith(_READABLE):
            return None
        try:
            text = base64.b64decode(block.data, validate=True).decode()
        except ValueError:
            return None
        redacted = self._string(text, frozenset())
        return None if redacted is text else base64.b64encode(redacted.encode())


def _name_beside(fields: dict[Any, Any]) -> str | None:
    """The name of a secret that stands beside its value: `{"name": "password", "value": …}`."""
    if "value" in fields:
        for name in map(fields.get, _NAMING):
            if isinstance(name, str) and (_PASSWORD_NAME.fullmatch(name) or _SECRET_NAME.fullmatch(name)):
                return name
    return None


def checked_redaction(redaction: Any) -> Redactor | None:
    """What takes secrets out.

    Args:
        redaction: A `Redactor`, `"default"`, or `None`.

    Returns:
        The redactor, or `None` when secrets are stored as they are.

    Raises:
        ConfigurationError: It is something else.
    """
    if redaction is None or isinstance(redaction, Redactor):
        return redaction
    if redaction != "default":
        raise ConfigurationError(
            f"redaction={redaction!r:.100} was given.",
            allowed="It is a Redactor, 'default', or None for no redaction.",
            remedy="Pass one of them, or leave it out.",
        )
    return Redactor()
