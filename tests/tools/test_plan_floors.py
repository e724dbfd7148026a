"""Floors against the table of the benchmark shapes, and against sums by hand."""

import itertools

import pytest

from suzuri.model.config import ModelConfig, preset
from suzuri.model.sizes import Layout
from suzuri.tools.plan.card import find_card, match
from suzuri.tools.plan.floors import Floors, distinct_experts
from tests.tools.planning import L6E64

H200 = match("h200")
EVERY_LAYER = Layout(nvfp4_layers=tuple(range(6)))
CLOSE = 0.025


def l6e64() -> ModelConfig:
    return ModelConfig.from_file(L6E64)


@pytest.mark.parametrize(
    ("sequences", "context", "milliseconds"),
    [
        (1, 1024, 2.22),
        (1, 8192, 2.23),
        (1, 65536, 2.29),
        (8, 8192, 6.88),
        (64, 1024, 12.0),
        (256, 1024, 13.2),
    ],
)
def test_decode_floors_of_the_benchmark(sequences: int, context: int, milliseconds: float) -> None:
    floor = Floors(l6e64(), Layout(), H200).decode(sequences, context)
    assert floor.seconds * 1e3 == pytest.approx(milliseconds, rel=CLOSE)
    assert (floor.bound, floor.exchanges, floor.experts) == ("memory", 0, "")


@pytest.mark.parametrize(
    ("sequences", "length", "milliseconds", "bound"),
    [
        (1, 1024, 11.7, "memory"),
        (1, 8192, 84.4, "compute"),
        (8, 8192, 675, "compute"),
        (1, 65536, 763, "compute"),
    ],
)
def test_prefill_floors_of_the_benchmark(
    sequences: int, length: int, milliseconds: float, bound: str
) -> None:
    floor = Floors(l6e64(), Layout(), H200).prefill(sequences, length)
    assert floor.seconds * 1e3 == pytest.approx(milliseconds, rel=0.005)
    assert floor.bound == bound


@pytest.mark.parametrize(
    ("sequences", "context", "milliseconds"),
    [(1, 1024, 1.55), (1, 8192, 1.56), (64, 1024, 4.6), (256, 1024, 5.7)],
)
def test_nvfp4_floors_of_the_benchmark(sequences: int, context: int, milliseconds: float) -> None:
    floor = Floors(l6e64(), EVERY_LAYER, H200).decode(sequences, context)
    assert floor.seconds * 1e3 == pytest.approx(milliseconds, rel=CLOSE)


def test_the_table_drew_experts_with_repetition() -> None:
    """Where the table is lower (1 and 8 sequences), it counts a token's experts as independent
    draws, which may repeat. With that count its numbers come out to the last digit."""
    floors = Floors(l6e64(), Layout(), H200)
    one_expert = 3 * 3072 * 6144 * 2
    for sequences, context, milliseconds in ((1, 1024, 2.22), (8, 8192, 6.88)):
        repeated = 64 * (1 - (1 - 1 / 64) ** (6 * sequences))
        surplus = distinct_experts(64, 6, sequences) - repeated
        seconds = floors.decode(sequences, context).seconds - surplus * 6 * one_expert / 4.2e12
        assert seconds * 1e3 == pytest.approx(milliseconds, abs=0.01)


def test_distinct_experts() -> None:
    assert distinct_experts(256, 6, 1) == pytest.approx(6)
    assert distinct_experts(256, 6, 0) == 0
    assert distinct_experts(4, 2, 2) == pytest.approx(3)
    assert distinct_experts(64, 64, 5) == 64
    assert distinct_experts(256, 6, 1e6) == pytest.approx(256)


def test_decode_bytes_by_hand() -> None:
    """One token of L6E64 at context 100: everything that must be read, counted from the shapes."""
    hidden, head = 6144, 128
    local = hidden * (64 * head + 2 * 16 * head + 64 * 16) + 64 * head * hidden + 16 * 512
    full = hidden * (64 * head + 2 * 8 * head + 64 * 16) + 64 * head * hidden + 16 * 1024
    router = 66 * hidden * 2 + 64 * 4 + 4
    experts = (6 + 2) * 3 * 3072 * hidden
    norms_local = 2 * hidden + 2 * head + 4 * (2 * 16 * head + 2 * hidden)
    norms_full = 2 * hidden + 2 * head + 4 * (2 * 8 * head + 2 * hidden)
    weights = 2 * (5 * (local + norms_local) + full + norms_full + 6 * experts + 2 * hidden)
    weights += 6 * router + 2 * 201024 * hidden + 2 * hidden
    conv_row = 2 * (5 * (2 * 16 * head + 2 * hidden) + 2 * 8 * head + 2 * hidden)
    per_token = 5 * 8192 + 4096
    expected = weights + 100 * per_token + per_token + 4 * conv_row
    got = Floors(l6e64(), Layout(), H200).decode(1, 100).num_bytes
    assert got == pytest.approx(expected, rel=1e-12)


def test_prefill_flops_by_hand() -> None:
    config = preset("tiny")
    text = config.text
    length = 100
    values = 0
    pairs = 0
    for layer in range(text.num_hidden_layers):
        a = text.attention(layer)
        width = a.num_heads * a.head_dim
        values += text.hidden_size * (2 * width + 2 * a.num_kv_heads * a.head_dim)
        values += text.hidden_size * a.num_heads * a.d_rel
        seen = sum(min(t + 1, a.window or length) for t in range(length))
        pairs += 4 * seen * width
        if text.is_dense(layer):
            values += 3 * text.hidden_size * text.dense_intermediate_size
        else:
            values += 3 * text.hidden_size * text.intermediate_size * (2 + 2)
            values += text.hidden_size * (8 + 2)
    matrices = 2 * length * values + pairs + 2 * text.hidden_size * text.vocab_size
    floor = Floors(config, Layout(), H200).prefill(1, length)
    # Beside the matrices: norms, convs and banks of biases, small.
    assert matrices < floor.flops < 1.2 * matrices


def test_more_gpus_and_bigger_batches() -> None:
    config = preset("inkling")
    by_tp = [Floors(config, Layout(tp=tp), H200).decode(8, 4096) for tp in (1, 2, 4, 8)]
    assert [floor.exchanges for floor in by_tp] == [0, *[4 * 66 + 2] * 3]
    for fewer, more in itertools.pairwise(by_tp):
        assert more.num_bytes < fewer.num_bytes / 1.7
        assert more.seconds < fewer.seconds


def test_measured_peers_are_never_below_their_floor() -> None:
    """TP2 on two H200s as measured (ms), with NVLink: a floor above a measurement is wrong."""
    floors = Floors(l6e64(), Layout(tp=2), H200)
    for sequences, context, measured in ((1, 1024, 2.00), (64, 1024, 7.59), (256, 1024, 14.7)):
        assert floors.decode(sequences, context).seconds * 1e3 < measured
    assert floors.prefill(1, 8192).seconds * 1e3 < 84.6
    assert floors.prefill(8, 8192).seconds * 1e3 < 599


def test_drafting_costs_its_depths_and_logits() -> None:
    config = preset("inkling-small")
    none = Floors(config, Layout(tp=2), H200)
    assert none.draft_and_verify(1, 4096) is None
    draft = Floors(config, Layout(tp=2, drafts=1), H200).draft_and_verify(1, 4096)
    all_ = Floors(config, Layout(tp=2, drafts=8), H200).draft_and_verify(1, 4096)
    assert draft is not None and all_ is not None
    plain = none.decode(1, 4096).seconds
    verify = none.decode(1, 4096, rows=2).seconds
    depth_bytes = 4_463_824_912 / 8 / 2 + 201024 * 4096 * 2 / 2
    assert draft.seconds - verify == pytest.approx(depth_bytes / 4.2e12, rel=0.25)
    assert 1 < draft.break_even == draft.seconds / plain < 2
    assert draft.seconds < all_.seconds


def test_custom_rates_are_used() -> None:
    slow = find_card("h200", bandwidth=0.42)
    config = l6e64()
    quick = Floors(config, Layout(), H200).decode(1, 1024).seconds
    assert Floors(config, Layout(), slow).decode(1, 1024).seconds == pytest.approx(10 * quick)
