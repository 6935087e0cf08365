"""Shares of a token budget: what each part may claim before the unused rest is lent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from typing_extensions import Self

from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """A token limit with a share for each part: `TieredMemory(budget=TokenBudget(…))`.

    A share is what a part may claim before others; what a part does not use is lent to older turns of the window, then
    to items that their block's share left out. So when all parts are full, each stays within its share but for
    what whole items leave over, and the sum never exceeds `total - reserve`. The newest turn is shown even when it
    alone is larger than the window's share, and `<memory>` and its end are paid by nobody's share.

    Args:
        total: Tokens of the whole request; the memory's `token_limit`.
        reserve: Of them, for what is outside memory: system prompt, tool schemas, the answer; the memory's
            `reserve_tokens`; default 0.
        window: Tokens that the recent messages may claim; takes the place of `chat_history_token_ratio`. Default
            `None`: that ratio of `total - reserve`, at most what the parts leave.
        parts: Name of a block → tokens, its tags included, that it may claim. A block without a share may claim all
            that is free when its turn comes, by priority.

    Raises:
        ConfigurationError: A share is negative or no whole number, or the shares exceed `total - reserve`.
    """

    total: int
    reserve: int = 0
    window: int | None = None
    parts: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.parts, Mapping) or not all(isinstance(name, str) for name in self.parts):
            raise ConfigurationError(
                f"TokenBudget(parts={self.parts!r:.100}) was given.",
                allowed="parts maps names of blocks to tokens.",
                remedy="Write parts={'RetrievedMessages': 1200}.",
            )
        object.__setattr__(self, "parts", dict(self.parts))  # the caller may change theirs
        _check_whole("total", self.total, least=1)
        _check_whole("reserve", self.reserve, least=0)
        if self.window is not None:
            _check_whole("window", self.window, least=0)
        for name, tokens in self.parts.items():
            _check_whole(f"parts[{name!r}]", tokens, least=0)
        if self.reserve >= self.total:
            raise ConfigurationError(
                f"TokenBudget(total={self.total}, reserve={self.reserve}) was given.",
                allowed="The reserve is smaller than the total.",
                remedy="Lower reserve or raise total.",
            )
        claimed = (self.window or 0) + sum(self.parts.values())
        if claimed > self.limit:
            names = {**({} if self.window is None else {"window": self.window}), **self.parts}
            raise ConfigurationError(
                f"TokenBudget has shares of {claimed} tokens: {', '.join(f'{n} {t}' for n, t in names.items())}.",
                allowed=f"They share {self.limit} tokens (total={self.total} less reserve={self.reserve}).",
                remedy="Lower a share or the reserve, or raise total.",
            )

    @classmethod
    @checked
    def survey(
        cls,
        *,
        summary: str | None = "Summary",
        vector: str | None = "RetrievedMessages",
        episodes: str | None = "Episodes",
    ) -> Self:
        """The 8 000-token example of the survey of agent memory.

        Its system prompt (1 000) and output (1 000) are outside memory and make the reserve; its recent messages
        (3 000) are the window; summary (800), vector recall (1 200) and episodes (1 000) are blocks.

        Args:
            summary: Name of the block that summarises; `None` when there is none, which leaves its share to others.
            vector: Name of the block that recalls messages, or `None`.
            episodes: Name of the block that recalls episodes, or `None`.

        Returns:
            The budget.

        Raises:
            ConfigurationError: Two of them have the same name.
        """
        named = [(summary, 800), (vector, 1200), (episodes, 1000)]
        parts = {name: tokens for name, tokens in named if name is not None}
        if len(parts) < sum(name is not None for name, _ in named):
            raise ConfigurationError(
                f"TokenBudget.survey(summary={summary!r}, vector={vector!r}, episodes={episodes!r}) was given.",
                allowed="Each names a block of its own.",
                remedy="Give each its block's name, or None.",
            )
        return cls(total=8000, reserve=2000, window=3000, parts=parts)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Take a budget as it is, or make it from its plain data.

        Args:
            given: A budget, or what `to_dict` made of one.

        Returns:
            The budget.

        Raises:
            ConfigurationError: It is neither.
        """
        if isinstance(given, cls):
            return given
        known = {each.name for each in fields(cls)}
        if not isinstance(given, Mapping) or "total" not in given or not known.issuperset(given):
            raise ConfigurationError(
                f"budget={given!r:.100} was given.",
                allowed=f"It is a TokenBudget, or its plain data with {', '.join(sorted(known))}.",
                remedy="Write budget=TokenBudget(total=8000, reserve=1000, parts={…}), or leave it out.",
            )
        return cls(**given)

    @property
    def limit(self) -> int:
        """What there is to share: `total` less `reserve`, in tokens."""
        return self.total - self.reserve

    @checked
    def window_tokens(self, ratio: float) -> int:
        """The window's share, in tokens.

        Args:
            ratio: Of the limit, 0 to 1, when no share is set.
        """
        if self.window is not None:
            return self.window
        return min(int(self.limit * ratio), self.limit - sum(self.parts.values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `of`."""
        return {"total": self.total, "reserve": self.reserve, "window": self.window, "parts": dict(self.parts)}

    def check_blocks(self, priorities: Mapping[str, int]) -> None:
        """Check that each share belongs to a block that can be cut.

        Args:
            priorities: Name of each block of the memory → its priority.

        Raises:
            ConfigurationError: A share names no block, or one of priority 0.
        """
        unknown = [name for name in self.parts if name not in priorities]
        if unknown:
            blocks = f"named {', '.join(map(repr, priorities))}" if priorities else "no blocks"
            raise ConfigurationError(
                f"TokenBudget has shares for {', '.join(map(repr, unknown))}.",
                allowed=f"parts names blocks of the memory, which has {blocks}.",
                remedy="Correct the name, add the block, or leave the share out (TokenBudget.survey: pass None).",
            )
        whole = [name for name in self.parts if priorities[name] == 0]
        if whole:
            raise ConfigurationError(
                f"TokenBudget has shares for {', '.join(map(repr, whole))} of priority 0.",
                allowed="Priority 0 is never cut, so that no share holds for it.",
                remedy="Give the block priority 1 or more, or leave its share out.",
            )


def widened(share: int | None, free: int, claims: Sequence[int]) -> int | None:
    """What a part may claim that cannot be lent to afterwards, as its block cuts it once: its share and the spare.

    Args:
        share: Its share in tokens; `None` is all that is free.
        free: Tokens that nobody has claimed so far.
        claims: What each later part claims within its own share.

    Returns:
        The share, or more of what is free when the others leave it.
    """
    return None if share is None else max(share, free - sum(claims))


def _check_whole(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"TokenBudget({name}={value!r:.100}) was given."
            if "[" not in name
            else f"TokenBudget has {name}={value!r:.100}.",
            allowed=f"It is a whole number of tokens from {least}.",
            remedy="Pass such a number.",
        )
