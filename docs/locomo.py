"""Measure evidence recall on LoCoMo: `python docs/locomo.py locomo10.json`.

The file is in snap-research/LoCoMo (CC BY-NC 4.0: for measuring, not for products). It holds long two-person chats, and
questions with the turns that answer them. `--write chat.jsonl` writes them as `read_chat_file` and
`make demo CHAT=…` take them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from llama_index_memory_tiers import evaluate_recall, read_chat_file
from llama_index_memory_tiers.testing import WordLlamaEmbedding

_CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}  # 5 asks for what was never said


def rows(samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages, then questions, of each chat, as rows of JSON Lines.

    Args:
        samples: As in `locomo10.json`.

    Yields:
        Rows; each chat is a user of its own.
    """
    for sample in samples:
        user, talk, known = sample["sample_id"], sample["conversation"], set()
        for number in sorted(int(key.split("_")[1]) for key in talk if re.fullmatch(r"session_\d+", key)):
            said_at = datetime.strptime(f"{talk[f'session_{number}_date_time']} +0000", "%I:%M %p on %d %B, %Y %z")
            for turn in talk[f"session_{number}"]:
                photo = (turn.get("blip_caption") or "").strip()
                known.add(turn["dia_id"])
                yield {
                    "id": f"{user}/{turn['dia_id']}",
                    "user": user,
                    "session": f"{user}/{number}",
                    "role": "user" if turn["speaker"] == talk["speaker_a"] else "assistant",
                    "speaker": turn["speaker"],
                    "said_at": said_at.isoformat(),
                    "text": turn["text"].strip() + (f" [photo: {photo}]" if photo else ""),
                }
        for asked in sample["qa"]:
            # Some name several turns in one string, or write D:1:2 or D1:02.
            places = [f"D{int(a)}:{int(b)}" for a, b in re.findall(r"D:?(\d+):(\d+)", " ".join(asked["evidence"]))]
            evidence = [f"{user}/{place}" for place in dict.fromkeys(places) if place in known]
            if evidence and asked["category"] in _CATEGORIES:
                category = _CATEGORIES[asked["category"]]
                yield {"question": asked["question"], "evidence": evidence, "category": category, "user": user}


async def _measure(chat: Path) -> None:
    talk = read_chat_file(chat)
    report = await evaluate_recall(talk.messages, talk.questions, embed_model=WordLlamaEmbedding())
    print(report)  # noqa: T201  # what the script is for


def main() -> None:
    """Convert, and measure unless only the file is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("locomo", type=Path)
    parser.add_argument("--write", type=Path, help="only write the chat as JSON Lines")
    arguments = parser.parse_args()
    if not arguments.locomo.is_file():
        parser.error(f"{arguments.locomo} is no file: download locomo10.json from snap-research/LoCoMo")
    chat = arguments.write or arguments.locomo.with_suffix(".jsonl")
    samples = json.loads(arguments.locomo.read_text(encoding="utf-8"))
    chat.write_text("".join(json.dumps(row) + "\n" for row in rows(samples)), encoding="utf-8")
    if arguments.write is None:
        asyncio.run(_measure(chat))


if __name__ == "__main__":
    main()
