"""Read by rule which times a text names, in English and Chinese."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from llama_index_memory_tiers.moments import aware

MAX_DATED_CHARS = 20_000
"""Dates are looked for in this much of a question: 10 000 words stay bounded."""

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


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


def number(text: str) -> int:
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
_MONTH_NUMBER = {name.casefold()[:3]: i for i, name in enumerate(MONTHS, 1)}
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
    year = number(part["year"]) if part.get("year") else None
    if part.get("rel"):
        year = now.year + _SHIFT_YEARS[part["rel"]]
    name = part.get("month")
    month = (_MONTH_NUMBER.get(name[:3].casefold()) or number(name)) if name else None
    day = number(part["day"]) if part.get("day") else None
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
    return _shifted(now, -number(match["n"]), match["unit"].casefold())


def _read_ahead(match: re.Match[str], now: datetime) -> DateHint | None:
    return _shifted(now, number(match["n"]), match["unit"].casefold())


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
