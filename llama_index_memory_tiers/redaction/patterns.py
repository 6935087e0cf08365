"""How secrets look: one expression per kind, and a judgement of what it matches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.redaction.judging import (
    is_bearer,
    is_card,
    is_chinese_password,
    is_made_up,
    is_password,
    is_quoted_password,
    is_quoted_token,
    is_sk,
    is_token,
)

_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")


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
# The line that follows holds nothing else. No "=" here: what follows `PASSWORD=` in a file of settings is the next one.
_BELOW = (
    r"(?:[ \t]{1,3}(?:for|to|of|on|at|in)[ \t][^\n:：=.!?]{1,60}?)?[\"'`*]{0,3}[ \t]{0,3}"
    r"(?:[:：]|(?<=[ \t])(?:is|was)|[是为])"
    r"[ \t*]{0,4}\r?\n[ \t]{0,8}(?P<secret>[!-~]{4,512})(?=[ \t]{0,8}(?:\r?\n|\Z))"
)
_DE_SAID = r"(?:[ \t]{0,3}[:=]|[ \t]{1,3}(?:ist|war|lautet)[:]?)[ \t]{0,3}(?:\r?\n)?[ \t]{0,3}"
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


# Prefixes and lengths of the brands: Visa, Mastercard, Discover, UnionPay, JCB; Amex; Diners.
_CARD = (
    r"(?<![A-Za-z0-9_.,/+=-])(?:"
    r"(?:4[0-9]{3}|5[1-5][0-9]{2}|2[2-7][0-9]{2}|6(?:011|[245][0-9]{2})|35[2-8][0-9])(?P<gap>[ -]?)[0-9]{4}(?P=gap)"
    r"[0-9]{4}(?P=gap)[0-9]{4}(?:(?P=gap)[0-9]{1,3})?"
    r"|3[47][0-9]{2}(?P<gap2>[ -]?)[0-9]{6}(?P=gap2)[0-9]{5}"
    r"|3(?:0[0-5]|[68][0-9])[0-9](?P<gap3>[ -]?)[0-9]{6}(?P=gap3)[0-9]{4})"
    r"(?![A-Za-z0-9_+/=-]|[.,][0-9])"
)

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
    _pattern("openai-key", "sk-", _LEFT + r"sk-[A-Za-z0-9_-]{16,}", is_sk),
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
    _pattern("bearer", "bearer", r"(?i:\bbearer[ \t]{1,4})(?P<secret>[A-Za-z0-9._~+/=-]{8,})", is_bearer),
    _pattern("card-number", "", _CARD, is_card),
    _pattern("password", "pass pwd", rf"(?i:{_PW}(?:{_ASSIGNED}|{_SAID})){_QUOTED}", is_quoted_password),
    _pattern("password", "pass pwd", rf"(?i:{_PW}(?:{_ASSIGNED}|{_SAID})){_BARE}", is_password),
    _pattern(
        "password",
        "password passcode passphrase",
        rf"(?i:{_PW})[ \t]{{1,2}}(?=.{{6}}){_BARE}",
        is_made_up,
    ),
    _pattern(
        "password",
        "password passcode passphrase",
        r"(?<![!-~])(?P<secret>[!-~]{5,64})[ \t]{1,2}(?i:(?:is|as|was)[ \t](?:my|our|the|your|a|his|her|their)[ \t]"
        r"(?:\w{1,20}[ \t]){0,3}(?:password|passcode|passphrase))(?=[ \t]*(?:$|[.,;!?)\n]|for\b|to\b|of\b|on\b))",
        is_made_up,
    ),
    _pattern("password", "pass pwd", rf"(?i:{_PW}{_BELOW})", is_made_up),
    _pattern("password", "passwort kennwort", rf"(?i:(?P<kw>passwort|kennwort){_DE_SAID}){_BARE}", is_made_up),
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
        is_quoted_token,
    ),
    _pattern(
        "password",
        "</",
        r"(?i:<(?:\w{1,20}[:_-])?(?P<kw>password|passwd|pwd|secret|token|api-?key)>)\s{0,4}(?P<secret>[^<\s][^<\n]{0,1024})</",
        is_quoted_token,
    ),
    _pattern("secret", _KEY_HINTS, rf"(?i:{_KEY}(?:{_ASSIGNED}|{_SAID})){_QUOTED}", is_quoted_token),
    _pattern("secret", _KEY_HINTS, rf"(?i:{_KEY}(?:{_ASSIGNED}|{_SAID})){_BARE}", is_token),
    _pattern("secret", _KEY_HINTS, rf"(?i:{_KEY}{_BELOW})", is_token),
    _pattern("password", _ZH_HINTS, rf"(?i:{_ZH_WORD}{_BELOW})", is_made_up),
    _pattern(
        "password",
        _ZH_HINTS,
        rf"(?i:{_ZH_WORD}){_ZH_SAID}[“‘「『《【\"'`](?P<secret>[^”’」』》】\"'`\n]{{1,128}})[”’」』》】\"'`]",
        is_quoted_password,
    ),
    _pattern(
        "password",
        _ZH_HINTS,
        rf"(?i:{_ZH_WORD}){_ZH_SAID}{_BARE}",
        is_chinese_password,
    ),
    _pattern(
        "password",
        "密码 口令 暗号",
        rf"{_ZH_OWNED}{_ZH_SAID}(?P<secret>[\u4e00-\u9fff]{{2,10}})(?=[ \t]*(?:$|[\n。，；！,.!;]))",
        is_chinese_password,
    ),
)
