"""What models do for episodes: find like ones by meaning, and write down lessons; without a model, less."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import LLM

from llama_index_memory_tiers.blocks.embedding import embed_texts, question_vector, usable
from llama_index_memory_tiers.blocks.episodic.episodes import KINDS, Episode, Outcome, cut, from_record, plain, sign
from llama_index_memory_tiers.errors import EmbeddingError
from llama_index_memory_tiers.events import BlockFailed, emit
from llama_index_memory_tiers.extraction.lessons import extract_lessons
from llama_index_memory_tiers.instruments import acting
from llama_index_memory_tiers.records import Record, Scope
from llama_index_memory_tiers.storage import Hit, IndexQuery, OwnerReader, codec

# Of attempts at exactly the same task the newest count; that many are looked through for them.
_SAME_TASK = 1000
# A model reads this much of an episode.
_TOLD_CHARS = 12_000
_STEP_CHARS = 600


def readable(record: Record) -> Episode | None:
    """The episode of a record, or `None` when it is damaged: it must not hide the others."""
    try:
        return from_record(record)
    except (ValueError, TypeError, KeyError):
        return None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which episodes are looked for.

    Args:
        task: What is to be done.
        now: The clock.
        scope: Who asks.
        among: Only those that ended so; decided before the best are taken.
        k: At most so many.
        vector: Embedding of the task, or `None`.
        floor: Least cosine of one that shares no word with the task.
    """

    task: str
    now: datetime
    scope: Scope
    among: frozenset[Outcome]
    k: int
    vector: tuple[float, ...] | None = None
    floor: float = -1.0


@dataclass(frozen=True, slots=True)
class EpisodeFinder:
    """Finds episodes that are like a task.

    Args:
        key: Key of the block that wrote them.
        model: Embedding model, or `None`: by words.
    """

    key: str
    model: BaseEmbedding | None

    @property
    def model_name(self) -> str:
        """Name of the embedding model; '' without one."""
        return "" if self.model is None else self.model.model_name

    async def find(self, reader: OwnerReader, *wanted: Wanted) -> list[list[Episode]]:
        """Attempts at the very same task, the newest first, then those at like tasks, the most alike first.

        Args:
            reader: Whose.
            wanted: Which; several, no two of which want the same outcome, are looked up together.

        Returns:
            For each of them at most `k`.
        """
        asked = [one for one in wanted if one.k > 0 and one.task.strip()]
        queries = [query for one in asked for query in self._queries(one)]
        hits = iter(await self._search(reader, queries, asked[0].scope) if asked else ())
        best = [hit for one in asked for hit in _best(one, next(hits), next(hits))]
        episodes = [episode for record in await reader.records_of(best) if (episode := readable(record)) is not None]
        return [_chosen(one, episodes) for one in wanted]

    def _queries(self, wanted: Wanted) -> tuple[IndexQuery, IndexQuery]:
        """For the very same task, and for like ones."""
        kinds, blocks = frozenset(KINDS[outcome] for outcome in wanted.among), frozenset({self.key})
        same = IndexQuery(sign(wanted.task), wanted.now, None, kinds, blocks, limit=_SAME_TASK)
        text = codec.storable(wanted.task)
        return same, IndexQuery(text, wanted.now, wanted.vector, kinds, blocks, limit=2 * wanted.k)

    async def _search(self, reader: OwnerReader, queries: Sequence[IndexQuery], scope: Scope) -> list[list[Hit]]:
        try:
            return await reader.search_all(queries, model=self.model_name)
        except EmbeddingError:  # the request's vector does not go with the stored ones
            emit(self._unusable(scope))
            return await reader.search_all([replace(q, vector=None) for q in queries], model=self.model_name)

    async def of_query(self, task: str, scope: Scope) -> tuple[float, ...] | None:
        """Embedding of a request; `None` without a model or when it fails: words still find episodes."""
        return await question_vector(self.model, codec.embedded_text(task), block=self.key, scope=scope)

    async def of_task(self, task: str, scope: Scope) -> tuple[float, ...] | None:
        """Embedding of a task that is to be stored; see `of_query`."""
        if self.model is None:
            return None
        try:
            vectors = await embed_texts(self.model, [codec.embedded_text(task)])
        except Exception as error:  # noqa: BLE001  # providers raise what they like
            failed(self.key, error, scope)
            return None
        return usable(vectors, self._unusable(scope))[0]

    def _unusable(self, scope: Scope) -> BlockFailed:
        return BlockFailed(session_id=scope.session_id, block=self.key, error=EmbeddingError.__name__)


@dataclass(frozen=True, slots=True)
class LessonWriter:
    """Writes down what an episode teaches.

    Args:
        key: Key of the block.
        model: A language model, or `None`: lessons are yours to give.
        most: At most so many.
        timeout_seconds: Bound of the call.
    """

    key: str
    model: LLM | None
    most: int
    timeout_seconds: float

    async def write(self, episode: Episode, scope: Scope) -> tuple[str, ...]:
        """Ask once.

        Args:
            episode: One that ended.
            scope: Whose.

        Returns:
            Lessons; none when there is no model, or its call fails or says that there are none.
        """
        if self.model is None:
            return ()
        asking = extract_lessons(self.model, told(episode), max_lessons=self.most)
        try:
            with acting(self.key, scope.session_id):
                return await asyncio.wait_for(asking, self.timeout_seconds)
        except Exception as error:  # noqa: BLE001  # providers raise what they like
            failed(self.key, error, scope)
            return ()


def told(episode: Episode) -> str:
    """An episode as a model reads it: plain lines, of a long one its beginning and its end.

    Args:
        episode: One that ended.

    Returns:
        Its task, its steps and how it ended.
    """
    lines = [f"Task: {cut(episode.task)}"]
    for number, step in enumerate(episode.steps, 1):
        who = f" ({step.agent})" if step.agent else ""
        calls = "; ".join(
            f"{c.name}({c.arguments}) {'failed: ' if c.failed else '-> '}{c.result}" for c in step.tool_calls
        )
        parts = [step.action, step.reasoning, calls, "" if calls else step.observation, step.evaluation]
        lines.append(f"Step {number}{who}: " + cut(" | ".join(part for part in parts if part), _STEP_CHARS))
    lines.append(f"Outcome: {episode.outcome}" + (f", {episode.error}" if episode.error else ""))
    text = "\n".join(lines)
    half = _TOLD_CHARS // 2
    return text if len(text) <= _TOLD_CHARS else f"{text[:half]}\n…\n{text[-half:]}"


def failed(block: str, error: Exception, scope: Scope) -> None:
    """Say that something of the block failed; the work went on."""
    emit(BlockFailed(session_id=scope.session_id, block=block, error=type(error).__name__))


def _best(wanted: Wanted, same: Sequence[Hit], like: Sequence[Hit]) -> list[Hit]:
    same = sorted(same, key=lambda hit: (-(hit.said_at or 0.0), -hit.id))[: wanted.k]
    known = {hit.id for hit in same}
    return [*same, *(hit for hit in like if hit.id not in known and _near(hit, wanted.floor))][: wanted.k]


def _chosen(wanted: Wanted, episodes: Sequence[Episode]) -> list[Episode]:
    found = [episode for episode in episodes if episode.outcome in wanted.among]
    # The sign of a task is a hash: equal words, and not equal signs, have the last word.
    return sorted(found, key=lambda episode: plain(episode.task) != plain(wanted.task))


def _near(hit: Hit, floor: float) -> bool:
    return "bm25" in hit.legs or hit.similarity is None or hit.similarity >= floor
