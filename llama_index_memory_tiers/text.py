"""Read and write plain text by rule: terms for BM25, dates in words, names, escaping."""

from __future__ import annotations

import html
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import Stemmer

from llama_index_memory_tiers.records import aware

MAX_ANALYSED_CHARS = 100_000
"""A longer message is found by its beginning; this much takes 0.2 s to analyse."""

MAX_TERM_CHARS = 64
"""Longer terms are base64 or the like: cut, so that one message cannot fill an index."""

MAX_DATED_CHARS = 20_000
"""Dates are looked for in this much of a question: 10 000 words stay bounded."""

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

_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip

_local = threading.local()


def _stem(word: str) -> str:
    # A Snowball stemmer holds its own buffers: one per thread.
    stemmer = getattr(_local, "stemmer", None)
    if stemmer is None:
        stemmer = _local.stemmer = Stemmer.Stemmer("english")
    return str(stemmer.stemWord(word))


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
            found[f"{_number(token[:-1])}{token[-1].replace('号', '日')}"] += 1
    return dict(found)


def _word_terms(token: str) -> Iterable[str]:
    iso = _ISO_DATE.fullmatch(token)
    if iso:
        year, month, day = map(int, iso.groups())
        if 1 <= month <= len(_MONTHS):
            return [token, str(year), _stem(_MONTHS[month - 1].casefold()), str(day)]
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
    return f"{when.day} {_MONTHS[when.month - 1]} {when.year}"


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
        Terms of text, speaker and day, and `QUESTION` when the message ends by asking.
    """
    found = Counter(analyse(text))
    found.update(analyse(speaker))
    if when is not None:
        found.update(day_terms(when))
    if _ASKS.search(text[-MAX_DATED_CHARS:]):
        found[QUESTION] = 1
    return dict(found)


_ROLES_ZH = {"assistant": ("助手", "助理"), "user": ("用户",)}


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
    words = set(re.findall(r"\w+", text.casefold()))
    folded = text.casefold()
    found = set()
    for speaker in speakers:
        name = speaker.strip().casefold()
        if any(alias in folded for alias in _ROLES_ZH.get(name, ())):
            found.add(speaker)
        parts = re.findall(r"\w+", name)
        if not parts:
            continue
        unspaced = re.search(f"[{_UNSPACED}]", name)
        if (unspaced and name in folded) or parts[0] in words:
            found.add(speaker)
    return frozenset(found)


_ENTITY = re.compile(r"&(?:#\d+;?|#[xX][0-9a-fA-F]+;?|[^\t\n\f <&#;]{1,32};?)")
_TAG = re.compile(r"<(?=[^\W\d]|[!?|]|\s*/)")
_BREAK = re.compile("\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")


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
    clean = _SURROGATE.sub("\ufffd", text)
    clean = _CONTROL.sub("", _BREAK.sub("\n", clean))
    clean = _ENTITY.sub(_inert_entity, clean)
    return _TAG.sub("&lt;", clean).replace("\n", "\n  ")


def _inert_entity(match: re.Match[str]) -> str:
    found = match[0]
    return "&amp;" + found[1:] if html.unescape(found) != found else found


@dataclass(frozen=True, slots=True)
class DateHint:
    """A date that a question names.

    Args:
        since: Start of the time meant; without a year, of the latest such time that has begun.
        until: Its end, exclusive.
        year: The year, when one is given or implied.
        month: The month, 1 to 12, when the time lies in one.
        day: The day of the month, when the time is one day.
    """

    since: datetime
    until: datetime
    year: int | None = None
    month: int | None = None
    day: int | None = None

    def spans(self, first: int, last: int) -> list[tuple[datetime, datetime]]:
        """The times meant, between two years.

        Args:
            first: First year.
            last: Last year, inclusive.

        Returns:
            Pairs of start and end: one when the year is known, else one for each year.
        """
        if self.year is not None or self.month is None:
            return [(self.since, self.until)]
        zone = self.since
        found = (_calendar(zone, year, self.month, self.day) for year in range(first, last + 1))
        return [(hint.since, hint.until) for hint in found if hint is not None]


def _calendar(zone: datetime, year: int, month: int | None, day: int | None) -> DateHint | None:
    """A day, month or year of the calendar in the zone of `zone`; `None` when there is no such day."""
    try:
        since = zone.replace(year, month or 1, day or 1, hour=0, minute=0, second=0, microsecond=0)
        if day is not None:
            until = since + timedelta(days=1)
        elif month is not None:
            until = since.replace(year=year + month // 12, month=month % 12 + 1)
        else:
            until = since.replace(year=year + 1)
    except (ValueError, OverflowError):
        return None
    return DateHint(since, until, year, month, day)


def _yearless(now: datetime, month: int, day: int | None) -> DateHint | None:
    """The latest such day or month that has begun, with its year left open."""
    # Eight years hold a 29 February wherever they begin.
    for year in range(now.year, max(0, now.year - 9), -1):
        hint = _calendar(now, year, month, day)
        if hint is not None and hint.since <= now:
            return DateHint(hint.since, hint.until, None, month, day)
    return None


def _day(now: datetime, days: int) -> DateHint | None:
    try:
        when = now + timedelta(days=days)
    except OverflowError:
        return None
    return _calendar(now, when.year, when.month, when.day)


def _days(now: datetime, start: int, length: int) -> DateHint | None:
    """`length` days from `start` days after today, as a time without calendar parts."""
    first, last = _day(now, start), _day(now, start + length - 1)
    return DateHint(first.since, last.until) if first and last else None


def _month(now: datetime, months: int) -> DateHint | None:
    count = now.year * 12 + now.month - 1 + months
    return _calendar(now, count // 12, count % 12 + 1, None)


_DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "几": 3}
_NUMBERS_EN = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_VAGUE = {"a": 1, "an": 1, "couple of": 2, "a couple of": 2, "few": 3, "a few": 3}
_WORDS = {word: i for i, word in enumerate(_NUMBERS_EN)} | _VAGUE


def _number(text: str) -> int:
    """A number in digits, English words up to ten, or Chinese numerals up to 99 or digit by digit."""
    text = text.strip().casefold()
    if text.isdecimal():
        return int(text)
    if text in _WORDS:
        return _WORDS[text]
    tens, ten, ones = text.partition("十")
    if ten:
        return _DIGITS.get(tens, 1) * 10 + _DIGITS.get(ones, 0)
    return int("".join(str(_DIGITS.get(c, 0)) if not c.isdecimal() else c for c in text) or 0)


_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_MONTH_NUMBER = {name.casefold()[:3]: i for i, name in enumerate(_MONTHS, 1)}
_STEP = {
    "last": -1,
    "past": -1,
    "previous": -1,
    "this": 0,
    "next": 1,
    "上上": -2,
    "下下": 2,
    "上": -1,
    "这": 0,
    "本": 0,
    "下": 1,
}
_SHIFT_DAYS = {
    "today": 0, "tonight": 0, "yesterday": -1, "tomorrow": 1, "the day before yesterday": -2,
    "this morning": 0, "this afternoon": 0, "this evening": 0, "last night": -1, "the day after tomorrow": 2,
    "今天": 0, "今晚": 0, "昨天": -1, "昨晚": -1, "前天": -2, "大前天": -3, "明天": 1, "后天": 2,
    "今日": 0, "今早": 0, "昨日": -1, "前晚": -2, "明日": 1, "明早": 1, "明晚": 1, "大后天": 3,
}  # fmt: skip
_SHIFT_YEARS = {"去年": -1, "今年": 0, "明年": 1, "前年": -2}

_M = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_D, _Y = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?P<year>(?:19|20)\d\d)"
_N = r"(?P<n>\d{1,4}|an?|one|two|three|four|five|six|seven|eight|nine|ten|(?:a )?(?:few|couple of))"
_ZN = r"[0-9一二三四五六七八九十]{1,3}"
_ZY = r"(?:(?P<year>[0-9〇零一二三四五六七八九]{4})年|(?P<rel>去年|今年|明年|前年)的?)"


def _read_parts(match: re.Match[str], now: datetime) -> DateHint | None:
    """Year, month and day as far as they are named."""
    part = match.groupdict()
    year = _number(part["year"]) if part.get("year") else None
    if part.get("rel"):
        year = now.year + _SHIFT_YEARS[part["rel"]]
    name = part.get("month")
    month = (_MONTH_NUMBER.get(name[:3].casefold()) or _number(name)) if name else None
    day = _number(part["day"]) if part.get("day") else None
    if year is None:
        return _yearless(now, month, day) if month else None
    return _calendar(now, year, month, day)


def _read_may(match: re.Match[str], now: datetime) -> DateHint | None:
    """A month alone; "may" and "march" are also verbs, so they need a preposition or a capital inside a text."""
    name, lead = match["month"], match["lead"]
    verb = name.casefold().rstrip(".") in {"may", "mar", "march"}
    if verb and not lead and (name[0].islower() or match.start() == 0):
        return None
    step = _STEP.get((lead or "").strip().casefold())
    hint = _read_parts(match, now)
    if hint is None or hint.month is None or step != 1:
        return hint
    return _calendar(now, now.year + (hint.month <= now.month), hint.month, None)


def _read_step(match: re.Match[str], now: datetime) -> DateHint | None:
    """Last, this or next day of the week, week, month or year."""
    step, unit = _STEP[match["step"].casefold()], match["unit"].casefold()
    monday = -now.weekday() + 7 * step
    if unit in {"week", "周", "星期", "礼拜"}:
        return _days(now, monday, 7)
    if unit in {"weekend", "周末"}:
        return _days(now, monday + 5, 2)
    if unit in {"month", "月"}:
        return _month(now, step)
    if unit in {"year", "年"}:
        return _calendar(now, now.year + step, None, None)
    if unit in _WEEKDAYS:
        # In English "last Friday" is the latest one before today, "next Friday" the first one after.
        ahead = (_WEEKDAYS.index(unit) - now.weekday()) % 7
        days = {-1: ahead - 7, 0: monday + _WEEKDAYS.index(unit), 1: ahead or 7}
        return _day(now, days[step])
    return _day(now, monday + "一二三四五六日".index(unit[-1].replace("天", "日")))


def _read_weekday(match: re.Match[str], now: datetime) -> DateHint | None:
    """`on Friday`: the latest one that has begun."""
    return _day(now, -((now.weekday() - _WEEKDAYS.index(match["unit"].casefold())) % 7))


def _read_ago(match: re.Match[str], now: datetime) -> DateHint | None:
    return _shifted(now, -_number(match["n"]), match["unit"].casefold())


def _read_ahead(match: re.Match[str], now: datetime) -> DateHint | None:
    return _shifted(now, _number(match["n"]), match["unit"].casefold())


def _shifted(now: datetime, count: int, unit: str) -> DateHint | None:
    """So many days, weeks, months or years before (negative) or after now."""
    if unit in {"day", "天", "日"}:
        return _day(now, count)
    if unit in {"week", "周", "星期", "礼拜"}:
        return _days(now, -now.weekday() + 7 * count, 7)
    if unit in {"month", "月"}:
        return _month(now, count)
    return _calendar(now, now.year + count, None, None)


def _read_named(match: re.Match[str], now: datetime) -> DateHint | None:
    return _day(now, _SHIFT_DAYS[match[0].casefold()])


_NAMED_DAYS = (
    r"\bthe day (?:before yesterday|after tomorrow)\b|\bthis (?:morning|afternoon|evening)\b"
    r"|\blast night\b|\b(?:today|tonight|yesterday|tomorrow)\b"
)
_Reader = Callable[[re.Match[str], datetime], "DateHint | None"]
# In order: what was read once is not read again by a later, shorter rule.
_RULES: tuple[tuple[re.Pattern[str], _Reader], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), reader)
    for pattern, reader in (
        (r"(?<!\d)(?P<year>\d{4})[-/.](?P<month>\d{1,2})[-/.](?P<day>\d{1,2})(?!\d)", _read_parts),
        (rf"\b{_D}(?: of)? {_M}(?:,? {_Y}\b)?", _read_parts),
        (rf"\b{_M} {_D}\b(?:,? {_Y}\b)?", _read_parts),
        (rf"\b{_M},?(?: of)? {_Y}\b", _read_parts),
        (rf"{_ZY}(?:(?P<month>{_ZN})月(?:份|(?:的)?(?P<day>{_ZN})[日号])?)?", _read_parts),
        (rf"(?<![个\d])(?P<month>{_ZN})月(?:份|(?P<day>{_ZN})[日号]|(?!前|后))", _read_parts),
        (r"\b(?P<step>last|past|previous|this|next) (?P<unit>weekend|week|month|year|\w+day)\b", _read_step),
        (
            r"(?P<step>上上|下下|[上这本下])个?(?P<unit>周末|(?:周|星期|礼拜)[一二三四五六日天]|周|星期|礼拜|月)",
            _read_step,
        ),
        (rf"\b{_N} (?P<unit>day|week|month|year)s? ago\b", _read_ago),
        (r"(?P<n>\d{1,4}|[一二两三四五六七八九十几]{1,3})个?(?P<unit>天|日|周|星期|礼拜|月|年)(?:之|以)?前", _read_ago),
        (rf"\bin {_N} (?P<unit>day|week|month|year)s?\b(?! of)", _read_ahead),
        (
            r"(?P<n>\d{1,4}|[一二两三四五六七八九十几]{1,3})个?(?P<unit>天|日|周|星期|礼拜|月|年)(?:之|以)?后",
            _read_ahead,
        ),
        (_NAMED_DAYS, _read_named),
        (r"大前天|大后天|[前昨今明][天晚]|[昨今明]日|[今明]早|后天", _read_named),
        (rf"(?P<lead>\b(?:in|last|this|next|since|by|during|of|early|late|mid|until|from) )?\b{_M}", _read_may),
        (rf"\bon (?P<unit>{'|'.join(_WEEKDAYS)})\b", _read_weekday),
        (rf"(?<![\w.,-]){_Y}(?![\w-]|[.,]\d)", _read_parts),
    )
)


_RELATIVE = frozenset({_read_step, _read_weekday, _read_ago, _read_ahead, _read_named})


@dataclass(frozen=True, slots=True)
class FoundDate:
    """A date in a text.

    Args:
        start: Where its words begin.
        end: Where they end.
        hint: What they mean.
        relative: Whether that depends on the day on which they were said.
    """

    start: int
    end: int
    hint: DateHint
    relative: bool


def find_dates(text: str, now: datetime) -> list[FoundDate]:
    """Dates in a text with their places, in its order.

    Args:
        text: Best normalised by NFKC; its first 20 000 characters are read.
        now: When it was said, aware.

    Returns:
        The dates; impossible ones are left out.
    """
    left = text[:MAX_DATED_CHARS]
    found: list[FoundDate] = []
    for pattern, reader in _RULES:
        for match in list(pattern.finditer(left)):
            try:
                hint = reader(match, now)
            except (ValueError, OverflowError):
                hint = None
            if hint is None:
                continue
            relative = reader in _RELATIVE or bool(match.groupdict().get("rel"))
            found.append(FoundDate(match.start(), match.end(), hint, relative))
            left = left[: match.start()] + "\x00" * len(match[0]) + left[match.end() :]
    return sorted(found, key=lambda one: one.start)


def read_dates(text: str, now: datetime) -> tuple[DateHint, ...]:
    """Dates that a question names, in English or Chinese, read by rule.

    Args:
        text: The question; its first 20 000 characters are read.
        now: The moment of asking; its zone is the zone of the answer, a naive one is UTC.

    Returns:
        Hints in the order of the text, each time once; impossible dates are left out.
    """
    found = find_dates(unicodedata.normalize("NFKC", text[:MAX_DATED_CHARS]), aware(now))
    return tuple(dict.fromkeys(one.hint for one in found))
