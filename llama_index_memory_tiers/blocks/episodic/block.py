"""EpisodicMemoryBlock: what was tried for a task, how it ended, and what to do differently the next time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import LLM
from pydantic import Field

from llama_index_memory_tiers.blocks.base import Query
from llama_index_memory_tiers.blocks.by_hand import HandWrittenBlock
from llama_index_memory_tiers.blocks.desk import Holder
from llama_index_memory_tiers.blocks.episodic.book import EpisodeBook
from llama_index_memory_tiers.blocks.episodic.episodes import Outcome, cut
from llama_index_memory_tiers.blocks.episodic.models import EpisodeFinder, LessonWriter, Wanted
from llama_index_memory_tiers.blocks.episodic.shown import shown
from llama_index_memory_tiers.budget import Item
from llama_index_memory_tiers.embeddings import embed_model_of_settings
from llama_index_memory_tiers.storage import OwnerReader


class EpisodicMemoryBlock(HandWrittenBlock):
    """Remembers attempts at tasks, and shows what worked and what to avoid when a like task comes.

    Episodes are written through `of(memory)`: by hand, as a context manager, or from the run of a LlamaIndex agent.
    Nothing is taken from the chat itself.

    Args:
        llm: Writes the lessons of an episode that ended without any, in one call; `None`, the default, leaves them to
            you. The steps that worked and those that failed are shown either way.
        embed_model: Finds like tasks by meaning as well; default: `Settings.embed_model` if you have set it, else
            `None`: by words.
        similar: At most so many episodes that worked, wholly or in part, are shown; default 3.
        failures: At most so many that failed; default 10.
        min_similarity: An episode that shares no word with the request is shown only from this cosine of the
            embeddings on, -1 to 1; default 0.3. Models differ: raise it when unlike tasks are shown.
        max_lessons: At most so many are asked of the model; default 3.
        interrupted_after_seconds: A running episode without a sign of life for so long was left behind by a crash:
            the next look at the episodes closes it as `interrupted`, ended at its last step; default one day. Whoever
            is alive after all and ends it later has the last word.
    """

    name: str = "Episodes"
    llm: LLM | None = None
    embed_model: BaseEmbedding | None = Field(default_factory=embed_model_of_settings)
    similar: int = Field(default=3, ge=0)
    failures: int = Field(default=10, ge=0)
    min_similarity: float = Field(default=0.3, ge=-1, le=1)
    max_lessons: int = Field(default=3, ge=1)
    interrupted_after_seconds: float = Field(default=86_400.0, gt=0, le=3_155_760_000)

    def of(self, memory: Holder) -> EpisodeBook:
        """The episodes of one memory's owner, to be written and looked up by hand.

        Args:
            memory: A `TieredMemory` that has this block.

        Returns:
            The book.

        Raises:
            ConfigurationError: The memory has no such block, or is none of ours.
        """
        return EpisodeBook(
            self._desk(memory),
            self._finder,
            LessonWriter(self.key, self.llm, self.max_lessons, self.timeout_seconds),
            patience=timedelta(seconds=self.interrupted_after_seconds),
        )

    async def recall(self, query: Query, reader: OwnerReader) -> Sequence[Item]:
        """Offer what worked in like tasks, and what to avoid."""
        finder, task = self._finder, cut(query.text)  # as a stored task is cut
        vector = await finder.of_query(task, query.scope)

        def wanted(k: int, *among: Outcome) -> Wanted:
            return Wanted(task, query.now, query.scope, frozenset(among), k, vector, self.min_similarity)

        worked, failures = await finder.find(
            reader, wanted(self.similar, "success", "partial"), wanted(self.failures, "failure")
        )
        return shown(worked, failures, query=query.text)

    @property
    def _finder(self) -> EpisodeFinder:
        return EpisodeFinder(self.key, self.embed_model)
