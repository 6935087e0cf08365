"""Recognise stored text that reads like an instruction to the model."""

from __future__ import annotations

import re

_ORDER = re.compile(
    r"(?i)\b(?:ignore|disregard|forget|override)\b.{0,30}\b(?:instructions?|prompts?|rules|above|previous|prior)\b"
    r"|\b(?:system prompt|you are now|jailbreak|developer mode)\b"
    r"|\b(?:reveal|print|repeat|leak)\b.{0,30}\b(?:prompt|instructions|password|secrets?|keys?)\b"
    r"|<\s*/?\s*(?:memory|system|assistant|user|tool|message|instructions?)\b"
    r"|(?:忽略|无视|忘记|忘掉).{0,12}(?:指令|指示|提示|规则|要求|以上|之前)|(?:系统|你的)提示词|你现在是"
)


def looks_like_instruction(text: str) -> bool:
    """Whether a stored text reads like an instruction to the model rather than like something that was said.

    Args:
        text: Any text.

    Returns:
        A guess by phrases of known attacks, English and Chinese; used to mark such a text, never to refuse it.
    """
    return _ORDER.search(text) is not None
