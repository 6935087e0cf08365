"""What a question wants to hear, and which messages tell it: a time, a number."""

from __future__ import annotations

import re

TIME, NUMBER = "?time", "?number"
"""Terms of a message that tells one; `analyse` never gives them, so no question finds them by BM25."""

_WHEN_ZH, _MANY_ZH = "什么时候|何时|哪天|哪年|几号|几点|多久", "几|多少|多大"
_ASKS = {
    TIME: re.compile(rf"(?i)\bwhen\b|\b(?:what|which) (?:date|day|month|year|time)\b|\bhow long\b|{_WHEN_ZH}"),
    NUMBER: re.compile(rf"(?i)\bhow (?:many|much|old|often)\b|{_MANY_ZH}"),
}
_TELLS = {
    TIME: re.compile(
        r"(?i)\b(?:yesterday|today|tonight|tomorrow|last|next|ago|weeks?|weekend|months?|years?|mon|tues|wednes|thurs|fri"
        r"|satur|sun)(?:day)?s?\b|\b(?:january|february|march|april|june|july|august|september|october|november"
        r"|december|morning|recently|soon|since|summer|winter|fall|spring|autumn|(?:19|20)\d\d)\b"
        r"|昨天|今天|明天|前天|后天|上周|下周|上个?月|下个?月|去年|今年|明年|星期|周末|[0-9一二三四五六七八九十][年月日号点]"
    ),
    NUMBER: re.compile(
        r"(?i)\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|dozen|couple|few|once|twice)\b"
        r"|[一二两三四五六七八九十百千万]"
    ),
}


def asked_for(question: str) -> tuple[str, ...]:
    """Terms of the messages that tell what a question asks for: `TIME`, `NUMBER`, both or none."""
    return tuple(kind for kind, asks in _ASKS.items() if asks.search(question))


def told_in(text: str) -> tuple[str, ...]:
    """Which of `TIME` and `NUMBER` a message tells."""
    return tuple(kind for kind, tells in _TELLS.items() if tells.search(text))
