"""SamplingParams: every field's range, and what a model has no rows for (a05, a14, n18)."""

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suzuri.engine.sampling_params import (
    MAX_LOGPROBS,
    SamplingParams,
    resolve,
)
from suzuri.model.config import FIRST_SPECIAL, NUM_IDS
from suzuri.processing.vocabulary import FullVocabulary, KeptVocabulary
from tests.architecture.without_torch import failed_imports

KEPT = KeptVocabulary(
    [*range(256), 300, 400, *range(FIRST_SPECIAL, NUM_IDS)], lambda id: bytes([id % 256])
)
EOS = 200006


def test_the_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1,
        1,
        0,
        0,
    )
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop) == (16, 0, None, None)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1,
        0,
        0,
    )
    assert params.logprobs is params.prompt_logprobs is params.allowed_token_ids is None
    assert params.skip_special_tokens
    assert params.detokenize
    assert not (params.ignore_eos or params.include_stop_str_in_output or params.sampled_logprobs)
    assert not (params.has_filters or params.has_penalties or params.is_greedy)


GOOD: list[dict[str, Any]] = [
    {"n": 3, "temperature": 0},
    {"top_k": -1},
    {"top_k": 2**31 - 1},
    {"top_p": 0, "min_p": 1},
    {"temperature": 1e-6},
    {"temperature": 100},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"seed": -1},
    {"max_tokens": None, "min_tokens": 1000},
    {"min_tokens": 5, "max_tokens": 5},
    {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
    {"logit_bias": {0: -100, NUM_IDS - 1: 100.0}},
    {"logit_bias": {}},
    {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2},
    {"stop": "x", "stop_token_ids": [1, 2]},
    {"stop": ["a", "b"], "include_stop_str_in_output": True},
    {"stop": []},
    {"allowed_token_ids": range(5)},
    {"temperature": np.float32(0.5), "seed": np.int64(4), "stop_token_ids": np.arange(3)},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_fields_at_their_edges_are_taken(fields: dict[str, Any]):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        found = getattr(params, name)
        if name == "stop":
            assert found == (((value,) if isinstance(value, str) else tuple(value)) or None)
        elif name in ("stop_token_ids", "allowed_token_ids"):
            assert found == tuple(value)
            assert all(type(id) is int for id in found)
        elif name == "logit_bias":
            assert found == (value or None)
        else:
            assert found == value
            assert type(found) in (int, float, bool, type(None))
    assert dataclasses.replace(params) == params == pickle.loads(pickle.dumps(params))


NAN, INF = float("nan"), float("inf")
BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, r"^n = 0: must be from 1 to 1024$"),
    ({"n": -1}, r"^n = -1: must be from 1"),
    ({"n": 1025}, r"^n = 1025: must be from 1"),
    ({"n": True}, r"^n = True: must be an integer from 1"),
    ({"n": 1.0}, r"^n = 1\.0: must be an integer"),
    ({"n": None}, r"^n = None: must be an integer"),
    ({"temperature": -0.1}, r"^temperature = -0\.1: must be from 0 to 100$"),
    ({"temperature": NAN}, r"^temperature = nan: must be from 0 to 100$"),
    ({"temperature": INF}, r"^temperature = inf: must be"),
    ({"temperature": 101}, r"^temperature = 101: must be"),
    ({"temperature": 10**400}, r"^temperature = 10+: must be"),
    ({"temperature": "0.7"}, r"^temperature = '0\.7': must be a number from 0"),
    ({"temperature": False}, r"^temperature = False: must be a number"),
    ({"temperature": None}, r"^temperature = None: must be a number"),
    ({"top_p": -0.01}, r"^top_p = -0\.01: must be from 0 to 1$"),
    ({"top_p": 1.01}, r"^top_p = 1\.01: must be from 0 to 1$"),
    ({"top_p": NAN}, r"^top_p = nan"),
    ({"top_k": -2}, r"^top_k = -2: must be from -1 to"),
    ({"top_k": 5.0}, r"^top_k = 5\.0: must be an integer"),
    ({"top_k": 2**31}, r"^top_k = 2147483648: must be"),
    ({"min_p": 1.5}, r"^min_p = 1\.5: must be from 0 to 1$"),
    ({"repetition_penalty": 0}, r"^repetition_penalty = 0: must be from 0\.01 to 100$"),
    ({"repetition_penalty": -INF}, r"^repetition_penalty = -inf: must be"),
    ({"presence_penalty": 2.1}, r"^presence_penalty = 2\.1: must be from -2 to 2$"),
    ({"frequency_penalty": -2.1}, r"^frequency_penalty = -2\.1: must be from -2 to 2$"),
    ({"logit_bias": {5: 101}}, r"^logit_bias\[5\] = 101: must be from -100 to 100$"),
    ({"logit_bias": {5: INF}}, r"^logit_bias\[5\] = inf: must be from -100 to 100$"),
    ({"logit_bias": {5: "1"}}, r"^logit_bias\[5\] = '1': must be a number"),
    ({"logit_bias": {"5": 1}}, r"^logit_bias key = '5': must be an integer from 0 to 200057$"),
    ({"logit_bias": {-1: 1}}, r"^logit_bias key = -1: must be from 0 to 200057$"),
    ({"logit_bias": {200058: 1}}, r"^logit_bias key = 200058: must be from 0 to 200057$"),
    ({"logit_bias": [1, 2]}, r"^logit_bias = \[1, 2\]: must map token ids to numbers$"),
    ({"min_tokens": -1}, r"^min_tokens = -1: must be from 0"),
    ({"min_tokens": 17}, r"^min_tokens = 17: must not exceed max_tokens = 16$"),
    ({"max_tokens": 0}, r"^max_tokens = 0: must be from 1 to"),
    ({"max_tokens": -3}, r"^max_tokens = -3: must be from 1 to"),
    ({"max_tokens": 1e3}, r"^max_tokens = 1000\.0: must be an integer"),
    ({"max_tokens": "null"}, r"^max_tokens = 'null': must be an integer"),
    ({"stop": ""}, r"^stop: '' must not be empty"),
    ({"stop": ["a", ""]}, r"^stop: '' must not be empty"),
    ({"stop": ["a", "b", "a"]}, r"^stop: 'a' is given twice"),
    ({"stop": [7]}, r"^stop: 7 must be a string; ids go into stop_token_ids$"),
    ({"stop": 7}, r"^stop = 7: must be a list of strings$"),
    ({"stop": b"x"}, r"^stop = b'x': must be a list of strings$"),
    ({"stop": {"a": 1}}, r"^stop = \{'a': 1\}: must be a list of strings$"),
    ({"stop": "x", "detokenize": False}, r"^stop = \['x'\]: needs detokenize = True"),
    ({"stop_token_ids": [1, -1]}, r"^stop_token_ids\[1\] = -1: must be from 0 to 200057$"),
    ({"stop_token_ids": [200058]}, r"^stop_token_ids\[0\] = 200058: must be from 0"),
    ({"stop_token_ids": [True]}, r"^stop_token_ids\[0\] = True: must be an integer"),
    ({"stop_token_ids": [3, 3]}, r"^stop_token_ids: 3 is given twice"),
    ({"stop_token_ids": "12"}, r"^stop_token_ids = '12': must be a list of token ids$"),
    ({"stop_token_ids": None}, r"^stop_token_ids = None: must be a list of token ids$"),
    ({"ignore_eos": 1}, r"^ignore_eos = 1: must be true or false$"),
    ({"detokenize": None}, r"^detokenize = None: must be true or false$"),
    ({"sampled_logprobs": "yes"}, r"^sampled_logprobs = 'yes': must be true or false$"),
    ({"seed": 2**63}, r"^seed = 9223372036854775808: must be from -9223372036854775808 to"),
    ({"seed": -(2**63) - 1}, r"^seed = -9223372036854775809: must be from"),
    ({"seed": 1.5}, r"^seed = 1\.5: must be an integer"),
    ({"logprobs": -1}, r"^logprobs = -1: must be from 0 to 20$"),
    ({"logprobs": 21}, r"^logprobs = 21: must be from 0 to 20$"),
    ({"logprobs": True}, r"^logprobs = True: must be an integer from 0 to 20$"),
    ({"prompt_logprobs": 21}, r"^prompt_logprobs = 21: must be from 0 to 20$"),
    ({"allowed_token_ids": []}, r"^allowed_token_ids = \[\]: must hold at least one id"),
    ({"allowed_token_ids": [1, 1]}, r"^allowed_token_ids: 1 is given twice"),
    ({"allowed_token_ids": 5}, r"^allowed_token_ids = 5: must be a list of token ids$"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[str(fields)[:50] for fields, _ in BAD])
def test_fields_out_of_range_are_refused_by_name(fields: dict[str, Any], words: str):
    """a04, a05, a14: NaN and infinity, wrong types, null, negatives."""
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)


def test_fields_are_given_by_name_and_stay():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="top_n"):
        SamplingParams(top_n=2)  # pyright: ignore[reportCallIssue]
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # pyright: ignore[reportAttributeAccessIssue]
    given = {7: 1.0}
    biased = SamplingParams(logit_bias=given)
    given[8] = math.nan
    assert biased.logit_bias == {7: 1.0}


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (0.0, True), (9e-7, True), (1e-6, False), (1, False)]
)
def test_what_is_greedy(temperature: float, greedy: bool):
    """c15: temperatures too small to divide by are 0."""
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3)
    assert params.is_greedy == greedy
    assert params.has_filters != greedy


def test_ids_become_rows():
    params = SamplingParams(
        logit_bias={400: 1.5, 7: -2.0},
        stop_token_ids=[300, 200010],
        allowed_token_ids=[400, 3, 200006],
    )
    found = resolve(params, KEPT, num_rows=KEPT.num_rows, eos_token_id=EOS)
    row = {id: place for place, id in enumerate(KEPT.ids)}
    assert found.bias == ((row[400], 1.5), (7, -2.0))
    assert found.allowed == (row[400], 3, row[200006])
    assert found.stop_rows == (row[300], row[200010], row[EOS])
    assert found.has_bias
    plain = resolve(SamplingParams(), FullVocabulary(), num_rows=NUM_IDS, eos_token_id=EOS)
    assert (plain.bias, plain.allowed, plain.stop_rows) == ((), None, (EOS,))
    assert not plain.needs_slot


@pytest.mark.parametrize(
    ("eos", "fields", "expected"),
    [
        (None, {}, ()),
        (9, {"ignore_eos": True}, ()),
        (9, {"ignore_eos": True, "stop_token_ids": [9]}, (9,)),
        (9, {"stop_token_ids": [9, 4]}, (9, 4)),
    ],
)
def test_what_min_tokens_masks(eos: int | None, fields: dict[str, Any], expected: tuple[int, ...]):
    params = SamplingParams(**fields)
    assert resolve(params, FullVocabulary(), num_rows=50, eos_token_id=eos).stop_rows == expected


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_ids_without_a_row_are_refused(field: str):
    """n18, a05: neither ids that are not kept nor those of padded rows can be asked for."""
    ids = [5, 301, 310, 5000]
    value: Any = dict.fromkeys(ids, 1.0) if field == "logit_bias" else ids
    params = SamplingParams(**{field: value})
    words = rf"^{field}: this model's vocabulary of {KEPT.num_rows} tokens lacks the ids 301, 310, "
    with pytest.raises(ValueError, match=words + "5000, which can never be sampled"):
        resolve(params, KEPT, num_rows=KEPT.num_rows, eos_token_id=EOS)
    with pytest.raises(ValueError, match=rf"^{field}: .* of 301 tokens lacks the ids 301, 310, "):
        resolve(params, FullVocabulary(), num_rows=301, eos_token_id=None)
    with pytest.raises(ValueError, match=r"^eos_token_id: .* of 301 tokens lacks the ids 301,"):
        resolve(SamplingParams(), FullVocabulary(), num_rows=301, eos_token_id=301)


def test_min_tokens_needs_an_id_that_does_not_stop():
    params = SamplingParams(min_tokens=1, allowed_token_ids=[EOS, 5], stop_token_ids=[5])
    with pytest.raises(ValueError, match="min_tokens = 1: every one of allowed_token_ids ends"):
        resolve(params, FullVocabulary(), num_rows=NUM_IDS, eos_token_id=EOS)
    resolve(params, FullVocabulary(), num_rows=NUM_IDS, eos_token_id=None)
    free = dataclasses.replace(params, min_tokens=0)
    resolve(free, FullVocabulary(), num_rows=NUM_IDS, eos_token_id=EOS)


def test_the_file_loads_without_torch():
    root = Path(__file__).parents[2]
    assert failed_imports(["suzuri.engine.sampling_params", "suzuri.engine.stopping"], root) == {}
