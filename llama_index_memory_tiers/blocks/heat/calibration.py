"""What the cosines of an embedding model mean, read off sentences whose relation is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_memory_tiers.blocks.embedding import embed_texts
from llama_index_memory_tiers.blocks.heat.pages import Vector
from llama_index_memory_tiers.heat import Scale, calibrated

PAIRS = (
    ("My cat Tom sleeps all day on the sofa.", "The vet says the cat needs a diet."),
    ("The train to Berlin leaves at nine.", "I booked a seat on the night train."),
    ("We deploy the service to Kubernetes on Fridays.", "The new container image failed to start."),
    ("She is learning to play the violin.", "Her violin teacher wants her to practise scales."),
    ("I would like a recipe for lentil soup.", "How long do the lentils have to cook?"),
    ("The tax return is due in July.", "Can I deduct my home office from my taxes?"),
    ("He ran his first marathon in spring.", "Which shoes do you recommend for long runs?"),
    ("Our garden is full of tomatoes this year.", "When should I water the tomato plants?"),
    ("我的猫整天睡在沙发上。", "兽医说猫需要减肥。"),
    ("去北京的火车九点出发。", "我订了一张夜间火车票。"),
    ("她正在学小提琴。", "小提琴老师让她多练音阶。"),
    ("我想要一个红烧肉的菜谱。", "红烧肉要炖多久？"),
)
"""Two sentences each on one topic in different words; those of different pairs have nothing in common."""


async def scale_of(model: BaseEmbedding) -> Scale:
    """Read the scale of a model off `PAIRS`: one call with 24 short texts.

    Args:
        model: Any.

    Returns:
        Its scale; a model that tells nothing apart gets one on which everything is 0.
    """
    texts = [text for pair in PAIRS for text in pair]
    vectors = [unit(vector) for vector in await embed_texts(model, texts)]
    pairs: list[float] = []
    others: list[float] = []
    for at, one in enumerate(vectors):
        for after, other in enumerate(vectors[at + 1 :], at + 1):
            if one is None or other is None or one.shape != other.shape:
                continue
            together = at // 2 == after // 2
            (pairs if together else others).append(float(np.dot(one, other)))
    return calibrated(pairs, others)


def unit(vector: Sequence[float]) -> Vector | None:
    """The direction of an embedding; `None` when it has none."""
    if not len(vector) or not all(map(math.isfinite, vector)):
        return None
    values = np.asarray(vector, dtype=np.float64)
    largest = np.abs(values).max()
    if largest == 0:
        return None
    values = values / largest  # first, so that squares neither overflow nor vanish
    # As precise as it is stored, so that what is decided now is decided again after a restart.
    direction: Vector = (values / np.linalg.norm(values)).astype(np.float16).astype(np.float32)
    return direction
