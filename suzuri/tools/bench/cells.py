"""The cells of the serving benchmark and how they are spelt. No torch here."""

import dataclasses
import math
import re

KINDS = ("decode", "prefill", "trace", "agents")
SKEWED = "skewed"
SPELLING = (
    "decode:BxN (B sequences behind N tokens), prefill:BxN (B prompts of N tokens), either with "
    ":skewed, trace:R (R requests per second, or inf), agents:A (A agents, or AxN: with prompts of "
    "N tokens in the median)"
)
_SIZE = re.compile(r"(\d+)x(\d+)")
MOST = 1 << 22
"""Sequences times tokens of a cell at most."""
MOST_AGENTS = 512
AGENT_TOKENS = 65_536
"""Of an agent's prompt in the median, where the cell says nothing and the context holds them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """`batch` sequences; `length` tokens before the decoded one, or of each prompt (of agents in
    the median; 0: AGENT_TOKENS, or what the context holds). A trace has a `rate` in requests per
    second instead. `skewed`: some experts are chosen far more often."""

    kind: str
    batch: int = 0
    length: int = 0
    rate: float = 0.0
    skewed: bool = False

    @property
    def name(self) -> str:
        """As on the command line."""
        size = f"{self.rate:g}" if self.kind == "trace" else f"{self.batch}x{self.length}"
        if self.kind == "agents" and not self.length:
            size = str(self.batch)
        return f"{self.kind}:{size}" + (f":{SKEWED}" if self.skewed else "")

    def is_meant_by(self, word: str) -> bool:
        """Whether a word is this cell's name, its kind, or `skewed` and it is."""
        return word in (self.name, self.kind) or (word == SKEWED and self.skewed)


def cell_named(word: str) -> Cell:
    """The cell of a name such as decode:8x8192. Raises ValueError with the spelling."""
    kind, _, rest = word.partition(":")
    size, _, end = rest.partition(":")
    wrong = ValueError(f"--cells {word}: no such cell; {SPELLING}")
    if kind not in KINDS or end not in ("", SKEWED):
        raise wrong
    if kind == "trace":
        try:
            rate = float(size)
        except ValueError:
            raise wrong from None
        if math.isnan(rate) or rate <= 0:
            raise wrong
        return Cell(kind=kind, rate=rate, skewed=bool(end))
    if kind == "agents" and size.isascii() and size.isdigit() and 1 <= int(size) <= MOST_AGENTS:
        return Cell(kind=kind, batch=int(size), skewed=bool(end))
    match = _SIZE.fullmatch(size)
    if match is None:
        raise wrong
    batch, length = int(match[1]), int(match[2])
    if not 1 <= batch * length <= MOST or batch > 4096:
        raise ValueError(
            f"--cells {word}: needs 1 to 4096 sequences, and at most {MOST} tokens in all"
        )
    return Cell(kind=kind, batch=batch, length=length, skewed=bool(end))


def _cells(*words: str) -> tuple[Cell, ...]:
    return tuple(map(cell_named, words))


LARGE = _cells(
    *("decode:1x1024", "decode:1x8192", "decode:1x65536", "decode:8x8192"),
    *("decode:64x1024", "decode:256x1024"),
    *("prefill:1x1024", "prefill:1x8192", "prefill:8x8192", "prefill:1x65536"),
    *("decode:64x1024:skewed", "decode:256x1024:skewed", "prefill:1x8192:skewed"),
    *("trace:2", "trace:8", "trace:inf", "agents:16"),
)
"""The table of docs/bench.md; the first ten have recorded figures of other systems."""
LARGE_QUICK = _cells(
    *("decode:1x1024", "decode:1x65536", "decode:64x1024", "decode:64x1024:skewed"),
    *("prefill:1x8192", "trace:inf"),
)
SMALL = _cells(
    *("decode:1x64", "decode:1x512", "decode:8x64", "decode:32x64", "decode:32x64:skewed"),
    *("prefill:1x64", "prefill:1x512", "prefill:4x64", "trace:inf", "agents:4x512"),
)
"""Of models whose context is shorter than the large cells."""
SMALL_QUICK = _cells("decode:1x64", "decode:4x64", "decode:4x64:skewed", "prefill:2x64")
SHORT_CONTEXT = 65_536


def default_cells(model_max_length: int, *, quick: bool) -> tuple[Cell, ...]:
    """The cells of a model, by the length of its context."""
    if model_max_length < SHORT_CONTEXT:
        return SMALL_QUICK if quick else SMALL
    return LARGE_QUICK if quick else LARGE


def chosen_cells(words: tuple[str, ...], defaults: tuple[Cell, ...]) -> list[Cell]:
    """What the words of --cells mean: names of any cells, or kinds of the default ones. Without
    words, all default ones. Raises ValueError."""
    if not words:
        return list(defaults)
    found: dict[str, Cell] = {}
    for word in words:
        meant = [cell for cell in defaults if cell.is_meant_by(word)]
        for cell in meant or ([] if word in (*KINDS, SKEWED) else [cell_named(word)]):
            found.setdefault(cell.name, cell)
    if not found:
        raise ValueError(f"--cells {' '.join(words)}: this model has no such cells by default")
    return list(found.values())
