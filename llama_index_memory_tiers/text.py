"""Read and write plain text by rule: terms for BM25, names, escaping."""

from __future__ import annotations

import html
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from itertools import islice

import Stemmer
from llama_index.core.base.llms.types import MessageRole

from llama_index_memory_tiers.dates import MAX_DATED_CHARS, MONTHS, number
from llama_index_memory_tiers.wanted import told_in

MAX_ANALYSED_CHARS = 100_000
"""A longer message is found by its beginning; this much takes 0.2 s to analyse."""

MAX_TERM_CHARS = 64
"""Longer terms are base64 or the like: cut, so that one message cannot fill an index."""

QUESTION = "?"
"""The term of a message that only asks; `analyse` never gives it, so no question finds it by BM25."""

# Function words only: content words that are merely frequent are weighed down by BM25's own IDF. "may" is
# missing because it is a month.
_WORDS_EN = """
    a about above after again against all also am an and any are aren't as at be because been before being
    below between both but by can can't cannot could couldn't did didn't do does doesn't doing don't done
    down during each either else ever for from further get gets got had hadn't has hasn't have haven't
    having he he'd he'll he's her here here's hers herself him himself his how how's however i i'd i'll i'm
    i've if in into is isn't it it'd it'll it's its itself just let's me might mightn't mine more most must
    mustn't my myself neither no nor not of off on once only onto or other ought our ours ourselves out over
    own per rather really same shall shan't she she'd she'll she's should shouldn't since so some such than
    that that'd that'll that's the their theirs them themselves then there there'll there's these they
    they'd they'll they're they've this those though through to too toward towards under until up upon us
    very was wasn't we we'd we'll we're we've were weren't what what'll what's whatever when when's where
    where's whether which while who who'd who'll who's whom whose why why's will with within without won't
    would wouldn't yet you you'd you'll you're you've your yours yourself yourselves s t d ll m re ve ain't
    gonna wanna
"""
_STOP_EN = frozenset(_WORDS_EN.split())

# Chinese function words end a run: what stands between them is near enough to a word. Bigrams across them cost .10 of
# recall within 1 000 tokens on our own Chinese chat. Longest first. Bound forms (目的, 了解) lose a character on both
# sides alike, so they still match.
_WORDS_ZH = """
    的 了 吗 呢 吧 啊 呀 嘛 哦 哈 么 着 得 地 是 在 有 和 与 跟 或 及 把 被 给 对 从 向 到 也 都 就
    才 又 再 还 很 太 更 最 不 没 这 那 哪 谁 我 你 您 他 她 它 们 个 为 什么 怎么 怎样 如何 为什么
    多少 哪里 哪儿 哪个 什么时候 我们 你们 他们 她们 它们 咱们 自己 这个 那个 这些 那些 这里 那里
    这样 那样 是不是 有没有 是否 可以 因为 所以 但是 而且 如果 已经 一个 一下 一些 之前 之后 以前
    以后 请问 告诉
"""
_STOP_ZH = sorted(_WORDS_ZH.split(), key=len, reverse=True)
_SPLIT_ZH = re.compile("|".join(map(re.escape, _STOP_ZH)))

# Scripts written without spaces between words: kana, Han, Hangul; Thai, Lao, Burmese, Khmer.
_UNSPACED = (
    "\u3005\u3006\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
    "\U00020000-\U000323af\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
# Marks that `\w` leaves out though they stand inside words: accents, Hebrew, Arabic, the scripts of India.
_MARKS = "\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0981-\u0df3"
_LETTER = rf"(?:[^\W_{_UNSPACED}]|[{_MARKS}])"
_NUMERAL = "[0-9〇零一二三四五六七八九十]"
_TOKEN = re.compile(
    rf"(?P<zh_date>{_NUMERAL}{{1,4}}[年月日号])"
    rf"|(?P<run>[{_UNSPACED}]+)"
    rf"|(?P<number>(?<![\w.,])\d{{1,3}}(?:,\d{{3}})+(?![\w,]))"
    rf"|(?P<word>_{{0,2}}[^\W_{_UNSPACED}]{_LETTER}*(?:(?:['_]|[-.:/@+]{{1,3}}){_LETTER}+)*)"
)
_JOINT = re.compile(r"[-_.:/@+]+")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")
_ISO_DATE = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})")
_SUFFIX = re.compile(r"(?:'s|s'|n't|'(?:ll|re|ve|d|m|t))$")
_ASKS = re.compile(r"[?？]\s*(?:\[[^\]]*\]\s*)?\Z")  # an attachment's caption may stand behind
_SURROGATE = re.compile("[\ud800-\udfff]")

_local = threading.local()


def _stem(word: str) -> str:
    # A Snowball stemmer holds its own buffers: one per thread.
    stemmer = getattr(_local, "stemmer", None)
    if stemmer is None:
        stemmer = _local.stemmer = Stemmer.Stemmer("english")
    return str(stemmer.stemWord(word))


def folded(text: str) -> str:
    """What two texts have in common that read alike: for telling whether one stands in the other.

    Args:
        text: Any text.

    Returns:
        Without case, width, normal form, and the signs that are not seen, such as a space of no width.
    """
    if text.isascii():
        return text.casefold()
    seen = "".join(character for character in text if unicodedata.category(character) != "Cf")
    # Folding may take letters apart that the normal form puts together.
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", seen).casefold())


def analyse(text: str) -> dict[str, int]:
    """Terms of a text for BM25.

    Words are lower-cased, stemmed and without function words; numbers and identifiers stand whole and in parts;
    scripts without spaces give their characters and pairs of characters between function words.

    Args:
        text: Any text; beyond 100 000 characters the rest is not read.

    Returns:
        Term → times it occurs, in the order of first occurrence.
    """
    clean = _SURROGATE.sub(" ", text[:MAX_ANALYSED_CHARS])
    clean = unicodedata.normalize("NFKC", clean).replace("\u2019", "'")
    found: Counter[str] = Counter()
    for match in _TOKEN.finditer(clean):
        token = match[0]
        if match.lastgroup == "word":
            found.update(_word_terms(token))
        elif match.lastgroup == "run":
            found.update(_run_terms(token))
        elif match.lastgroup == "number":
            found[token.replace(",", "")] += 1
        else:
            found[f"{number(token[:-1])}{token[-1].replace('号', '日')}"] += 1
    return dict(found)


def _word_terms(token: str) -> Iterable[str]:
    iso = _ISO_DATE.fullmatch(token)
    if iso:
        year, month, day = map(int, iso.groups())
        if 1 <= month <= len(MONTHS):
            return [token, str(year), _stem(MONTHS[month - 1].casefold()), str(day)]
    pieces = [piece for piece in _JOINT.split(token) if piece]
    terms: list[str] = []
    if len(pieces) > 1 and re.search(r"[\d_@.]", token):
        terms.append(token.casefold()[:MAX_TERM_CHARS])
    for piece in pieces:
        terms.extend(_piece_terms(piece))
    return terms


def _piece_terms(piece: str) -> Iterable[str]:
    word = piece.casefold()
    if word in _STOP_EN:
        return
    word = _SUFFIX.sub("", word).replace("'", "")[:MAX_TERM_CHARS]
    if not word or word in _STOP_EN:
        return
    ordinal = _ORDINAL.fullmatch(word)
    if ordinal:
        yield ordinal[1]
        return
    stem = _stem(_plain(word))
    if stem:
        yield stem
    parts = _CAMEL.findall(piece) if piece.isalnum() and piece.isascii() else []
    if len(parts) > 1:
        for part in parts:
            small = part.casefold()[:MAX_TERM_CHARS]
            if small not in _STOP_EN:
                yield _stem(_plain(small))


def _plain(word: str) -> str:
    """Without accents, as people type names both ways; other scripts keep their marks."""
    if word.isascii():
        return word
    bare = "".join(c for c in unicodedata.normalize("NFD", word) if not "\u0300" <= c <= "\u036f")
    return unicodedata.normalize("NFC", bare)


def _run_terms(run: str) -> Iterable[str]:
    # Single characters beside the pairs: words of one character (猫, 茶) and short forms (老秦的厂, 工厂) meet; on our
    # own Chinese chat .72 → .78 of questions had all evidence within 1 000 tokens.
    for piece in _SPLIT_ZH.split(run.casefold()):
        yield from piece
        for i in range(len(piece) - 1):
            yield piece[i : i + 2]


def day_label(when: datetime) -> str:
    """A day as people write it.

    Args:
        when: A time; its own zone decides the day.

    Returns:
        For instance `8 May 2023`, whatever the machine's locale.
    """
    return f"{when.day} {MONTHS[when.month - 1]} {when.year}"


def day_terms(when: datetime) -> dict[str, int]:
    """What a day adds to the BM25 key of what was said on it, in English and Chinese.

    Args:
        when: A time; its own zone decides the day.

    Returns:
        Terms as `analyse` gives them: day, month, year, and 2023年, 5月, 8日.
    """
    return analyse(f"{day_label(when)}, {when.year}年{when.month}月{when.day}日")


def message_terms(text: str, *, speaker: str = "", when: datetime | None = None) -> dict[str, int]:
    """The BM25 key of a message.

    Args:
        text: What was said.
        speaker: Who said it.
        when: When, in the speaker's zone.

    Returns:
        Terms of text, speaker and day, `QUESTION` when the message ends by asking, and what it tells (`wanted`).
    """
    found = Counter(analyse(text))
    found.update(analyse(speaker))
    if when is not None:
        found.update(day_terms(when))
    if _ASKS.search(text[-MAX_DATED_CHARS:]):
        found[QUESTION] = 1
    found.update(told_in(text[:MAX_ANALYSED_CHARS]))
    return dict(found)


ROLES_ZH = {"assistant": ("助手", "助理"), "user": ("用户",)}
"""What chat roles are called in Chinese."""
_NO_NAMES = frozenset({*_STOP_EN, *(role.value for role in MessageRole), *(month.casefold() for month in MONTHS)})
_MOST_SPEAKERS, _MOST_NAME_WORDS, _FEWEST_TERMS_LEFT = 1_000, 6, 2
_WORD, _POSSESSIVE, _NO_SPACES = re.compile(r"\w+"), re.compile("['\u2019]s\\b"), re.compile(f"[{_UNSPACED}]")


def mentions(text: str, speakers: Iterable[str]) -> frozenset[str]:
    """Which speakers a text names.

    Args:
        text: A question.
        speakers: Names as stored.

    Returns:
        Those whose name, or its first word, stands in the text as a whole word, in any case, possessive or not;
        a name in Chinese, Japanese or Korean may stand anywhere. The roles `assistant` and `user` are known in
        Chinese too.
    """
    folded = text.casefold()
    words = set(_WORD.findall(folded))
    found = set()
    for speaker in speakers:
        name = speaker.strip().casefold()
        if any(alias in folded for alias in ROLES_ZH.get(name, ())):
            found.add(speaker)
        parts = _WORD.findall(name)
        if not parts:
            continue
        if (_NO_SPACES.search(name) and name in folded) or parts[0] in words:
            found.add(speaker)
    return frozenset(found)


def without_names(text: str, speakers: Iterable[str]) -> str:
    """A question without the people whom it names.

    Args:
        text: A question.
        speakers: Names as stored. Left in the text are roles, names that begin with an everyday word, a month or a
            number, what is written small, and those beyond the first thousand.

    Returns:
        The rest, each name gone with the space before it, or the whole text when hardly anything is in the rest.
    """
    spans = sorted(_named_at(text, islice(speakers, _MOST_SPEAKERS)))
    if not spans:
        return text
    rest, end = "", 0
    for start, stop in spans:
        rest += text[end:start].rstrip(" ")  # nothing, where names overlap
        end = max(end, stop)
    rest = (rest + text[end:]).lstrip()
    return rest if len(analyse(rest)) >= _FEWEST_TERMS_LEFT else text


def _named_at(text: str, speakers: Iterable[str]) -> Iterable[tuple[int, int]]:
    """Where a text names speakers."""
    by_first: dict[str, list[list[str]]] = {}
    for speaker in speakers:
        name = speaker.strip()
        if len(name) > 1 and _NO_SPACES.search(name):
            start = text.find(name)
            while start >= 0:
                yield start, start + len(name)
                start = text.find(name, start + len(name))
        elif words := _WORD.findall(name.casefold()):
            by_first.setdefault(words[0], []).append(words[1:_MOST_NAME_WORDS])
    words = list(_WORD.finditer(text)) if by_first else []
    for at, word in enumerate(words):
        first = word[0].casefold()
        if first not in by_first or first in _NO_NAMES or first.isdigit() or word[0][0].islower():
            continue
        following = [one[0].casefold() for one in words[at + 1 : at + _MOST_NAME_WORDS]]
        whole = max((len(more) for more in by_first[first] if more == following[: len(more)]), default=0)
        end = words[at + whole].end()
        possessive = _POSSESSIVE.match(text, end)
        yield word.start(), possessive.end() if possessive else end


_ENTITY = re.compile(r"&(?:#\d+;?|#[xX][0-9a-fA-F]+;?|[^\t\n\f <&#;]{1,32};?)")
_TAG = re.compile(r"<(?=[^\W\d]|[!?|]|\s*/)")
_BREAK = re.compile("\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_RARE = re.compile(f"{_BREAK.pattern}|{_CONTROL.pattern}|{_SURROGATE.pattern}")


def escape(text: str) -> str:
    """Make stored text inert inside a `<memory>` section.

    It opens and closes no tag and forges no mark of a chat template such as `<|im_start|>`; as its further lines are
    indented by two spaces, no line of it can pose as another speaker's. `html.unescape` gives a text without line
    breaks, control characters and lone surrogates back unchanged.

    Args:
        text: What somebody said.

    Returns:
        The same to a reader, harmless to a parser.
    """
    clean = text
    if _RARE.search(clean):  # one look instead of three: a context escapes hundreds of messages
        clean = _CONTROL.sub("", _BREAK.sub("\n", _SURROGATE.sub("\ufffd", clean)))
    if "&" in clean:
        clean = _ENTITY.sub(_inert_entity, clean)
    if "<" in clean:
        clean = _TAG.sub("&lt;", clean)
    return clean.replace("\n", "\n  ")


def _inert_entity(match: re.Match[str]) -> str:
    found = match[0]
    return "&amp;" + found[1:] if html.unescape(found) != found else found
