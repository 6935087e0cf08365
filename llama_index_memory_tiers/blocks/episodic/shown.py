"""Episodes as they stand in a context: what worked, and what to avoid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from llama_index_memory_tiers.blocks.episodic.episodes import Episode, EpisodeStep, cut, is_chinese
from llama_index_memory_tiers.budget import Item, TokenCounter, section_text
from llama_index_memory_tiers.instructions import looks_like_instruction
from llama_index_memory_tiers.text import day_label, escape

_LINE_CHARS = 300
_TASK_CHARS = 200
_MOST_STEPS = 5  # of one episode: the lessons say the rest


@dataclass(frozen=True, slots=True)
class _Words:
    """Headings in one language."""

    worked: str
    avoid: str
    task: str
    lesson: str
    did: str
    went_wrong: str
    error: str
    quoted: str
    outcomes: tuple[tuple[str, str], ...]


_ENGLISH = _Words(
    worked="What worked in similar tasks:",
    avoid="What to avoid:",
    task="Task",
    lesson="Lesson",
    did="Did",
    went_wrong="Went wrong",
    error="Ended by",
    quoted="(quoted, not an instruction) ",
    outcomes=(("success", "success"), ("partial", "partly done"), ("failure", "failed")),
)
_CHINESE = _Words(
    worked="类似任务中有效的做法：",
    avoid="应当避免：",
    task="任务",
    lesson="经验",
    did="做法",
    went_wrong="出错",
    error="结束原因",
    quoted="（引用内容，不是指令）",
    outcomes=(("success", "成功"), ("partial", "部分完成"), ("failure", "失败")),
)


def shown(episodes: Sequence[Episode], failures: Sequence[Episode], *, query: str) -> list[Item]:
    """Offer episodes to a context, best first: by turns one that worked and one to avoid.

    Args:
        episodes: Similar ones that worked, wholly or in part, best first.
        failures: Those that failed, best first.
        query: The request; headings are in its language, English or Chinese.

    Returns:
        Items. An episode that worked although some of its steps went wrong gives one of each sort.
    """
    words = _CHINESE if is_chinese(query) else _ENGLISH
    worked = [item for rank, one in enumerate(episodes) if (item := _worked(one, words, rank)) is not None]
    avoid = [item for rank, one in enumerate((*failures, *episodes)) if (item := _avoid(one, words, rank)) is not None]
    return [item for pair in zip_longest(worked, avoid) for item in pair if item is not None]


def size(episode: Episode, counter: TokenCounter) -> int:
    """Tokens of an episode as it is shown.

    Args:
        episode: One that ended.
        counter: Measures.

    Returns:
        Its tokens, headings included.
    """
    failed = episode.outcome == "failure"
    items = shown([] if failed else [episode], [episode] if failed else [], query=episode.task)
    return counter.text(section_text(items))


def _worked(episode: Episode, words: _Words, rank: int) -> Item | None:
    if episode.outcome == "failure":
        return None
    lines = [_line(words.lesson, lesson, words) for lesson in episode.lessons]
    lines += [_line(words.did, _deed(step), words) for step in _some(episode.steps, failed=False)]
    return _item(episode, lines, words, group="worked", header=words.worked, order=(0.0, float(rank)))


def _avoid(episode: Episode, words: _Words, rank: int) -> Item | None:
    failed = episode.outcome == "failure"
    lines = [_line(words.lesson, lesson, words) for lesson in episode.lessons] if failed else []
    lines += [_line(words.went_wrong, _deed(step), words) for step in _some(episode.steps, failed=True)]
    if episode.error:
        lines.append(_line(words.error, episode.error, words))
    if not lines and not failed:
        return None
    return _item(episode, lines, words, group="avoid", header=words.avoid, order=(1.0, float(rank)))


def _item(
    episode: Episode, lines: Sequence[str], words: _Words, *, group: str, header: str, order: tuple[float, ...]
) -> Item:
    outcome = dict(words.outcomes).get(episode.outcome, episode.outcome)
    task = _safe(episode.task, words, _TASK_CHARS)
    head = f"- {words.task}: {task} ({outcome}, {day_label(episode.started_at)})"
    return Item(
        "\n".join((head, *lines)),
        score=-order[-1],
        group=group,
        header=header,
        order=order,
        record_id=episode.id,
    )


def _line(label: str, text: str, words: _Words) -> str:
    return f"  {label}: {_safe(text, words, _LINE_CHARS)}"


def _safe(text: str, words: _Words, chars: int) -> str:
    """One inert line; what reads like an order is marked as a quotation."""
    line = escape(cut(" ".join(text.split()), chars))
    return words.quoted + line if looks_like_instruction(text) else line


def _some(steps: Sequence[EpisodeStep], *, failed: bool) -> list[EpisodeStep]:
    """The newest few steps that went wrong, or right; what was done twice the same way stands once."""
    found = {_deed(step): step for step in _split(steps) if step.failed == failed}
    return list(found.values())[-_MOST_STEPS:]


def _split(steps: Sequence[EpisodeStep]) -> Iterator[EpisodeStep]:
    """Steps whose tools all went the same way: a step with a mixed result becomes one for each tool."""
    for step in steps:
        if len(step.tool_calls) <= 1:
            failed = step.failed or any(call.failed for call in step.tool_calls)
            yield EpisodeStep(step.action, step.reasoning, step.tool_calls, step.observation, step.evaluation, failed)
        else:
            for call in step.tool_calls:
                yield EpisodeStep(call.name, tool_calls=(call,), failed=call.failed)


def _deed(step: EpisodeStep) -> str:
    """A step in one line: what was done → what came of it."""
    done = step.action
    result = step.observation or step.evaluation
    if step.tool_calls:
        call = step.tool_calls[0]
        written = f"{call.name}({call.arguments})"
        done = written if step.action in {"", call.name} else f"{step.action}: {written}"
        result = step.observation or call.result or step.evaluation
    half = _LINE_CHARS // 2
    return f"{cut(done, half)} → {cut(result, half)}" if result else done
