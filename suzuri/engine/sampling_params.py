"""What one request asks of sampling: the fields vLLM users know, checked when they are set.

Torch-free. Token ids here are the tokenizer's; `resolve` turns them into rows of one model.
"""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from suzuri.model.config import NUM_IDS
from suzuri.processing.tokenizer import listed
from suzuri.processing.vocabulary import Vocabulary

MAX_N = 1024
"""Most samples of one prompt."""
MAX_LOGPROBS = 20
"""Most alternatives per token, as OpenAI's top_logprobs."""
MIN_TEMPERATURE = 1e-6
"""Temperatures below this are 0: dividing by them would leave the range of fp32."""
MAX_TEMPERATURE = 100.0
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
REPETITION_RANGE = (0.01, 100.0)
SEED_RANGE = (-(2**63), 2**63 - 1)
_MOST_TOKENS = 2**31 - 1
"""More than any context; keeps counts in the range of the device's integers."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are drawn, when it ends and what is reported.

    Raises ValueError naming field, value and allowed range. Lists become tuples. The order in which
    the fields act is that of docs/engine.md, section Sampling.

    n: samples of the prompt, all alike at temperature 0. temperature: 0 is greedy, as is anything
    below 1e-6. top_p: mass of the nucleus; 0 keeps the most likely token. top_k: 0 or -1 is off.
    min_p: least probability as a share of the largest. repetition_penalty: divides positive and
    multiplies negative logits of tokens in prompt or output; presence_penalty and frequency_penalty
    subtract, once or per occurrence in the output. logit_bias: id to what is added to its logit.
    allowed_token_ids: no other id is drawn. min_tokens: so many tokens come before any stop.
    max_tokens: None is up to the end of the context. stop: strings that end the output;
    stop_token_ids: ids that do, besides the model's end of turn unless ignore_eos. seed: None draws
    one at admission; -1 is a seed like any other. logprobs, prompt_logprobs: raw log-probs of each
    token and of so many most likely ones (0: only the token's own; None: nothing).
    sampled_logprobs: also those under the distribution drawn from. routing: record which experts
    every token but the last one drawn went to (engine/routing.py).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    sampled_logprobs: bool = False
    prompt_logprobs: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    routing: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            self._put(name, _whole(name, getattr(self, name), low, high))
        for name, (low, high) in _OPTIONAL.items():
            if getattr(self, name) is not None:
                self._put(name, _whole(name, getattr(self, name), low, high))
        for name, (low, high) in _REAL.items():
            self._put(name, _real(name, getattr(self, name), low, high))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be true or false")
        self._put("stop", _stop_strings(self.stop))
        self._put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._put("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        self._put("logit_bias", _bias(self.logit_bias))
        self._check_together()

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens}: must not exceed max_tokens = {self.max_tokens}"
            )
        if self.stop_strings and not self.detokenize:
            raise ValueError(
                f"stop = {list(self.stop_strings)!r}: needs detokenize = True, because strings are "
                "found in text; use stop_token_ids instead"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids = []: must hold at least one id, or be None")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self.stop or ())

    @property
    def has_penalties(self) -> bool:
        subtracts = self.presence_penalty != 0 or self.frequency_penalty != 0
        return subtracts or self.repetition_penalty != 1

    @property
    def has_filters(self) -> bool:
        """Whether min_p, top_k or top_p can remove an id. The greedy choice survives all three."""
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, kw_only=True)
class ResolvedSampling:
    """SamplingParams with its ids as rows of one model: made once per request, by `resolve`.

    bias: (row, logit) pairs; allowed: rows that may be drawn, None for all; stop_rows: what
    min_tokens masks.
    """

    params: SamplingParams
    bias: tuple[tuple[int, float], ...]
    allowed: tuple[int, ...] | None
    stop_rows: tuple[int, ...]

    @property
    def has_bias(self) -> bool:
        return bool(self.bias) or self.allowed is not None

    @cached_property
    def needs_slot(self) -> bool:
        """Whether the sequence keeps rows in SamplingTables."""
        return self.has_bias or self.params.has_penalties

    @cached_property
    def is_plain(self) -> bool:
        """Whether a row asks for its most likely id and nothing else, whatever came before."""
        p = self.params
        asks = p.logprobs is not None or p.sampled_logprobs or (p.min_tokens and self.stop_rows)
        return p.is_greedy and not self.needs_slot and not asks


def resolve(
    params: SamplingParams, vocabulary: Vocabulary, *, num_rows: int, eos_token_id: int | None
) -> ResolvedSampling:
    """`params` for a model with `num_rows` real logits per token (padding left out).

    Raises ValueError naming the field and the ids that the model has no row for, as they can never
    be sampled.
    """
    stop_rows = _rows("stop_token_ids", params.stop_token_ids, vocabulary, num_rows)
    if eos_token_id is not None and not params.ignore_eos:
        eos_rows = _rows("eos_token_id", [eos_token_id], vocabulary, num_rows)
        stop_rows = tuple(dict.fromkeys(stop_rows + eos_rows))
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = _rows("allowed_token_ids", params.allowed_token_ids, vocabulary, num_rows)
        if params.min_tokens > 0 and set(allowed) <= set(stop_rows):
            raise ValueError(
                f"min_tokens = {params.min_tokens}: every one of allowed_token_ids ends the "
                "output, so that no token could come before; allow another id or set it to 0"
            )
    bias = params.logit_bias or {}
    bias_rows = _rows("logit_bias", bias, vocabulary, num_rows)
    return ResolvedSampling(
        params=params,
        bias=tuple(zip(bias_rows, bias.values(), strict=True)),
        allowed=allowed,
        stop_rows=stop_rows,
    )


def _rows(field: str, ids: Iterable[int], vocabulary: Vocabulary, num_rows: int) -> tuple[int, ...]:
    ids = list(ids)
    rows = [_row(id, vocabulary, num_rows) for id in ids]
    unknown = [id for id, row in zip(ids, rows, strict=True) if row is None]
    if unknown:
        raise ValueError(
            f"{field}: this model's vocabulary of {num_rows} tokens lacks the ids "
            f"{listed(unknown)}, which can never be sampled; leave them out"
        )
    return tuple(row for row in rows if row is not None)


def _row(id: int, vocabulary: Vocabulary, num_rows: int) -> int | None:
    try:
        row = vocabulary.to_rows([id])[0]
    except ValueError:
        return None
    return row if row < num_rows else None


_WHOLE = {"n": (1, MAX_N), "top_k": (-1, _MOST_TOKENS), "min_tokens": (0, _MOST_TOKENS)}
_OPTIONAL = {
    "max_tokens": (1, _MOST_TOKENS),
    "seed": SEED_RANGE,
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_REAL = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": REPETITION_RANGE,
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
}
_FLAGS = (
    *("ignore_eos", "include_stop_str_in_output", "sampled_logprobs"),
    *("skip_special_tokens", "detokenize", "routing"),
)


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} = {value!r}: must be an integer from {low} to {high}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} = {value}: must be from {low} to {high}")
    return int(value)


def _real(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} = {value!r}: must be a number from {low:g} to {high:g}")
    # Compared before the conversion, as an integer may be too large for a float. NaN is not inside.
    if not low <= cast("float", value) <= high:
        raise ValueError(f"{name} = {value}: must be from {low:g} to {high:g}")
    return float(value)


def _items(name: str, value: object, what: str) -> tuple[object, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} = {value!r}: must be a list of {what}")
    return tuple(cast("Iterable[object]", value))


def _once(name: str, items: tuple[object, ...]) -> None:
    seen: set[object] = set()
    for item in items:
        if item in seen:
            raise ValueError(f"{name}: {item!r} is given twice; give it once")
        seen.add(item)


def _stop_strings(stop: object) -> tuple[str, ...] | None:
    if stop is None:
        return None
    items = (stop,) if isinstance(stop, str) else _items("stop", stop, "strings")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"stop: {item!r} must be a string; ids go into stop_token_ids")
        if not item:
            raise ValueError("stop: '' must not be empty, as it would end every output at once")
    _once("stop", items)
    return cast("tuple[str, ...]", items) or None


def _ids(name: str, value: object) -> tuple[int, ...]:
    ids = tuple(
        _whole(f"{name}[{place}]", id, 0, NUM_IDS - 1)
        for place, id in enumerate(_items(name, value, "token ids"))
    )
    _once(name, ids)
    return ids


def _bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias = {bias!r}: must map token ids to numbers")
    checked: dict[int, float] = {}
    for id, value in cast("Mapping[object, object]", bias).items():
        row = _whole("logit_bias key", id, 0, NUM_IDS - 1)
        checked[row] = _real(f"logit_bias[{row}]", value, -MAX_BIAS, MAX_BIAS)
    return checked or None
