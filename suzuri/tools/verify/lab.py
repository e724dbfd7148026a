"""One engine under observation, and the comparison of everything it computed.

A check builds a `Serving`, drives it into the situation that it is about, asserts that the
situation arose, and calls `compare`.
"""

import dataclasses
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine, TokenEvent
from suzuri.engine.request import Media, Request, Sequence
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.inkling import Inkling
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.tools.verify.config import VerifyConfig
from suzuri.tools.verify.record import Place, Recorder, Row
from suzuri.tools.verify.reference import Draw, Expected, Reference, listed

MAX_IDLE_STEPS = 50
"""Steps in a row without any row or event after which an engine is taken to hang."""


class Mismatch(Exception):
    """A number that is not that of the plain forward. For a row: where, and what it depends on."""

    def __init__(
        self,
        text: str,
        place: Place | None = None,
        tokens: Many[int] = (),
        items: "Many[Item]" = (),
    ) -> None:
        super().__init__(text)
        self.place, self.tokens, self.items = place, tuple(tokens), tuple(items)


class NotTested(Exception):
    """The situation that a check is about did not arise, so equal bits would prove nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A picture or clip in a prompt: `inputs` for the tower, `features` as it makes them."""

    index: int
    kind: str
    digest: bytes
    inputs: Tensor
    features: Tensor


class Lab:
    """A model, its plain forward, and the sizes that its checks use.

    `window` of the local layers (0 without any), `taps` of the short convs, `long`: length of the
    longer prompts, at least as given. `rows` counts what was compared. `probe`: a row to look into.
    """

    def __init__(
        self,
        model: Inkling,
        config: VerifyConfig,
        reference: Reference,
        *,
        long: int = 0,
        probe: Place | None = None,
    ) -> None:
        self.model, self.config, self.reference, self.probe = model, config, reference, probe
        text = model.config.text
        attentions = [text.attention(layer) for layer in range(text.num_hidden_layers)]
        self.window = max((a.window or 0 for a in attentions), default=0)
        self.taps = text.sconv_kernel_size
        self.vocabulary = text.unpadded_vocab_size
        self.long = max(config.tokens or default_tokens(self.window), long)
        self.rows = 0
        self.probed: dict[str, int] | None = None
        self._servings = 0

    def ids(self, count: int, stream: int = 0) -> list[int]:
        """Random model rows; other streams, other rows."""
        seed = (self.config.seed * 1_000_003 + stream * 7919 + 17) % 2**63
        generator = torch.Generator().manual_seed(seed)
        return listed(torch.randint(self.vocabulary, (count,), generator=generator))

    def serving(self, *, page: int, context: int, **options: Any) -> "Serving":
        """A fresh engine whose pools hold everything, unless `options` (of EngineConfig) give
        their sizes. `context`: longest sequence, prompt and answer."""
        running = options.setdefault("max_running", 8)
        budget = options.setdefault("token_budget", max(2048, context))
        options["token_budget"] = max(budget, running)
        pages = 2 * (running + 4) * (-(-context // page) + 2)
        options.setdefault("global_pages", pages)
        options.setdefault("local_pages", pages)
        options.setdefault("snapshots", 64)
        options.setdefault("min_branch_gain", 4)
        settings = EngineConfig(
            dtype=self.config.dtype, page_size=page, max_context=context, **options
        )
        self._servings += 1
        return Serving(self, settings, self._servings)

    def before_page(self, page: int) -> int:
        """A length of at most `long`, a few tokens before the end of a page: what follows crosses
        it."""
        return self.long // page * page - min(5, page // 2)

    def tight(
        self, page: int, context: int, *, spare: int = 0, windows: int = 1, snapshots: int = 4
    ) -> dict[str, int]:
        """Pools that hold one sequence of `context` tokens and `spare` global pages, and so many
        windows of local pages."""
        window = -(-min(self.window + 2, context) // page) + 2
        return {
            "global_pages": -(-context // page) + 1 + spare,
            "local_pages": window * windows,
            "snapshots": snapshots,
        }


class Serving:
    """One engine, its requests, their events, and every row it computed."""

    def __init__(self, lab: Lab, settings: EngineConfig, number: int) -> None:
        self.lab, self.settings = lab, settings
        self.engine = Engine(lab.model, settings, memory_bytes=2**62, vocabulary=FullVocabulary())
        if (graphs := self.engine.runner.graphs) is not None:
            graphs.at_once = True  # an engine lives too short here to see its sizes again
        self.recorder = Recorder(self.engine, lab.reference, number)
        self.requests: list[Request] = []
        self.events: dict[Sequence, list[TokenEvent]] = {}
        self._items: dict[str, Many[Item]] = {}

    @property
    def counters(self) -> Any:
        return self.engine.scheduler.counters

    def add(
        self,
        prompt: Many[int],
        *,
        max_tokens: int = 3,
        seed: int = 0,
        temperature: float = 1.0,
        items: Many[Item] = (),
        priority: int = 0,
        salt: str | None = None,
        **params: Any,
    ) -> Request:
        """Queue a request that reports log-probs and never ends but by its limit, or by
        stop_token_ids in `params`."""
        params.setdefault("logprobs", 1)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=temperature,
            sampled_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            **params,
        )
        media = [
            Media(
                index=item.index,
                count=item.features.shape[0],
                kind=item.kind,
                digest=item.digest,
                inputs=item.inputs,
            )
            for item in items
        ]
        name = f"request {len(self.requests)}"
        request = self.engine.add(name, prompt, sampling, media=media, priority=priority, salt=salt)
        self.requests.append(request)
        self._items[name] = items
        return request

    def step(self) -> list[TokenEvent]:
        """One step of the engine, recorded, with all its invariants checked after it."""
        with self.recorder.watch(self.lab.probe):
            events = self.engine.step()
        if self.recorder.probed is not None:
            self.lab.probed = self.recorder.probed
        for event in events:
            self.events.setdefault(event.sequence, []).append(event)
        self.engine.check()
        return events

    def run(self) -> None:
        """Steps until nothing is left to do. AssertionError when an engine stands still."""
        idle = 0
        while self.engine.has_work:
            before = len(self.recorder.counts)
            events = self.step()
            idle = 0 if events or len(self.recorder.counts) > before else idle + 1
            assert idle < MAX_IDLE_STEPS, "the engine has work and does none of it"

    def serve(self, prompt: Many[int], **options: Any) -> Request:
        """Add a request and run until it is done."""
        request = self.add(prompt, **options)
        self.run()
        return request

    def expect_cached(self, request: Request, length: int, *, sample: int = 0) -> None:
        """NotTested unless the sequence resumed at that length."""
        found = request.sequences[sample].num_cached
        if found != length:
            raise NotTested(f"{request.id} took {found} tokens from the cache, expected {length}")

    # Comparison

    def compare(self) -> None:
        """Raises Mismatch for the earliest row, or else token or log-prob, that is not that of the
        plain forward; counts the rows."""
        self.engine.check()
        wrong: list[tuple[int, int, int, Mismatch]] = []
        checked: list[tuple[Sequence, Expected]] = []
        for request in self.requests:
            for sequence in request.sequences:
                expected = self._expected(sequence)
                checked.append((sequence, expected))
                for row in self.recorder.rows.get(sequence, []):
                    self.lab.rows += 1
                    if (problem := self._row_problem(sequence, row, expected)) is not None:
                        wrong.append((row.step, row.position, len(wrong), problem))
        if wrong:
            raise min(wrong)[-1]
        for sequence, expected in checked:
            self._compare_draws(sequence, expected)

    def _expected(self, sequence: Sequence) -> Expected:
        """The plain forward over the sequence, tokens that the host never saw included."""
        tokens = list(sequence.tokens)
        rows = sorted(self.recorder.rows.get(sequence, []), key=lambda row: row.position)
        for row in rows:
            if row.position == len(tokens):
                tokens.append(row.token)
        items = self._items[sequence.request.id]
        return self.lab.reference.of(tokens, [(item.index, item.features) for item in items])

    def _row_problem(self, sequence: Sequence, row: Row, expected: Expected) -> Mismatch | None:
        label = f"{sequence.request.id}, sample {sequence.index}, token {row.position}"
        if row.token != expected.tokens[row.position]:
            return Mismatch(
                f"{label} was run as id {row.token}, it is {expected.tokens[row.position]}"
            )
        is_same = row.hidden == int(expected.hidden_T[row.position])
        if is_same and row.logits == int(expected.logits_T[row.position]):
            return None
        place = Place(
            self.recorder.number, row.step, sequence.request.id, sequence.index, row.position
        )
        kind = "logits" if is_same else "hidden row"
        items = self._items[sequence.request.id]
        return Mismatch(f"{kind} of {label} in step {row.step}", place, expected.tokens, items)

    def _compare_draws(self, sequence: Sequence, expected: Expected) -> None:
        """Ids and log-probs of what was sampled, and the prompt's where they were asked for."""
        sampling = sequence.request.sampling
        first, last = sequence.num_prompt, len(sequence.tokens)
        computed = {row.position for row in self.recorder.rows.get(sequence, [])}
        drawn = [e for e in self.events.get(sequence, []) if e.token is not None]
        assert [e.token for e in drawn] == sequence.tokens[first:], "events and tokens differ"
        assert computed >= set(range(first - 1, last - 1)), "a token came without its row"
        if not sampling.needs_slot and not sampling.params.has_filters:
            draws = self.lab.reference.draws(
                expected,
                first,
                temperature=sampling.params.temperature,
                seed=sequence.seed,
                sample=sequence.index,
            )
            for position, event in enumerate(drawn, first):
                label = f"{sequence.request.id}, sample {sequence.index}, token {position}"
                _compare_draw(label, event, draws[position - first])
        records = sequence.request.prompt_logprobs
        if records is not None and sequence.index == 0 and sequence.finish != "abort":
            wanted = self.lab.reference.prompt_logprobs(expected, first)
            got = [record.raw for record in records]
            if got != wanted:
                raise Mismatch(f"prompt log-probs of {sequence.request.id}: {_first(got, wanted)}")


def _compare_draw(label: str, event: TokenEvent, draw: Draw) -> None:
    if event.token != draw.token:
        raise Mismatch(f"{label}: drew id {event.token}, its own logits and seed give {draw.token}")
    found = event.logprobs
    assert found is not None, f"{label} has no log-probs"
    if found.raw != draw.raw:
        raise Mismatch(f"{label}: raw log-prob {found.raw!r}, expected {draw.raw!r}")
    if found.sampled is not None and found.sampled != draw.sampled:
        raise Mismatch(f"{label}: sampled log-prob {found.sampled!r}, expected {draw.sampled!r}")


def _first(got: Many[float], wanted: Many[float]) -> str:
    """Where two lists begin to differ."""
    if len(got) != len(wanted):
        return f"{len(got)} of {len(wanted)} there"
    place = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
    return f"token {place + 1} has {got[place]!r}, expected {wanted[place]!r}"


def default_tokens(window: int) -> int:
    """Prompts that reach beyond the window, so that local pages are dropped."""
    return max(40, window + window // 2 + 9)
