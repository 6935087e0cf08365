"""What a question wants to hear, and which messages tell it: a time, a number."""

from __future__ import annotations

import re

from llama_index_memory_tiers.dates import MONTHS

TIME, NUMBER = "?time", "?number"
"""Terms of a message that tells one; `analyse` never gives them, so no question finds them by BM25."""

_HELPS = "did|do|does|is|was|were|are|am|will|would|has|have|had|can|could|should|shall"
_HOW_LONG, _HOW_LONG_ZH = r"\bhow long\b", "多久|多长时间"
_WANTS = {
    TIME: re.compile(
        rf"(?i)^\W*when\b|\bwhen(?:['\u2019]s| (?:{_HELPS}))\b|\b(?:what|which) (?:date|day|month|year|time)\b"
        rf"|{_HOW_LONG}|什么时候|何时|哪天|哪年|几号|几点|{_HOW_LONG_ZH}"
    ),
    NUMBER: re.compile(rf"(?i)\bhow (?:many|much|old|often)\b|{_HOW_LONG}|(?<!茶)几(?!乎)|多少|多大|{_HOW_LONG_ZH}"),
}
_UNITS = "(?:second|minute|hour|day|night|week|weekend|month|year|decade)s?"
_DAYS = "(?:mon|tues|wednes|thurs|fri|satur|sun)days?"
_MONTHS = "|".join(month for month in MONTHS if month != "May")  # which is a verb as well
_SEASONS = "summer|winter|spring|autumn"
_TELLS = {
    TIME: re.compile(
        rf"(?i)\b(?:yesterday|today|tonight|tomorrow|ago|recently|since|{_UNITS}|{_DAYS}|{_MONTHS}|{_SEASONS}"
        r"|morning|noon|afternoon|evening|midnight|o'clock|(?:19|20)\d\d|\d{1,2}:\d\d)\b|\b(?:in|this|last|next) fall\b"
        r"|\b(?:in|this|last|next|since|until|early|late|mid) may\b|\bmay \d|\b\d{1,2}(?:st|nd|rd|th)? (?:of )?may\b"
        r"|[昨今明前后]天|上周|下周|上个?月|下个?月|[去今明前]年|星期|周末|[0-9一二三四五六七八九十][年月日号点]|小时|分钟|早上|晚上"
    ),
    NUMBER: re.compile(
        r"(?i)\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|dozen|couple|few|once|twice)\b"
        r"|[二两三四五六七八九十百千万]|一(?=[个只次年岁天元块本条张位件间台辆部杯碗斤公小分页层])"
    ),
}


def wanted_by(question: str) -> tuple[str, ...]:
    """Terms of the messages that tell what a question wants: `TIME`, `NUMBER`, both or none."""
    return tuple(kind for kind, wants in _WANTS.items() if wants.search(question))


def told_in(text: str) -> tuple[str, ...]:
    """Which of `TIME` and `NUMBER` a message tells."""
    return tuple(kind for kind, tells in _TELLS.items() if tells.search(text))
