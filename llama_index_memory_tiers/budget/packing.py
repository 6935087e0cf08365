"""Pack a context: what must be there, then what is worth most, exactly within the limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from llama_index.core.base.llms.types import ChatMessage

from llama_index_memory_tiers.budget.counting import STANDS_ALONE, TokenCounter
from llama_index_memory_tiers.budget.items import Item, LeftOut, Packed, Part, Reason, Row
from llama_index_memory_tiers.budget.measuring import Meter, Section
from llama_index_memory_tiers.budget.window_plan import WindowPlan
from llama_index_memory_tiers.records import Place

Render = Callable[[Packed], Sequence[ChatMessage]]


class _Claim(NamedTuple):
    """Something that may be added: a unit of the window, an item, or the one piece of a part."""

    section: int  # -1 is the window
    piece: int  # -1 is the one piece of a part


class Packer:
    """Decides what one context holds; the orchestrator drives it and fetches what it asks for.

    Order of claims: `begin` takes priority 0 whole, the newest user message, leading system messages, the
    rest of the newest turn (when it is too large its oldest messages go first, a tool call always with its
    results), then older turns, newest first, up to the window's share. `take` gives each part what it may
    claim, whole items, best first. `fill` lends what nobody claimed: to older turns, then to items left out.
    A message or item that was left out but would still fit by itself does not exist in the `result`, except
    within an oversize newest turn and for items that the window shows already.

    Costs are summed up line by line, then the whole is rendered and counted, and what differs is repaired:
    the total is exact for every tokenizer.

    Args:
        counter: Counts tokens.
        limit: Tokens that the rendered messages may have: the token limit less the reserve.
        rows: The window, oldest first; their `tokens` are taken as counted.
        render: Turns a packed context into messages; messages that it does not change are passed on as they
            are, not copied.
        window_share: Tokens that the window may claim before parts of priority 1 and more; default `limit`.
        plan: The plan of these rows, when there is one already.
    """

    def __init__(
        self,
        counter: TokenCounter,
        *,
        limit: int,
        rows: Sequence[Row],
        render: Render,
        window_share: int | None = None,
        plan: WindowPlan | None = None,
    ) -> None:
        self._limit = limit
        self._rows = rows
        self._render = render
        self._share = limit if window_share is None else window_share
        self._plan = WindowPlan(rows) if plan is None else plan
        self._meter = Meter(counter, self._plan.counted)
        self._wrapper = self._meter.line("<memory>") + self._meter.text("</memory>")
        self._sections: list[Section] = []
        self._order: list[int] = []
        self._journal: list[_Claim] = []
        self._popped: dict[_Claim, int] = {}
        self._reasons: dict[_Claim, Reason] = {}
        self._cut: list[str] = []
        self._row_tokens = 0
        self._open_sections = 0
        self._shown_rows: set[int] = set()
        self._shown: set[Place] = set()
        self._quoted: Counter[Place] = Counter()  # how many kept items show a message word for word
        self._drift = 0
        self._overflow = False
        self._loose = False  # Whether a line begins or ends so that `TokenCounter.lines` does not cut there.

    @property
    def overflow(self) -> bool:
        """Whether priority 0 and the newest user message alone exceed the limit."""
        return self._overflow

    @property
    def shown(self) -> frozenset[Place]:
        """Messages that the window shows so far; a recall may leave them out."""
        return frozenset(self._shown)

    def begin(self, parts: Sequence[Part] = ()) -> None:
        """Take what must be there, then the window's share.

        Args:
            parts: The parts of priority 0.
        """
        for part in parts:
            section = self._enter(part)
            for claim in self._claims(section):
                self._put(claim)
        if self._shows_all():
            return
        self._show(self._plan.must, sum(self._rows[index].tokens for index in self._plan.must))
        total = self._measure()
        self._drift = total - self._ledger()
        self._overflow = total > self._limit
        if not self._overflow:
            self._claim_window()

    def room(self, part: Part) -> int:
        """Tell how many tokens the content of a part may have now.

        Args:
            part: A part of one piece that is going to be taken; what it holds does not matter.

        Returns:
            Tokens by `TokenCounter.blocks` or `TokenCounter.message`; 0 or more.
        """
        frame, free = 0, self._free()
        if not part.messages:
            # Each text block ends a line, which may cost a token.
            frame = self._meter.tags(part) + max(1, len(part.blocks))
            free -= 0 if self._open_sections else self._wrapper
        share = free if part.share_tokens is None else min(free, part.share_tokens)
        return 0 if self._overflow else max(0, share - frame)

    def take(self, part: Part, *, cut: bool = False) -> None:
        """Let a part claim what it may; call it in order of priority.

        Args:
            part: The part, priority 1 or more.
            cut: Its block has already left something out to fit into `room`.
        """
        section = self._enter(part)
        if cut:
            self._cut.append(part.name)
        self._claim(section, late=False)

    def take_late(self) -> None:
        """Let the late items of all parts claim what is left; call it after the last part."""
        for section in self._order:
            if any(item.late for item in self._sections[section].part.items):
                self._claim(section, late=True)

    def _claim(self, section: int, *, late: bool) -> None:
        if self._overflow:
            return
        part = self._sections[section].part
        share = self._limit if part.share_tokens is None else part.share_tokens
        free, state = self._free(), self._sections[section]
        for claim in self._claims(section):
            if self._late(claim) is not late or claim.piece in state.kept:
                continue
            if self._said(claim) or (cost := self._cost(claim)) > free:
                continue
            if state.tokens + state.cost(claim.piece) > share:
                self._reasons[claim] = "share"
            else:
                self._add(claim)
                free -= cost

    def fill(self) -> None:
        """Lend what nobody claimed, by estimate; `result` settles it exactly."""
        if not self._overflow:
            self._drop_redundant()
            self._grow()
            self._drop_redundant()

    def result(self) -> Packed:
        """Settle the context exactly.

        Returns:
            What is shown and what is left out; its total is within the limit unless it overflows.
        """
        total = self._measure() if self._overflow else self._settle()
        packed = self._packed()
        return Packed(packed.rows, packed.parts, tuple(self._left_out()), total, self._overflow)

    # What may be added, and what it costs.

    def _enter(self, part: Part) -> int:
        self._loose = self._loose or not all(STANDS_ALONE.match(item.text) for item in part.items)
        self._sections.append(self._meter.section(part))
        self._order = sorted(range(len(self._sections)), key=lambda at: self._sections[at].part.priority)
        return len(self._sections) - 1

    def _claims(self, section: int) -> Iterator[_Claim]:
        part = self._sections[section].part
        if part.blocks or part.messages:
            yield _Claim(section, -1)
        for index in range(len(part.items)):
            yield _Claim(section, index)

    def _candidates(self) -> list[_Claim]:
        """What is left out and may come in, in the order in which it is lent to."""
        found: list[_Claim] = []
        newest_closed = False
        for index, unit in enumerate(() if len(self._shown_rows) == len(self._rows) else self._plan.units):
            if unit.rows[0] in self._shown_rows or (unit.kind == "newest" and newest_closed):
                continue
            newest_closed = newest_closed or unit.kind == "newest"
            found.append(_Claim(-1, index))
        for section in self._order:
            kept = self._sections[section].kept
            found += [claim for claim in self._claims(section) if claim.piece not in kept]
        return [*(c for c in found if not self._late(c)), *(c for c in found if self._late(c))]

    def _late(self, claim: _Claim) -> bool:
        item = self._item(claim)
        return item is not None and item.late

    def _item(self, claim: _Claim) -> Item | None:
        section, piece = claim
        return self._sections[section].part.items[piece] if section >= 0 and piece >= 0 else None

    def _redundant(self, claim: _Claim) -> bool:
        """Whether the window shows all that an item was made of."""
        item = self._item(claim)
        if item is None or self._sections[claim.section].part.priority <= 0:
            return False
        return bool(item.sources) and item.sources <= self._shown

    def _said(self, claim: _Claim) -> bool:
        """Whether what is left out is redundant, or would quote what is shown; what is kept stays."""
        quoted = self._quotes(claim)
        shown = bool(quoted) and all(place in self._shown or self._quoted[place] for place in quoted)
        return shown or self._redundant(claim)

    def _quotes(self, claim: _Claim) -> frozenset[Place]:
        """Messages that an item shows word for word."""
        item = self._item(claim)
        return item.sources if item is not None and item.quotes else frozenset()

    def _cost(self, claim: _Claim) -> int:
        if claim.section < 0:
            return self._plan.units[claim.piece].tokens
        opens = not self._open_sections and self._sections[claim.section].frame > 0
        return self._sections[claim.section].cost(claim.piece) + (self._wrapper if opens else 0)

    def _frame(self, claim: _Claim) -> int:
        """The part of `_cost` that pays for tags."""
        if claim.section < 0 or self._sections[claim.section].kept:
            return 0
        frame = self._sections[claim.section].frame
        return frame + (self._wrapper if frame and not self._open_sections else 0)

    def _ledger(self) -> int:
        wrapper = self._wrapper if self._open_sections else 0
        return self._row_tokens + wrapper + sum(section.tokens for section in self._sections)

    def _free(self) -> int:
        return self._limit - self._ledger() - self._drift

    # Adding and removing.

    def _show(self, rows: Sequence[int], tokens: int) -> None:
        self._row_tokens += tokens
        self._shown_rows.update(rows)
        self._shown.update(place for index in rows if (place := self._rows[index].place) is not None)

    def _shows_all(self) -> bool:
        """Show the whole window if it is within its share: the usual case, in which there is nothing to weigh."""
        if self._plan.tokens > self._share or self._plan.exchanges.broken:
            return False
        self._row_tokens = self._plan.tokens
        self._shown_rows, self._shown = set(range(len(self._rows))), set(self._plan.places)
        total = self._measure()
        self._drift = total - self._ledger()
        if total <= self._limit:
            return True
        self._row_tokens = 0
        self._shown_rows, self._shown = set(), set()
        return False

    def _put(self, claim: _Claim) -> None:
        if claim.section < 0:
            self._show(self._plan.units[claim.piece].rows, self._plan.units[claim.piece].tokens)
            return
        section = self._sections[claim.section]
        self._open_sections += not section.kept and section.frame > 0
        section.add(claim.piece)
        self._quoted.update(self._quotes(claim))

    def _add(self, claim: _Claim) -> None:
        self._put(claim)
        self._journal.append(claim)

    def _remove(self, claim: _Claim) -> None:
        self._journal.remove(claim)
        if claim.section < 0:
            unit = self._plan.units[claim.piece]
            self._row_tokens -= unit.tokens
            self._shown_rows.difference_update(unit.rows)
            self._shown.difference_update(p for row in unit.rows if (p := self._rows[row].place) is not None)
            return
        section = self._sections[claim.section]
        section.remove(claim.piece)
        self._quoted.subtract(self._quotes(claim))
        self._open_sections -= not section.kept and section.frame > 0

    # The steps.

    def _claim_window(self) -> None:
        """Leading system messages, the newest turn, then older turns up to the window's share."""
        closed: set[str] = set()
        free = self._free()
        for index, unit in enumerate(self._plan.units):
            if unit.kind in closed:
                continue
            over_share = unit.kind == "older" and self._row_tokens + unit.tokens > self._share
            if not over_share and unit.tokens <= free:
                self._add(_Claim(-1, index))
                free -= unit.tokens
            elif unit.kind != "lead":
                closed.add(unit.kind)

    def _drop_redundant(self) -> None:
        for claim in [claim for claim in self._journal if self._redundant(claim)]:
            self._remove(claim)

    def _grow(self) -> bool:
        """Add what fits by estimate; what was popped once is left to `_squeeze`."""
        before, free = len(self._journal), self._free()
        for claim in self._candidates():
            if claim in self._popped or self._said(claim):
                continue
            cost = self._cost(claim)
            if cost <= free:
                self._add(claim)
                free -= cost
        return len(self._journal) > before

    def _shrink(self) -> None:
        """Take back the newest additions until the rest fits by estimate; at least one goes."""
        while self._journal:
            claim = self._journal[-1]
            self._remove(claim)
            self._popped[claim] = self._popped.get(claim, 0) + 1
            if self._free() >= 0:
                return

    def _squeeze(self, total: int) -> bool:
        """Add one thing that fits when rendered although its estimate is too large."""
        slack, trusted = self._slack()
        for claim in self._candidates():
            # Twice popped means that adding it made room for what then left none: leave it out for good.
            if self._popped.get(claim, 0) > 1 or self._said(claim):
                continue
            # A template of the user's frames sections in its own way and may leave media out. Whole parts are
            # few: they are always tried.
            least = self._cost(claim) - (0 if trusted else self._frame(claim))
            if claim.piece >= 0 and least > self._limit - total + slack:
                continue
            self._add(claim)
            if self._measure() <= self._limit:
                return True
            self._remove(claim)
        return False

    def _slack(self) -> tuple[int, bool]:
        """How far the estimate of one thing may be off, judged by this context, and whether frames are right."""
        drift, estimated = abs(self._drift), self._ledger() - self._row_tokens
        if self._meter.linewise:
            return 2 if self._loose else min(1, drift), not drift and self._open_sections > 0
        if not self._open_sections or drift * 8 >= estimated:
            return self._limit, False  # Sums tell nothing about this tokenizer: everything is tried.
        return 1 + ceil(2 * drift / (1 + sum(len(section.kept) for section in self._sections))), not drift

    def _settle(self) -> int:
        while True:
            self._drop_redundant()
            total = self._measure()
            self._drift = total - self._ledger()
            if total > self._limit and self._journal:
                self._shrink()
            elif not self._grow() and not self._squeeze(total):
                return total

    # What comes out.

    def _measure(self) -> int:
        return self._meter.total(self._render(self._packed()))

    def _packed(self) -> Packed:
        order = self._plan.exchanges.order
        if order is not None:
            rows = tuple(self._rows[index] for index in order if index in self._shown_rows)
        else:
            every = len(self._shown_rows) == len(self._rows)
            rows = tuple(self._rows) if every else tuple(self._rows[index] for index in sorted(self._shown_rows))
        sections = (self._sections[index] for index in self._order)
        return Packed(rows, tuple(section.packed() for section in sections if section.kept))

    def _left_out(self) -> Iterator[LeftOut]:
        for index, row in enumerate(self._rows):
            if index not in self._shown_rows:
                yield LeftOut("", self._plan.exchanges.broken.get(index, "no room"), row=row)
        for at in self._order:
            section = self._sections[at]
            for claim in self._claims(at):
                if claim.piece not in section.kept:
                    reason = "already shown" if self._said(claim) else self._reasons.get(claim, "no room")
                    item = section.part.items[claim.piece] if claim.piece >= 0 else None
                    yield LeftOut(section.part.name, reason, item)
        for name in self._cut:
            yield LeftOut(name, "cut")
