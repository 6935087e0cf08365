"""Replace secrets in text, messages and JSON-like values by placeholders."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2s
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, DocumentBlock
from pydantic import AnyUrl, BaseModel

from llama_index_memory_tiers.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Model = TypeVar("_Model", bound=BaseModel)

_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")
# In a URL that has been parsed, the brackets and colons are percent-encoded.
_PLACEHOLDER = re.compile(r"((?:\[|%5B)REDACTED(?::|%3A)[a-z][a-z0-9-]{0,31}(?::|%3A)[0-9a-f]{6}(?:\]|%5D))")
_DEFAULT_KEY = b"llama-index-memory-tiers"


@dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of secret and how it looks.

    Args:
        kind: Name shown in the placeholder: lower-case letters, digits and hyphens, at most 32.
        regex: Its group `secret`, or else the whole match, is replaced.
        hints: Lower-case literals of which the text must contain one before the expression runs, so that clean
            text costs little; empty (the default) means that it runs on every text.
        accept: Judges a match; `None` (the default) takes every match.

    Raises:
        ConfigurationError: The kind cannot stand in a placeholder, or a hint could never be found.
    """

    kind: str
    regex: re.Pattern[str]
    hints: tuple[str, ...] = ()
    accept: Callable[[re.Match[str]], bool] | None = None

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise ConfigurationError(
                f"Pattern kind={self.kind!r} was given.",
                allowed="A kind is lower-case letters, digits and hyphens, at most 32, a letter first.",
                remedy="Choose a kind such as 'employee-number'.",
            )
        if any(not hint or hint != hint.lower() for hint in self.hints):
            raise ConfigurationError(
                f"Pattern hints={self.hints!r} were given.",
                allowed="Hints are searched in the lower-cased text: each is lower-case and not empty.",
                remedy="Write the hints in lower case, or leave them out.",
            )

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Find its secrets.

        Args:
            text: Text without placeholders.

        Yields:
            Start and end of each secret, in order, not overlapping.
        """
        group: str | int = "secret" if "secret" in self.regex.groupindex else 0
        at = 0
        while at < len(text) and (match := self.regex.search(text, at)):
            start, end = match.span(group)
            if end > start and (self.accept is None or self.accept(match)):
                yield start, end
                at = end
            else:  # what is no secret may hold the next keyword: "token: password: …"
                at = max(start, match.start() + 1)


# --- Is this word a secret? -------------------------------------------------------------------------------------
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


def _unset(value: str) -> bool:
    word = value.lower().strip(_EDGE)
    return len(word) < 3 or word in _UNSET or bool(_CODE.fullmatch(value.lower()))  # noqa: PLR2004 -- no protection


def _ordinary(value: str) -> bool:
    word = value.lower().strip(_EDGE)
    return _unset(value) or word in _ORDINARY or bool(_ALGORITHM.fullmatch(word) or _QUANTITY.fullmatch(word))


def _made_up(value: str) -> bool:
    """Tell whether it holds a digit or a sign that no word of a language holds."""
    return any(c.isdigit() or c in "@#$%^&*_+=~|\\!" for c in value.strip(_EDGE))


def _between(match: re.Match[str]) -> str:
    return match.string[match.end("kw") : match.start("secret")]


def _is_password(match: re.Match[str]) -> bool:
    value, between = match["secret"], _between(match)
    if len(value) > _LONG:
        return True
    if "=" in between or "＝" in between:
        return not _unset(value)
    if _ordinary(value):
        return False
    if _made_up(value):
        return len(value) > 3  # noqa: PLR2004 -- "12" is a count, "4821" opens a door
    if between.endswith(" to ") and not between.endswith((" changed to ", " set to ")):
        return False  # "gave the password to Michael"
    word = value.lower()
    plain = len(word) < 5 or bool(_DESCRIBING.fullmatch(word))  # noqa: PLR2004 -- shorter words are nearly all grammar
    return not plain and bool(_CLAUSE_END.match(match.string, match.end()))


def _is_token(match: re.Match[str]) -> bool:
    value, between = match["secret"], _between(match)
    if len(value) > _LONG:
        return True
    if "=" in between or "＝" in between:
        return _is_named_token(value)
    digits, letters = any(map(str.isdigit, value)), any(map(str.isalpha, value))
    long = len(value) >= (8 if digits and letters else 16)  # years, counts and most words are shorter
    return long and (digits or not value[1:].islower()) and not _ordinary(value)


def _is_named_token(value: str) -> bool:
    """Judge what stands under an unmistakable name: limits, counts and the words of code are shorter."""
    return len(value) > 5 and not _unset(value) and not (value.isdigit() and len(value) < 8)  # noqa: PLR2004


def _is_quoted_password(match: re.Match[str]) -> bool:
    value = match["secret"]
    plain = _unset if set(_between(match)) & set("=:＝：-") else _ordinary
    return len(value) > _LONG or not plain(value)


def _is_quoted_token(match: re.Match[str]) -> bool:
    return len(match["secret"]) > _LONG or _is_named_token(match["secret"])


def _is_made_up(match: re.Match[str]) -> bool:
    value = match["secret"]
    return len(value) > _LONG or (_made_up(value) and not _ordinary(value))


def _is_sk(match: re.Match[str]) -> bool:
    """Tell a key from a hyphenated name such as the one of a Python package beginning with `sk-`."""
    run = max(re.findall(r"[A-Za-z0-9]+", match[0]), key=len)
    return len(match[0]) > _LONG or len(run) >= (20 if run.islower() else 12)


def _is_bearer(match: re.Match[str]) -> bool:
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


def _is_chinese_password(match: re.Match[str]) -> bool:
    value = match["secret"]
    if len(value) > _LONG:
        return True
    if "\u4e00" <= value[0] <= "\u9fff":
        return "的" not in value and not _ZH_ORDINARY.match(value)
    if _ordinary(value) or _ZH_AFTER.match(match.string, match.end()):
        return False
    return _made_up(value) or (len(value) > 4 and bool(_between(match).strip()))  # noqa: PLR2004 -- "RSA", "null"


# --- The expressions --------------------------------------------------------------------------------------------
# Each is linear: a repeat is bounded, or nothing that follows it can fail, or no second match can begin inside it.

_LEFT = r"(?<![A-Za-z0-9])"
_CHAR = r"[^\s\"'`<>,;&“”‘’「」『』（）【】，。；！？、\u3000-\u9fff\uff00-\uffef]"
# A run without the punctuation that ends a phrase. A comma inside belongs to it, one before `name=` does not.
_BARE = (
    rf"(?!\\[\"'])[“‘]?(?P<secret>{_CHAR}+(?:[,;&\"'<>](?={_CHAR})(?![\w.-]{{1,40}}=){_CHAR}*){{0,16}}"
    r"(?<![.,;:)\]}>*]))"
)
# Up to the same quote; when that is missing, a run.
_QUOTED = rf"(?P<q>\\?[\"'`]|\*\*)(?P<secret>[^\n]{{1,4096}}?(?=(?<!\\)(?P=q))|{_CHAR}+)"
_PW = r"(?P<kw>password|passwd|passcode|passphrase|pass[ ](?:code|phrase|word)|pwd|\bpass(?=[\"']?[ ]?[:=]))"
_KEY = (
    r"(?P<kw>(?:api|access|secret|auth|private|signing|encryption|license)"
    r"[ _-]?(?:access[ _-]?)?key|secret(?:[ _-]?key[ _-]?base)?|token)"
)
_KEY_HINTS = "secret token api access auth private signing encryption license"
_ASSIGNED = r"\\?[\"'\]`*]{0,3}[ \t]{0,4}(?::=|=>|={1,2}|[:：＝])[ \t*]{0,4}"
_SAID = (
    r"(?:[ \t]{1,3}(?:for|to|of|on|at|in)(?:[ \t]{1,3}[^\W_][\w'’.@/-]{0,30}){1,6}?|[ \t]?\([^)\n]{1,40}\))?"
    r"(?:(?:[ \t]{1,3}(?:now|currently|still|just|there|then|has|had|have|will|should|would|must|got|was|is|been)){0,3}"
    r"[ \t]{1,3}(?:is|was|be|been|became|becomes|changed[ ]to|set[ ]to|to)|[ \t]{0,3}[:=：]|['’]s)[ \t]{1,3}"
    r"(?:(?:now|still|just|currently|actually|simply|also|literally|again)[ \t]{1,3}){0,2}"
)
_ZH_WORD = r"(?P<kw>密码|口令|密钥|秘钥|密匙|私钥|令牌|暗号|password|passwd|token|(?:api|secret|access)[ _-]?key)"
_ZH_HINTS = "密码 口令 密钥 秘钥 密匙 私钥 令牌 暗号 是 为 ： 等于 成 到 叫"
_ZH_SAID = (
    r"(?:[ \t]{0,3}(?:(?:已经|已|现在|目前|暂时|应该|一直|默认|还|都|仍|就|刚|被?我)[ \t]?){0,3}"
    r"(?:[：＝]|(?<![A-Za-z])[:=]|(?:是|为|等于|(?:改|设|换|设置|变)(?:成|为|到)了?|叫做?)[：:]?)|(?=[ \t]))[ \t]{0,3}"
)
_ZH_OWNED = r"(?P<kw>(?:我|你|他|她|咱|家)[^\n。，；：:是为]{0,12}密码|口令|暗号)"

_SERVICE_TOKENS = (  # prefixes as their vendors document them
    r"(?:gsk_|xai-|pplx-|r8_|lin_api_|ntn_)[A-Za-z0-9]{20,}|dapi[a-f0-9]{32}|do[opr]_v1_[a-f0-9]{32,}"
    r"|shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}|(?:hv[sb]\.|dckr_pat_)[A-Za-z0-9_-]{20,}|AGE-SECRET-KEY-1[A-Z0-9]{40,}"
    r"|SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,}|\d{8,10}:AA[A-Za-z0-9_-]{30,}"
)


def _pattern(kind: str, hints: str, regex: str, accept: Callable[[re.Match[str]], bool] | None = None) -> Pattern:
    return Pattern(kind, re.compile(regex), tuple(hints.split()), accept)


DEFAULT_PATTERNS: tuple[Pattern, ...] = (
    _pattern(
        "private-key",
        "-----begin",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[^-]{0,16384}(?:-(?!----)[^-]{0,256}){0,64}-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r"|[\sA-Za-z0-9+/=\\]{0,16384})",
    ),
    _pattern(
        "jwt",
        "eyj",
        r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+){0,2}",
    ),
    _pattern("aws-key", "akia asia abia acca", _LEFT + r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _pattern(
        "aws-secret",
        "akia asia aws amazon",
        r"(?:(?:AKIA|ASIA)[A-Z0-9]{16}[^A-Za-z0-9/+]{1,12}"
        r"|(?i:aws|amazon)[^\n]{0,60}?(?i:secret|key)[^\n]{0,40}?(?<![A-Za-z0-9/+]))"
        r"(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
    ),
    _pattern(
        "github-token",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        _LEFT + r"(?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{20,}",
    ),
    _pattern(
        "gitlab-token",
        "glpat- glptt- gldt- glrt- glcbt- glsoat- glft- glimt- glagent-",
        _LEFT + r"gl(?:pat|ptt|dt|rt|cbt|soat|ft|imt|agent)-[A-Za-z0-9_.-]{16,}",
    ),
    _pattern(
        "slack-token",
        "xox xapp- hooks.slack",
        _LEFT + r"(?:xox[abceoprs]-|xapp-)[A-Za-z0-9-]{10,}|hooks\.slack\.com/services/[A-Za-z0-9/_-]{20,}",
    ),
    _pattern(
        "google-key",
        "aiza gocspx- ya29.",
        _LEFT + r"(?:AIza[A-Za-z0-9_-]{30,}|GOCSPX-[A-Za-z0-9_-]{20,}|ya29\.[A-Za-z0-9_.-]{20,})",
    ),
    _pattern("anthropic-key", "sk-ant-", _LEFT + r"sk-ant-[A-Za-z0-9_-]{16,}"),
    _pattern("openai-key", "sk-", _LEFT + r"sk-[A-Za-z0-9_-]{16,}", _is_sk),
    _pattern(
        "stripe-key",
        "k_live_ k_test_ whsec_",
        _LEFT + r"(?:[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/=]{20,})",
    ),
    _pattern("huggingface-token", "hf_ api_org_", _LEFT + r"(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    _pattern("pypi-token", "pypi-", _LEFT + r"pypi-[A-Za-z0-9_-]{30,}"),
    _pattern("npm-token", "npm_", _LEFT + r"npm_[A-Za-z0-9]{30,}"),
    _pattern(
        "azure-key",
        "accountkey sharedaccesskey",
        r"(?i:AccountKey|SharedAccessKey)[ \t]{0,2}=[ \t]{0,2}(?P<secret>[A-Za-z0-9+/=%_-]{8,})",
    ),
    _pattern("azure-signature", "sig=", r"[?&;](?i:sig)=(?P<secret>[A-Za-z0-9%+/=_-]{20,})"),
    _pattern(
        "service-token",
        "gsk_ xai- pplx- r8_ dapi _v1_ shp lin_api_ ntn_ hvs. hvb. dckr_pat_ age-secret-key- sg. :aa",
        _LEFT + rf"(?:{_SERVICE_TOKENS})",
    ),
    _pattern("url-password", "://", r"://[^\s/?#@:\"'<>]{0,200}:(?P<secret>[^\s/?#\"'<>]+)@(?=[^\s@])"),
    _pattern(
        "authorization",
        "authorization",
        r"(?i:authorization\\?[\"']?[ \t]{0,4}[:=][ \t]{0,4}\\?[\"']?(?:basic|bearer|token|digest|apikey)[ \t]{1,4})"
        r"(?P<secret>[A-Za-z0-9._~+/=:-]{6,})",
    ),
    _pattern("bearer", "bearer", r"(?i:\bbearer[ \t]{1,4})(?P<secret>[A-Za-z0-9._~+/=-]{8,})", _is_bearer),
    _pattern("password", "pass pwd", rf"(?i:{_PW}(?:{_ASSIGNED}|{_SAID})){_QUOTED}", _is_quoted_password),
    _pattern("password", "pass pwd", rf"(?i:{_PW}(?:{_ASSIGNED}|{_SAID})){_BARE}", _is_password),
    _pattern(
        "password",
        "password passcode passphrase",
        rf"(?i:{_PW})[ \t]{{1,2}}(?=.{{6}}){_BARE}",
        _is_made_up,
    ),
    _pattern(
        "password",
        "password passcode passphrase",
        r"(?<![!-~])(?P<secret>[!-~]{5,64})[ \t]{1,2}(?i:(?:is|as|was)[ \t](?:my|our|the|your|a|his|her|their)[ \t]"
        r"(?:\w{1,20}[ \t]){0,3}(?:password|passcode|passphrase))(?=[ \t]*(?:$|[.,;!?)\n]|for\b|to\b|of\b|on\b))",
        _is_made_up,
    ),
    _pattern(
        "password",
        "pin",
        rf"(?i:\bpin(?:[ -]?code|[ ]number)?[\"']?(?:{_ASSIGNED}|{_SAID}))(?P<secret>\d{{4,8}})\b",
    ),
    _pattern(
        "password",
        "-u",
        r"\bcurl\b[^\n]{0,200}?[ ](?:-u|--user)[ =]?[\"']?[^\s:\"']{1,64}:(?P<secret>[^\s\"']+)",
    ),
    _pattern(
        "password",
        "--pass --pwd --token --secret --api",
        r"--(?:[a-z]{1,20}-){0,2}(?P<kw>pass(?:word|wd|phrase)?|pwd|token|secret|api-?key)[ =]"
        r"(?P<secret>[^\s\"'`-][^\s\"'`]{2,})",
        _is_quoted_token,
    ),
    _pattern(
        "password",
        "</",
        r"(?i:<(?:\w{1,20}[:_-])?(?P<kw>password|passwd|pwd|secret|token|api-?key)>)\s{0,4}(?P<secret>[^<\s][^<\n]{0,1024})</",
        _is_quoted_token,
    ),
    _pattern("secret", _KEY_HINTS, rf"(?i:{_KEY}(?:{_ASSIGNED}|{_SAID})){_QUOTED}", _is_quoted_token),
    _pattern("secret", _KEY_HINTS, rf"(?i:{_KEY}(?:{_ASSIGNED}|{_SAID})){_BARE}", _is_token),
    _pattern(
        "password",
        _ZH_HINTS,
        rf"(?i:{_ZH_WORD}){_ZH_SAID}[“‘「『《【\"'`](?P<secret>[^”’」』》】\"'`\n]{{1,128}})[”’」』》】\"'`]",
        _is_quoted_password,
    ),
    _pattern(
        "password",
        _ZH_HINTS,
        rf"(?i:{_ZH_WORD}){_ZH_SAID}{_BARE}",
        _is_chinese_password,
    ),
    _pattern(
        "password",
        "密码 口令 暗号",
        rf"{_ZH_OWNED}{_ZH_SAID}(?P<secret>[\u4e00-\u9fff]{{2,10}})(?=[ \t]*(?:$|[\n。，；！,.!;]))",
        _is_chinese_password,
    ),
)

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
        patterns: What to look for, in order of precedence where two overlap; `DEFAULT_PATTERNS` unless given.
        key: Key of the hash, 1 byte or more; `None` (the default) is the constant.

    Raises:
        ConfigurationError: The key is empty.
    """

    patterns: tuple[Pattern, ...] = DEFAULT_PATTERNS
    _: KW_ONLY
    key: bytes | None = field(default=None, repr=False)
    _literals: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.key is not None and not self.key:
            raise ConfigurationError(
                "key=b'' was given.",
                allowed="A key is at least one byte, better 16 or more.",
                remedy="Pass random bytes from your secret store, or None for the package's constant.",
            )
        object.__setattr__(self, "patterns", tuple(self.patterns))
        object.__setattr__(self, "_literals", tuple({hint for p in self.patterns for hint in p.hints}))

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

    def message(self, message: ChatMessage) -> ChatMessage:
        """Redact every part of a message that holds words: blocks, nested blocks, tool arguments, extra arguments.

        Args:
            message: Is never changed.

        Returns:
            The same object when nothing was found, else a copy; ids, names and binary content stay.
        """
        return self._model(message)

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
            changed = {self._key(k): self._entry(k, v, kept) for k, v in value.items()}
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
        return self._model(value) if isinstance(value, BaseModel) else value

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
        secret = not (_unset(value) or _PLACEHOLDER.search(redacted)) and (kind == "password" or _is_named_token(value))
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
