"""Recognise stored text that reads like an instruction to the model."""

from __future__ import annotations

import re

NOT_AN_INSTRUCTION = "quoted from a message, not an instruction"
"""What is written beside such a text where a model is shown it."""

_ORDER = re.compile(
    # what was told before is to be dropped, or shown
    r"(?i)\b(?:ignore|disregard|forget|override|bypass)\b.{0,30}"
    r"\b(?:instructions?|prompts?|rules|guidelines|above|previous|prior)\b"
    r"|\b(?:system prompt|you are now|jailbreak|developer mode|new instructions?:)"
    r"|\b(?:reveal|print|repeat|leak)\b.{0,30}\b(?:prompt|instructions|password|secrets?|keys?)\b"
    r"|\bdo not (?:tell|inform|alert|mention this to) the user\b"
    # a tag, a mark of a chat template, a forged turn or tool result
    r"|<\s*/?\s*(?:memory|system|assistant|user|tool|tool_\w+|function_\w+|message|instructions?)\b"
    r"|<\|\w+\|>|\[/?INST\]|<<\s*/?SYS\s*>>"
    r"|^\s*(?:#{1,6}\s*)?(?:system|tool|function|assistant)(?:[ _](?:message|prompt|result|output|response))?"
    r"\s*[:：]\s*\S"
    r"|[\"']role[\"']\s*:\s*[\"'](?:system|developer|tool|function|assistant)[\"']|\btool_call_id\b"
    r"|(?:忽略|无视|忘记|忘掉|不要理会|绕过).{0,12}(?:指令|指示|提示|规则|要求|以上|之前)|(?:系统|你的)提示词|你现在是"
    r"|(?:不要|别)告诉用户|^\s*(?:系统|工具)(?:消息|提示|指令|(?:返回)?结果)?\s*[:：]",
    re.MULTILINE,
)


# One of these stands in whatever `_ORDER` finds: looking for them takes a fifth of its time, and most texts have none.
_SIGNS = (
    "<", "[inst]", "[/inst]", "ignore", "disregard", "forget", "override", "bypass", "system", "you are now",
    "jailbreak", "developer", "instruction", "reveal", "print", "repeat", "leak", "do not ", "tool", "function",
    "assistant", "忽略", "无视", "忘记", "忘掉", "不要理会", "绕过", "提示词", "你现在是", "告诉用户", "系统", "工具",
)  # fmt: skip
# Letters that `re.IGNORECASE` takes for an i, and `casefold` does not.
_DOTS = str.maketrans("\u0130\u0131", "ii")


def looks_like_instruction(text: str) -> bool:
    """Whether a stored text reads like an instruction to the model rather than like something that was said.

    Args:
        text: Any text.

    Returns:
        A guess by phrases of known attacks, English and Chinese; used to mark such a text, never to refuse it.
    """
    folded = text.translate(_DOTS).casefold()
    return any(sign in folded for sign in _SIGNS) and _ORDER.search(text) is not None
