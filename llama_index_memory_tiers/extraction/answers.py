"""Read the facts in a model's answer, however it is dressed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from llama_index_memory_tiers.errors import ExtractionError

MAX_FACT_CHARS = 1000
"""A longer "fact" is a copy of the conversation: cut."""

MAX_ANSWER_CHARS = 200_000
"""Models that repeat themselves fill their whole output; what comes later is not read."""

MAX_DATE_CHARS = 60
"""A date in words is shorter."""


@dataclass(frozen=True, slots=True)
class FactDraft:
    """A fact as a model gave it.

    Args:
        subject: Whom or what it is about; '' when the model did not say.
        relation: How subject and value belong together, or ''.
        value: The rest, or ''.
        text: The whole sentence.
        said_at: When the newest of its sources was said.
        sources: Numbers of the lines, or of the facts, that it comes from.
        replaces: Numbers of known facts in whose place it comes.
        retracts: Numbers of known facts that no longer hold; then there is no new fact.
        confirms: Numbers of known facts that were said again; then there is no new fact.
        since: Words for the day from which it holds, or from which a retracted one does not, as they were said.
        until: Words for the day on which it ends.
    """

    subject: str
    relation: str
    value: str
    text: str
    said_at: datetime | None = None
    sources: tuple[int, ...] = ()
    replaces: tuple[int, ...] = ()
    retracts: tuple[int, ...] = ()
    confirms: tuple[int, ...] = ()
    since: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What could be read in a model's answer.

    Args:
        facts: Drafts with the numbers that the model gave, valid or not.
        notes: What it says about known facts without a new one: retractions and confirmations.
        complete: Whether the answer ends where its format ends; a cut one may lack facts.
    """

    facts: tuple[FactDraft, ...]
    complete: bool
    notes: tuple[FactDraft, ...] = ()


# --- reading the answer ---------------------------------------------------------------------------------------

_TEXT_KEYS = ("fact", "text", "content", "memory", "statement", "sentence", "事实")
_NUMBER_KEYS = ("said", "from", "source", "sources", "line", "lines", "message", "messages")
_REPLACE_KEYS = ("replaces", "supersedes", "updates", "replace")
_RETRACT_KEYS = ("retract", "retracts", "ends", "delete")
_CONFIRM_KEYS = ("confirm", "confirms")
_LIST_KEYS = ("facts", "new_facts", "condensed_facts", "known_facts", "items", "memories", "results", "事实")

_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)\b[^>]*>.*?(?:</\1\s*>|\Z)", re.IGNORECASE | re.DOTALL)
# Some chat templates open the tag in the prompt, so that an answer only closes it.
_THOUGHT_END = re.compile(r"\A.*</(?:think|thinking)\s*>", re.IGNORECASE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*(?:```|~~~).*$", re.MULTILINE)
_TAG = re.compile(r"<facts?\b", re.IGNORECASE)
_FACT = re.compile(
    r"<fact\b(?P<attributes>(?:[^<>\"']|\"[^\"]*\"|'[^']*')*)(?<!/)>"
    r"(?P<inner>.*?)(?:(?P<end></fact\s*>)|(?=<fact\b)|(?=</facts\s*>)|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_OPENED = re.compile(r"<facts\s*>", re.IGNORECASE)
_CLOSED = re.compile(r"</facts\s*>", re.IGNORECASE)
_WRAPPED = re.compile(r"<facts\s*>(.*?)</facts\s*>|<facts?\s*/>", re.IGNORECASE | re.DOTALL)
_ATTRIBUTE = re.compile(r"([\w-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))")
_CHILD = re.compile(r"<(subject|relation|value|text|said|from|sources?)\s*>(.*?)</\1\s*>", re.IGNORECASE | re.DOTALL)
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_ENTITY = re.compile(r"&(lt|gt|amp|quot|apos|#\d{1,7}|#[xX][0-9a-fA-F]{1,6});")
_NAMED = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
_OPENING = re.compile(r"[{\[]")
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")
_STRINGS = re.compile(r'\[\s*((?:"(?:[^"\\]|\\.)*"\s*,\s*)*"(?:[^"\\]|\\.)*"(?=\s*[,\]]))')
_KEY_BEFORE = re.compile(r'"([^"\\]{1,40})"\s*:\s*\Z')
_JSON_TRIES = 500  # each failure reads the rest again
_BULLET = re.compile(r"\s*(?:[-*–+]\s|[•‣·▪]|\(?\d{1,3}(?:[.):]\s|[、．])|\[\d{1,3}\])\s*(\S.*)")
_REFUSAL = re.compile(r"(?i)\b(?:can ?not|can't|unable|sorry|won't|as an ai)\b|无法|抱歉|不能")
_NONE = re.compile(
    r"none|null|nil|nothing|empty|n/a"
    r"|(?:there (?:are|is|were|was) |i (?:have|found|see|find) )?(?:none|no|nothing)"
    r"(?: (?:new|additional|other|further|relevant|specific|concrete|facts?|information|details))*"
    r"(?: (?:to|were|was|are|is|could|be|found|present|here|add|report|extract|extracted|disclosed|detected|in|the"
    r"|this|conversation|given|provided|added|needed))*"
    r"|(?:这里|对话中)?(?:没有|暂?无|未发现)(?:任何|需要|值得|可以?|提取|添加|记录|补充|新|更多|其他|的)*"
    r"(?:事实|信息|内容)?(?:可?(?:提取|添加|补充|记录))?",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"(?:(?:specific|condensed|extracted|new|another|example|sample|first|second|next)\s+)*facts?\s*[#:]?\s*\d*"
    r"|more facts(?: as needed)?|the whole sentence|who or what|how|what|string|text|sentence|value"
    r"|(?:事实|示例)\s*\d*",
    re.IGNORECASE,
)


def without_thoughts(answer: str) -> str:
    """An answer without what a model thought aloud before it."""
    return _THOUGHT_END.sub("", _THOUGHT.sub("", answer))


def parse_answer(answer: str) -> Answer:
    """Read the facts in a model's answer, however it is dressed.

    Tags, JSON in lines, lists or objects, and bullets are read, with prose, fences and thoughts around them; of a cut
    answer the whole items. Placeholders of prompts, empty texts and everything else are refused.

    Args:
        answer: What the model wrote.

    Returns:
        Its facts; none when it says that there are none.

    Raises:
        ExtractionError: It is empty, or neither facts nor "no facts": a sentence is never taken for a fact.
    """
    clean = _repaired(answer[:MAX_ANSWER_CHARS])
    clean = without_thoughts(clean)
    clean = _COMMENT.sub("", clean).strip()
    if not clean:
        raise unreadable("the answer is empty" if not answer.strip() else "the answer holds nothing but thoughts")
    found = _read_tags(clean) or _read_json(clean) or _read_none(clean) or _read_bullets(clean)
    if found is None:
        raise unreadable("the answer holds no facts and does not say that there are none")
    notes = tuple(draft for draft in found.facts if draft.retracts or draft.confirms)
    facts = [fact for draft in found.facts if draft not in notes and (fact := _accepted(draft)) is not None]
    return Answer(tuple(facts), found.complete and len(answer) <= MAX_ANSWER_CHARS, notes)


def unreadable(why: str) -> ExtractionError:
    """The error for an answer of which nothing can be made.

    Args:
        why: What is wrong with it.

    Returns:
        The error, to be raised.
    """
    return ExtractionError(
        f"A model's answer could not be read: {why}.",
        allowed="Facts are <fact> tags, JSON or a bulleted list; [] or <facts></facts> says that there are none.",
        remedy="It is asked again with fewer messages; if that does not help, try another model or prompt.",
    )


def _repaired(text: str) -> str:
    """Join surrogate pairs, replace lone surrogates."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_tags(text: str) -> Answer | None:
    tag, brace = _TAG.search(text), text.find("{")
    if tag is None or 0 <= brace < tag.start():
        return None
    drafts, complete = [], True
    for match in _FACT.finditer(text):
        if match["end"] is None and match.end() == len(text):
            complete = False  # cut in the middle
            continue
        fields: dict[str, Any] = {
            name.casefold(): double or single or bare
            for name, double, single, bare in _ATTRIBUTE.findall(match["attributes"])
        }
        inner = _CDATA.sub(lambda found: found[1].replace("&", "&amp;"), match["inner"])
        fields.update((name.casefold(), value) for name, value in _CHILD.findall(inner))
        if not _CHILD.search(inner):
            fields["fact"] = inner
        drafts.append(_draft(fields))
    if drafts:
        return Answer(tuple(drafts), complete and (not _OPENED.search(text) or bool(_CLOSED.search(text))))
    wrapped = _WRAPPED.search(text)
    if wrapped is None:
        return None  # a tag that was only talked about, or cut before the first fact
    inner = (wrapped[1] or "").strip()
    if not inner:
        return Answer((), complete=True)
    return _read_json(inner) or _read_none(inner) or _read_bullets(inner)


def _read_json(text: str) -> Answer | None:
    bare = _FENCE.sub("", text)
    values, complete = _json_values(bare)
    if not complete:
        mended, whole = _json_values(_TRAILING_COMMA.sub(r"\1", bare))
        if whole or len(mended) > len(values):
            values, complete = mended, whole
    drafts: list[FactDraft] = []
    known = False
    for value in values:
        found = _facts_in(value)
        if found is not None:
            known = True
            drafts += found
    return Answer(tuple(drafts), complete) if known else None


def _json_values(text: str) -> tuple[list[Any], bool]:
    """Every whole JSON value in a text, also those inside one that was cut; whether all were whole."""
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    complete, at = True, 0
    for _ in range(_JSON_TRIES):
        opening = _OPENING.search(text, at)
        if opening is None:
            return values, complete
        start = opening.start()
        key = _KEY_BEFORE.search(text, max(0, start - 60), start)
        named = key is None or key[1].casefold() in _LIST_KEYS  # else a field of an object that was cut
        found: list[Any] = []
        try:
            value, at = decoder.raw_decode(text, start)
            found = [value]
        except (ValueError, RecursionError):
            at = start + 1
            if text[at : at + 40].strip()[:1] in {'"', "{", "[", ""}:
                complete = False
            if strings := _STRINGS.match(text, start):
                found, at = [json.loads(f"[{strings[1]}]", strict=False)], strings.end()
        values += found if named else []
    return values, False


def _facts_in(value: Any, depth: int = 0) -> list[FactDraft] | None:
    """The facts of a JSON value; `None` when it is something else."""
    if isinstance(value, Mapping):
        fields = {str(name).casefold(): held for name, held in value.items()}
        for name in _LIST_KEYS:
            inner = fields.get(name)
            if name in fields and not (isinstance(inner, str) and name in _TEXT_KEYS):
                return _facts_in(inner if isinstance(inner, list) else [inner or ""], depth + 1)
        held = [fields.get(name) for name in (*_TEXT_KEYS, "value")]
        draft = _draft(fields)
        told = any(isinstance(one, str | int | float) for one in held) or draft.retracts or draft.confirms
        return [draft] if told else None
    if not isinstance(value, list) or depth > 2:  # noqa: PLR2004  # {"facts": [[…]]}
        return None
    drafts: list[FactDraft] = []
    known = not value
    for item in value:
        found = [_draft({"fact": item})] if isinstance(item, str) else _facts_in(item, depth + 1)
        if found is not None:
            known = True
            drafts += found
    return drafts if known else None


def read_objects(answer: str) -> list[Any]:
    """Read the JSON values in a model's answer, with prose and fences around them; of a cut one the whole ones.

    Args:
        answer: What the model wrote.

    Returns:
        The values in order; none when there are none.
    """
    clean = without_thoughts(_repaired(answer[:MAX_ANSWER_CHARS]))
    bare = _FENCE.sub("", clean)
    values, complete = _json_values(bare)
    if complete:
        return values
    mended, whole = _json_values(_TRAILING_COMMA.sub(r"\1", bare))
    return mended if whole or len(mended) > len(values) else values


def one_line(value: Any) -> str:
    """A text of a model's answer on one line, its characters as they are; '' for anything but text and numbers."""
    return _one_line(value)


def _read_none(text: str) -> Answer | None:
    words = re.sub(r"\s+", " ", _FENCE.sub("", text)).strip(" .。!！*\"'`()（）")
    return Answer((), complete=True) if _NONE.fullmatch(words) or words == "{}" else None


def _read_bullets(text: str) -> Answer | None:
    drafts: list[FactDraft] = []
    for line in filter(str.strip, _FENCE.sub("", text).splitlines()):
        bullet = _BULLET.fullmatch(line)
        if bullet:
            drafts.append(_draft({"fact": bullet[1].replace("**", "")}))
        elif drafts:
            return None  # prose between or after: this is an essay
        elif _REFUSAL.search(line) or not line.rstrip("* ").endswith((":", "：")):
            return None
    # Nothing tells whether a list of bullets was cut.
    return Answer(tuple(drafts), complete=False) if drafts else None


def _draft(fields: Mapping[str, Any]) -> FactDraft:
    subject, relation, value = (_one_line(fields.get(name)) for name in ("subject", "relation", "value"))
    text = next((found for name in _TEXT_KEYS if (found := _one_line(fields.get(name)))), "")
    if not text and value:
        text = " ".join(part for part in (subject, relation, value) if part)
    said, replaces, retracts, confirms = (
        tuple(number for name in names for number in _numbers(fields.get(name)))
        for names in (_NUMBER_KEYS, _REPLACE_KEYS, _RETRACT_KEYS, _CONFIRM_KEYS)
    )
    since, until = (_one_line(fields.get(name))[:MAX_DATE_CHARS] for name in ("since", "until"))
    return FactDraft(
        subject, relation, value, text,
        sources=said, replaces=replaces, retracts=retracts, confirms=confirms, since=since, until=until,
    )  # fmt: skip


def _one_line(value: Any) -> str:
    """Text on one line, its characters as they are."""
    if not isinstance(value, str):
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""
    text = _repaired(_unescaped(value))
    # Joiners belong to Persian words and to emoji; other invisible characters hide text from people.
    shown = (c if c.isprintable() or c in "\u200c\u200d" else " " if c.isspace() else "" for c in text)
    return " ".join("".join(shown).split())


def _numbers(value: Any) -> list[int]:
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int):
        return [value]
    if isinstance(value, str):
        return [int(digits) for digits in re.findall(r"(?<![\d.-])\d{1,6}(?![\d.])", value)]
    return [number for item in value for number in _numbers(item)] if isinstance(value, list) else []


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        name = match[1]
        if name in _NAMED:
            return _NAMED[name]
        code = int(f"0{name[1:]}", 16) if name[1] in "xX" else int(name[1:])
        return chr(code) if 0 < code <= 0x10FFFF else match[0]  # noqa: PLR2004  # Unicode ends here

    return _ENTITY.sub(character, text)


def _accepted(draft: FactDraft) -> FactDraft | None:
    """Refuse what is no fact: nothing, an echo of a prompt's example, "none"."""
    words = draft.text.strip(" .。…\"'*`[]()<>")
    if not any(c.isalnum() for c in words) or _PLACEHOLDER.fullmatch(words) or _NONE.fullmatch(words):
        return None
    return draft if len(draft.text) <= MAX_FACT_CHARS else replace(draft, text=f"{draft.text[:MAX_FACT_CHARS]}…")
