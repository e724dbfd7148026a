"""Chooses the tokens of inkling-nano from what its generators say, and counts tokens per task.

    python scripts/nano_vocabulary.py            report on the vocabulary there is
    python scripts/nano_vocabulary.py --write    choose again: suzuri/model/nano_vocabulary.py

Kept are all single bytes and specials, and the text tokens seen most in the tasks drawn here, as
many as fill MAX_ROWS; each must be seen often enough to be learned. No token of two or three digits
is kept: numbers are spelled digit by digit, which a small model can calculate with. Other text
becomes bytes.
"""

import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from suzuri.envs.generators.kinds import KINDS
from suzuri.envs.mixture import NANO_WEIGHTS, Mixture
from suzuri.envs.task import Task
from suzuri.model.config import FIRST_SPECIAL, NUM_BYTE_TOKENS, NUM_IDS, ModelConfig, preset
from suzuri.processing.chat import ChatRenderer
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import KeptVocabulary

FILE = Path(__file__).resolve().parents[1] / "suzuri" / "model" / "nano_vocabulary.py"
MAX_ROWS = 3072
LEAST = 5
TASKS_COUNTED = 40_000
TASKS_REPORTED = 1_000

_HEAD = '''"""Text tokens of inkling-nano, written by scripts/nano_vocabulary.py; do not edit."""

# pyright: strict

_TEXT_IDS = """
{ids}
"""

NANO_VOCABULARY = [*range({bytes}), *map(int, _TEXT_IDS.split()), *range({first}, {end})]
"""Every single-byte token, the text tokens used most, and every special token."""
'''


def choose(tokenizer: Tokenizer) -> list[int]:
    """Text ids, ascending, from the tasks of the training mixture."""
    renderer = ChatRenderer(tokenizer)
    counts: Counter[int] = Counter()
    mixture = Mixture(seed=0)
    for position in range(TASKS_COUNTED):
        counts.update(ids_of(renderer, _without_media(mixture.task(position))))
    found = [
        (-count, id)
        for id, count in counts.items()
        if NUM_BYTE_TOKENS <= id < FIRST_SPECIAL
        and count >= LEAST
        and not _is_number(tokenizer.token_bytes(id))
    ]
    room = MAX_ROWS - NUM_BYTE_TOKENS - (NUM_IDS - FIRST_SPECIAL)
    return sorted(id for _, id in sorted(found)[:room])


def ids_of(renderer: ChatRenderer, task: Task, *, target: bool = True) -> list[int]:
    """The ids of a task's prompt, and of its target behind it."""
    whole = [*task.messages, *(task.target if target else ())]
    tools = list(task.tools) or None
    return renderer.render(whole, tools, task.effort, add_generation_prompt=False).token_ids


def source(ids: Iterable[int]) -> str:
    """The file that holds them."""
    lines = textwrap.fill(" ".join(map(str, ids)), 96)
    return _HEAD.format(ids=lines, bytes=NUM_BYTE_TOKENS, first=FIRST_SPECIAL, end=NUM_IDS)


def report(tokenizer: Tokenizer, config: ModelConfig, console: Console) -> None:
    """Tokens per task of each kind, media included."""
    assert config.kept_vocabulary is not None
    vocabulary = KeptVocabulary(config.kept_vocabulary, tokenizer.token_bytes)
    renderer = ChatRenderer(tokenizer, config)
    table = Table(title=f"inkling-nano: {vocabulary.num_rows} rows")
    for heading in ("kind", "weight", "mean", "median", "p99", "longest", "bytes %", "target mean"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in KINDS:
        mixture = Mixture(weights={kind: 1.0}, seed=1)
        lengths: list[int] = []
        targets: list[int] = []
        spelled = 0
        for position in range(TASKS_REPORTED):
            task = mixture.task(position)
            kept = vocabulary.expand(ids_of(renderer, task))
            lengths.append(len(kept))
            spelled += sum(id < NUM_BYTE_TOKENS for id in kept)
            prompt = vocabulary.expand(ids_of(renderer, task, target=False))
            targets.append(len(kept) - len(prompt))
        ordered = sorted(lengths)
        numbers = (
            NANO_WEIGHTS[kind],
            statistics.mean(lengths),
            ordered[len(ordered) // 2],
            ordered[len(ordered) * 99 // 100],
            ordered[-1],
            100 * spelled / sum(lengths),
            statistics.mean(targets),
        )
        table.add_row(kind, *(f"{number:.0f}" for number in numbers))
    console.print(table)


def _is_number(token: bytes) -> bool:
    return len(token) > 1 and any(48 <= byte <= 57 for byte in token)


def _without_media(task: Task) -> Task:
    """Only the text of messages with pictures and clips: a renderer for no model reads no media."""
    messages = tuple(
        {**message, "content": [part for part in message["content"] if part["type"] == "text"]}
        if isinstance(message["content"], list)
        else message
        for message in task.messages
    )
    return Task(**{**vars(task), "messages": messages})


def main() -> None:
    console = Console()
    tokenizer = Tokenizer()
    if "--write" in sys.argv[1:]:
        ids = choose(tokenizer)
        FILE.write_text(source(ids), "utf-8")
        console.print(f"{len(ids)} text ids written to {FILE}")
        return
    report(tokenizer, preset("inkling-nano"), console)


if __name__ == "__main__":
    main()
