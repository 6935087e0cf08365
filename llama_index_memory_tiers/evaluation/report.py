"""What came of the questions, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from llama_index_memory_tiers.chats import RecallQuestion
from llama_index_memory_tiers.display import Grid, Shown

_COLUMNS = ("budget", "group", "name", "questions", "any", "all", "mean", "tokens", "over")


@dataclass(frozen=True, slots=True)
class RecallOutcome:
    """What came of one question at one budget.

    Args:
        question: What was asked.
        budget: Token limit of the memory.
        tokens: Tokens of the context.
        found: Ids of the evidence that it holds.
        missed: Ids of the evidence that it does not hold.
    """

    question: RecallQuestion
    budget: int
    tokens: int
    found: tuple[str, ...]
    missed: tuple[str, ...]

    @property
    def share(self) -> float:
        """Of the evidence, 0 to 1, what the context holds."""
        return len(self.found) / (len(self.found) + len(self.missed))


@dataclass(frozen=True, slots=True)
class RecallReport(Shown):
    """How much of the evidence stood in the contexts; printed, it is a table.

    Args:
        outcomes: One per budget and question.
    """

    outcomes: tuple[RecallOutcome, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Per budget, one row for all questions, then one for each category and each language.

        Keys: `budget`; `group` (`all`, `category` or `language`) with its `name`; `questions`, how many; `any`, `all`
        and `mean`: share of the questions of which one, or all messages of the evidence were recalled, and the mean
        share of evidence recalled, 0 to 1; `tokens`, mean size of a context; `over`, share of contexts over budget.
        """
        rows = []
        for budget in dict.fromkeys(outcome.budget for outcome in self.outcomes):
            mine = [outcome for outcome in self.outcomes if outcome.budget == budget]
            rows.append(_row(budget, "all", "", mine))
            for group in ("category", "language"):
                for name in sorted({getattr(outcome.question, group) for outcome in mine} - {""}):
                    members = [outcome for outcome in mine if getattr(outcome.question, group) == name]
                    rows.append(_row(budget, group, name, members))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data: `rows`, and `outcomes` with each question."""
        return {"rows": self.rows, "outcomes": [asdict(outcome) for outcome in self.outcomes]}

    def _grids(self) -> Sequence[Grid]:
        return [Grid(_COLUMNS, self._cells())]

    def _cells(self) -> list[list[str]]:
        return [[_cell(row[column]) for column in _COLUMNS] for row in self.rows]


def _row(budget: int, group: str, name: str, outcomes: Sequence[RecallOutcome]) -> dict[str, Any]:
    return {
        "budget": budget,
        "group": group,
        "name": name,
        "questions": len(outcomes),
        "any": fmean(bool(outcome.found) for outcome in outcomes),
        "all": fmean(not outcome.missed for outcome in outcomes),
        "mean": fmean(outcome.share for outcome in outcomes),
        "tokens": fmean(outcome.tokens for outcome in outcomes),
        "over": fmean(outcome.tokens > budget for outcome in outcomes),
    }


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value <= 1 else f"{value:.0f}"
    return str(value)
