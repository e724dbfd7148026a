"""An engine whose runner remembers tokens instead of keys, values and conv inputs.

Pages, slots and snapshots hold the tokens that were written to them. Each row reads everything that
a model would read for it through its tables, and what it draws is a hash of that: whoever is given
a wrong page, a stale slot or a freed snapshot draws other tokens than alone.
"""

import dataclasses
import hashlib
from collections.abc import Sequence as Many
from typing import Any

import torch

from suzuri.engine.capacity import Capacity, capacity
from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine, TokenEvent
from suzuri.engine.plan import Plan, Work
from suzuri.engine.runner import Launched
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.transfers import Download
from suzuri.model.config import ModelConfig, MtpConfig, preset
from suzuri.processing.vocabulary import FullVocabulary

WINDOW, TAPS, VOCABULARY = 7, 3, 5000


def config(window: int | None = WINDOW, taps: int = TAPS) -> ModelConfig:
    """A shape with a short window; nothing of it is ever computed."""
    tiny = preset("tiny")
    text = dataclasses.replace(
        tiny.text,
        sliding_window_size=window,
        local_layer_ids=tiny.text.local_layer_ids if window else (),
        sconv_kernel_size=taps,
        model_max_length=1 << 20,
        vocab_size=VOCABULARY,
        unpadded_vocab_size=VOCABULARY,
    )
    return dataclasses.replace(
        tiny,
        text=text,
        vision=None,
        audio=None,
        kept_vocabulary=None,
        eos_token_id=None,
        mtp=MtpConfig(),
    )


@dataclasses.dataclass
class Shell:
    """What the engine asks of a model."""

    config: ModelConfig


class TokenRunner:
    """Carries out plans over tokens. `faults` names rules to break (tests of the tests)."""

    def __init__(self, capacity: Capacity, engine: EngineConfig, window: int, taps: int) -> None:
        self.size, self.window, self.taps = engine.page_size, window, taps
        self.ring = capacity.ring
        self.pages: dict[str, dict[tuple[int, int], tuple[int, int]]] = {"global": {}, "local": {}}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.kept: dict[tuple[int, int], tuple[int, int]] = {}
        self.newest: dict[int, int] = {}
        self.tables: dict[int, dict[str, list[int]]] = {}
        self.faults: set[str] = set()
        self.largest_step = 0

    def execute(self, plan: Plan) -> Launched:
        self._snapshot(plan.before)
        if "copy on write" not in self.faults:
            for name, source, target in plan.copies:
                pages = self.pages[name]
                for row in range(self.size):
                    if (source, row) in pages:
                        pages[target, row] = pages[source, row]
        for kept, slot, length in plan.restores:
            if "restore" in self.faults:
                continue
            for position in range(max(0, length - self.taps + 1), length):
                found = self.kept.get((kept, position % self.taps), (-1, -1))
                self.slots[slot, position % self.ring] = found
        for sequence in plan.changed:
            if sequence.global_table is not None and sequence.local_table is not None:
                self.tables[sequence.slot] = {
                    "global": list(sequence.global_table.pages),
                    "local": list(sequence.local_table.pages),
                }
        sampling = [work for work in plan.works if work.samples]
        drawn = [token for work in plan.works if (token := self._run(work)) is not None]
        self._snapshot(plan.after)
        self.largest_step = max(self.largest_step, plan.num_tokens)
        for work, token in zip(sampling, drawn, strict=True):
            self.newest[work.slot] = token
        ids = Download([torch.tensor(drawn, dtype=torch.int64)]) if sampling else None
        return Launched(sampling=sampling, ids=ids, raw=None, sampled=None, prompts=[])

    def _snapshot(self, items: Many[tuple[int, int, int]]) -> None:
        for slot, kept, length in items:
            for position in range(max(0, length - self.taps), length):
                row = position % self.ring
                self.kept[kept, position % self.taps] = self.slots.get((slot, row), (-1, -1))

    def _run(self, work: Work) -> int | None:
        sequence, slot = work.sequence, work.slot
        tables = self.tables[slot]
        token = -1
        state = b""
        for position in range(work.start, work.start + work.count):
            token = self.newest[slot] if work.from_device else sequence.tokens[position]
            for name in ("global", "local") if self.window else ("global",):
                page = tables[name][position // self.size]
                assert page > 0, f"{name}: position {position} has no page"
                self.pages[name][page, position % self.size] = (position, token)
            state = self._read(tables, slot, position)
            self.slots[slot, position % self.ring] = (position, token)
        if not work.samples:
            return None
        seed = (sequence.seed, sequence.index, work.length)
        digest = hashlib.blake2b(state + repr((token, seed)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % VOCABULARY

    def _read(self, tables: dict[str, list[int]], slot: int, position: int) -> bytes:
        """All that a row of a model would read: pages up to itself, a window, taps - 1 inputs."""
        digest = hashlib.blake2b(digest_size=16)
        kinds = [("global", 0), ("local", max(0, position - self.window + 1))]
        for name, first in kinds if self.window else kinds[:1]:
            pages, table, size = self.pages[name], tables[name], self.size
            for place in range(first, position + 1):
                digest.update(b"%d %d " % pages.get((table[place // size], place % size), (-1, -1)))
        for place in range(max(0, position - self.taps + 1), position):
            digest.update(b"%d %d;" % self.slots.get((slot, place % self.ring), (-1, -1)))
        return digest.digest()


def engine(model: ModelConfig | None = None, **fields: Any) -> Engine:
    """An engine over tokens; small pools unless said otherwise."""
    model = model or config()
    defaults: dict[str, Any] = {
        "max_running": 8,
        "token_budget": 32,
        "page_size": 4,
        "global_pages": 120,
        "local_pages": 120,
        "snapshots": 12,
        "max_context": 256,
        "min_branch_gain": 4,
    }
    settings = EngineConfig(**{**defaults, **fields})
    shell: Any = Shell(model)
    runner: Any = TokenRunner(
        capacity(model, settings, 1),
        settings,
        model.text.sliding_window_size or 0,
        model.text.sconv_kernel_size,
    )
    return Engine(shell, settings, memory_bytes=1, vocabulary=FullVocabulary(), runner=runner)


def alone(prompt: Many[int], params: SamplingParams, index: int = 0) -> list[int]:
    """What a request gets from an engine of its own, without a cache of prefixes."""
    found = outputs(engine(prefix_cache=False), [("x", prompt, params)])
    return found["x", index]


def outputs(
    subject: Engine, requests: Many[tuple[str, Many[int], SamplingParams]]
) -> dict[tuple[str, int], list[int]]:
    """Adds everything at once and runs to the end, checking all invariants after each step."""
    for id, prompt, params in requests:
        subject.add(id, prompt, params)
    found: dict[tuple[str, int], list[int]] = {}
    while subject.has_work:
        collect(subject.step(), found)
        subject.check()
    return found


def collect(events: Many[TokenEvent], into: dict[tuple[str, int], list[int]]) -> None:
    for event in events:
        tokens = into.setdefault((event.sequence.request.id, event.sequence.index), [])
        if event.token is not None:
            tokens.append(event.token)
