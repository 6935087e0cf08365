"""Judge whether a word that stands where a secret would stand is one."""

from __future__ import annotations

import re

# A keyword alone proves little ("my password is too short"), so the word after it is judged. A candidate above
# _LONG is always taken: each refusal means scanning it again, and this keeps the work linear.

_LONG = 64
_EDGE = "*_.,;:!?()[]{}<>\"'`"

# What stands for a value in code, forms and documentation.
_UNSET_WORDS = """
    none null nil true false undefined empty blank default required optional mandatory hidden masked redacted
    string str int integer text bytes varchar char example sample placeholder unset unknown todo tbd n/a
"""
# What people say about a password; grammar; the words that follow a colon in a form or a list.
_ORDINARY_WORDS = """
    wrong right correct incorrect invalid valid weak strong stronger secure insecure safe unsafe long short
    longer shorter complex simple easy hard tough good bad better best fine okay great older newer same
    different unique random secret private public personal confidential important necessary critical essential
    enough ready gone lost missing here there below above elsewhere stale obsolete broken dead alive
    case-sensitive alphanumeric numeric plaintext plain-text cleartext up-to-date out-of-date unusual memorable
    history again already also always anything anyone everything everyone someone something nothing nobody
    somewhere what when where which while whose with without from into this that these those their them they
    your yours mine ours hers theirs only just never often once still then than more less most least very quite
    rather really simply usually sometimes likely perhaps probably actually about after before because being
    between both could does done each either ever every have having itself myself should would must please click
    contact reset forgot forgotten change changed enter leave email e-mail username phone account login support
    password passwords passcode passphrase token security authentication policy manager managers others another
    people yesterday today tomorrow
"""
_UNSET = frozenset(_UNSET_WORDS.split())
_ORDINARY = _UNSET.union(_ORDINARY_WORDS.split())
_DESCRIBING = re.compile(r"\w+(?:ed|ing|able|ible|ous|ful|less|ly|ive|ity|ness|tion|ment|wise)")
_ALGORITHM = re.compile(
    r"(?:hmac|sha|md|aes|rsa|utf|wpa|tls|ssl|ed|hs|rs|es)[-_]?\d+\S*|[1l]password\S*|[2m]fa\S*|x\.?509\S*"
    r"|(?:base64|base32|pbkdf2|argon2|bcrypt|scrypt|oauth|fido|totp|ipv)\S*"
)
_QUANTITY = re.compile(
    r"[~<>≥≤]?\d{1,3}(?:[-–—]\d{1,3})?[+%]?"
    r"|\d+[-–]?(?:st|nd|rd|th|times?|[xk]|[kmg]b|(?:char|letter|digit|bit|byte|min|hour|day|week|month|year|word)\w*)"
)
_CODE = re.compile(
    r"(?s:\$\{.*|\$\(.*|\{\{?.*|<.*|%\(.*|[a-z_][\w.]*\(.*|https?:.*|\\[nrt].*|[*•x·.#?_-]+"
    r"|(?:os|process|self|config|settings|env|args|cfg|secrets|app)[.\[].*)"
)
_CLAUSE_END = re.compile(r"[\"'`”’)\]}*]*[ \t]*(?:[.,;:!?，。；！？、\r\n]|$|(?:and|but|or|so|if|now)\b)")


def unset(value: str) -> bool:
    """Tell whether a value stands for none: `null`, `<your key>`, `os.environ[…]`."""
    word = value.lower().strip(_EDGE)
    return len(word) < 3 or word in _UNSET or bool(_CODE.fullmatch(value.lower()))  # noqa: PLR2004 -- no protection


def _ordinary(value: str) -> bool:
    word = value.lower().strip(_EDGE)
    return unset(value) or word in _ORDINARY or bool(_ALGORITHM.fullmatch(word) or _QUANTITY.fullmatch(word))


def _made_up(value: str) -> bool:
    """Tell whether it holds a digit or a sign that no word of a language holds."""
    return any(c.isdigit() or c in "@#$%^&*_+=~|\\!" for c in value.strip(_EDGE))


def _between(match: re.Match[str]) -> str:
    return match.string[match.end("kw") : match.start("secret")]


def is_password(match: re.Match[str]) -> bool:
    """Judge the word after a keyword such as `password`."""
    value, between = match["secret"], _between(match)
    if len(value) > _LONG:
        return True
    if "=" in between or "＝" in between:
        return not unset(value)
    if _ordinary(value):
        return False
    if _made_up(value):
        return len(value) > 3  # noqa: PLR2004 -- "12" is a count, "4821" opens a door
    if between.endswith(" to ") and not between.endswith((" changed to ", " set to ")):
        return False  # "gave the password to Michael"
    word = value.lower()
    plain = len(word) < 5 or bool(_DESCRIBING.fullmatch(word))  # noqa: PLR2004 -- shorter words are nearly all grammar
    return not plain and bool(_CLAUSE_END.match(match.string, match.end()))


def is_token(match: re.Match[str]) -> bool:
    """Judge the word after a keyword such as `api key`."""
    value, between = match["secret"], _between(match)
    if len(value) > _LONG:
        return True
    if "=" in between or "＝" in between:
        return is_named_token(value)
    digits, letters = any(map(str.isdigit, value)), any(map(str.isalpha, value))
    long = len(value) >= (8 if digits and letters else 16)  # years, counts and most words are shorter
    return long and (digits or not value[1:].islower()) and not _ordinary(value)


def is_named_token(value: str) -> bool:
    """Judge what stands under an unmistakable name: limits, counts and the words of code are shorter."""
    return len(value) > 5 and not unset(value) and not (value.isdigit() and len(value) < 8)  # noqa: PLR2004


def is_quoted_password(match: re.Match[str]) -> bool:
    """Judge what stands in quotes after `password`."""
    value = match["secret"]
    plain = unset if set(_between(match)) & set("=:＝：-") else _ordinary
    return len(value) > _LONG or not plain(value)


def is_quoted_token(match: re.Match[str]) -> bool:
    """Judge what stands in quotes after `token`."""
    return len(match["secret"]) > _LONG or is_named_token(match["secret"])


def is_made_up(match: re.Match[str]) -> bool:
    """Judge a word that stands near `password` without a verb or sign between them."""
    value = match["secret"]
    return len(value) > _LONG or (_made_up(value) and not _ordinary(value))


def is_sk(match: re.Match[str]) -> bool:
    """Tell a key from a hyphenated name such as the one of a Python package beginning with `sk-`."""
    run = max(re.findall(r"[A-Za-z0-9]+", match[0]), key=len)
    return len(match[0]) > _LONG or len(run) >= (20 if run.islower() else 12)


def is_bearer(match: re.Match[str]) -> bool:
    """Judge the word after `bearer`."""
    value = match["secret"]
    return len(value) >= (8 if any(c.isdigit() for c in value) else 20)


_ZH_ORDINARY = re.compile(
    "一|不|必|请|需|由|什么|多少|怎么|哪|谁|用来|最|我|你|他|她|它|安全|保护|为|空|错|对|正确|选填|默认|随机|自动|加密"
    "|重要|重置|登录|密码|强|弱|太|很|比较|没|有|无|同|个|两|三|四|五|六|七|八|九|十|可以|能|会|应|要|按|通过|旧|新|区分"
    "|已|未|在|从|和|或|被|进入|打开|通行|身份"
)
_ZH_AFTER = re.compile(
    "[ ]?(?:[年月日号位个次天分种项条]|小时|字符|字节|加密|格式|算法|类型|字段|模式|哈希|方式|签名|协议|编码|标准)"
)


def is_chinese_password(match: re.Match[str]) -> bool:
    """Judge what stands after 密码 and its like."""
    value = match["secret"]
    if len(value) > _LONG:
        return True
    if "\u4e00" <= value[0] <= "\u9fff":
        return "的" not in value and not _ZH_ORDINARY.match(value)
    if _ordinary(value) or _ZH_AFTER.match(match.string, match.end()):
        return False
    return _made_up(value) or (len(value) > 4 and bool(_between(match).strip()))  # noqa: PLR2004 -- "RSA", "null"


def is_card(match: re.Match[str]) -> bool:
    """Tell the number of a payment card by its check digit (Luhn, ISO/IEC 7812-1) and the length of its brand."""
    digits = [int(character) for character in match[0] if character.isdigit()]
    if len(set(digits)) < 3:  # noqa: PLR2004 -- 4444 4444 4444 4444 and the like are no cards
        return False
    doubled = [digit if at % 2 == 0 else sum(divmod(2 * digit, 10)) for at, digit in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0
