"""What ranks send each other, by hand from rules 5 and 6 of docs/exactness.md."""

import dataclasses

import pytest

from suzuri.model.config import ModelConfig, preset
from suzuri.model.sizes import Layout
from suzuri.tools.plan.card import match
from suzuri.tools.plan.exchanges import Traffic, experts_of, link_of
from suzuri.tools.plan.floors import Floors
from tests.tools.planning import L6E64

INKLING = preset("inkling")
H200 = match("h200")
LAYERS, DENSE, HIDDEN = 66, 2, 6144
HEADS = 64 * 128
HIDDEN_UNITS = (6 + 2) * 3072
"""Layout (a): of all slots and shared experts, gathered before the down projection."""
CHUNKS = 99 * 16
"""Bytes of a row's 99 vocabulary chunks."""


def floors(tp: int, ep: int = 1, drafts: int = 0, *, any_experts: bool = False) -> Floors:
    layout = Layout(tp=tp, ep=ep, drafts=drafts)
    return Floors(INKLING, layout, H200, any_experts=any_experts)


def received(tp: int, ep: int, tokens: int, logit_rows: int) -> float:
    """Bytes that a rank receives in a step of Inkling, all gathers written out."""
    lacking = (tp - 1) / tp
    per_token = HIDDEN + LAYERS * (HEADS + HIDDEN) + DENSE * 24576 + (LAYERS - 1) * HIDDEN
    sparse = LAYERS - DENSE
    if ep == 1:
        per_token += sparse * HIDDEN_UNITS
    else:
        per_token += sparse * (6 * HIDDEN / tp + 2 * 3072)
    rows = HIDDEN * 2 + CHUNKS
    return lacking * (2 * tokens * per_token + logit_rows * rows)


def test_traffic_is_that_of_the_exactness_contract() -> None:
    """14336 values per token for attention, 24576 (a) or 6 x 6144 / n (b) for the experts."""
    traffic = Traffic(INKLING, H200, 8)
    attention = traffic.attention(INKLING.text.attention(0))
    assert attention.link_bytes == 14336 * 2 * 7 / 8
    assert attention.count == 2
    assert traffic.sparse(1).link_bytes == 24576 * 2 * 7 / 8
    assert traffic.sparse(8).link_bytes == (6 * 6144 / 8 + 2 * 3072) * 2 * 7 / 8
    assert traffic.slot_outputs(8).link_bytes == 6 * 6144 / 8 * 2 * 7 / 8
    # The shared experts' gather goes beside the slots' exchange.
    assert traffic.sparse(1).count == traffic.sparse(8).count == 1
    # Two groups of four: hidden units within a group, then outputs to the other.
    mixed = traffic.sparse(2)
    assert mixed.count == 2
    assert mixed.link_bytes == 2 * (3 * 3072 * 3 / 4 + 6 * 6144 / 8 * 1 / 2 + 2 * 3072 * 7 / 8)


def test_excess_over_reduce_scatter_is_in_the_proportion_of_rule_6() -> None:
    """(a) 6 / 19 / 45 %, (b) 6 / 11 / 15 % of compute at TP 2 / 4 / 8."""
    for tp, share_a, share_b in ((2, 6, 6), (4, 19, 11), (8, 45, 15)):
        traffic = Traffic(INKLING, H200, tp)
        attention = traffic.attention(INKLING.text.attention(0)) + traffic.channels
        reduced = 4 * 6144 * 2 * (tp - 1) / tp
        a, b = ((attention + traffic.sparse(ep)).link_bytes - reduced for ep in (1, tp))
        assert a / b == pytest.approx(share_a / share_b, rel=0.06)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 1), (8, 1), (4, 4), (8, 8)])
def test_bytes_and_exchanges_of_a_step_by_hand(tp: int, ep: int) -> None:
    decode = floors(tp, ep).decode(3, 4096)
    prefill = floors(tp, ep).prefill(2, 1000)
    assert decode.link_bytes == pytest.approx(received(tp, ep, 3, 3), rel=1e-12)
    assert prefill.link_bytes == pytest.approx(received(tp, ep, 2000, 2), rel=1e-12)
    assert decode.links_s == pytest.approx(received(tp, ep, 3, 3) / 450e9, rel=1e-12)
    # Embedding, four per layer, logits.
    assert decode.exchanges == prefill.exchanges == 1 + 4 * 66 + 1
    assert decode.latency_s == pytest.approx(266 * 4e-6)


def test_waiting_is_never_hidden_twice_nor_left_out() -> None:
    floor = floors(8).decode(1, 1024)
    most = max(floor.memory_s, floor.compute_s, floor.links_s)
    assert floor.seconds == max(most, 266 * 4e-6)
    assert floor.waiting_in_turn_s == pytest.approx(most + 266 * 4e-6)
    fast = dataclasses.replace(H200, measured_bandwidth=1e15)
    quick = Floors(INKLING, Layout(tp=8), fast).decode(1, 1024)
    assert (quick.bound, quick.seconds) == ("latency", pytest.approx(266 * 4e-6))


def test_each_phase_takes_the_better_place_for_experts() -> None:
    for tp, decode, prefill in (
        (1, "", ""),
        (2, "hidden units", "hidden units"),
        (4, "hidden units", "whole experts"),
        (8, "hidden units", "whole experts"),
    ):
        either = floors(tp, any_experts=True)
        assert either.decode(1, 32768).experts == decode
        assert either.prefill(1, 32768).experts == prefill
        for ep in (1, tp):
            one = floors(tp, ep)
            assert one.decode(1, 32768).experts == experts_of(tp, ep)
            for sequences in (1, 64, 4096):
                best = either.decode(sequences, 4096).seconds
                assert best <= one.decode(sequences, 4096).seconds
                assert either.prefill(1, sequences).seconds <= one.prefill(1, sequences).seconds


def test_whole_experts_leave_one_rank_with_at_least_one() -> None:
    """One token's 6 experts on 8 ranks: some rank reads a whole one, not 6/8 of one."""
    expert = 3 * 3072 * 6144 * 2
    more = floors(8, 8).decode(1, 64).num_bytes - floors(8).decode(1, 64).num_bytes
    assert more == pytest.approx(64 * expert * (1 - 6 / 8), rel=1e-9)


def test_beyond_the_linked_gpus_each_value_comes_once_into_a_machine() -> None:
    sixteen = Traffic(INKLING, H200, 16)
    # A rank lacks 15/16: half is in the other machine, of which each of 8 ports fetches an eighth.
    assert sixteen.channels.network_bytes == 6144 * 2 / 16
    assert sixteen.channels.link_bytes == 6144 * 2 * (7 / 16 + 7 / 16)
    assert sixteen.channels.latency_s == 2e-5
    # Links and network work side by side; here the links have more to do.
    assert sixteen.seconds(sixteen.channels) == pytest.approx(6144 * 2 * 14 / 16 / 450e9)
    pair = Traffic(INKLING, match("gh200"), 4)
    assert pair.seconds(pair.channels) == pytest.approx(6144 * 2 / 4 / 50e9)
    outputs = sixteen.slot_outputs(16)
    assert outputs.network_bytes == pytest.approx(6 * 6144 / 16 * 2 * 8 / 16)
    assert outputs.link_bytes == pytest.approx(6 * 6144 / 16 * 2 * 7 / 16)
    # Groups of one machine gather inside it.
    assert sixteen.gather(3072, 8).network_bytes == 0
    assert sixteen.gather(3072, 8).latency_s == 4e-6
    alone = Traffic(INKLING, match("strix halo"), 2).channels
    assert (alone.link_bytes, alone.network_bytes) == (0, 6144)
    assert (link_of(H200, 8), link_of(H200, 16).form) == (H200.link, "network")
    assert link_of(match("gb200"), 16).form == "nvlink"


def test_a_draft_depth_has_six_exchanges() -> None:
    """The token's embedding, heads, channels, hidden units, channels, logits."""
    drafting = floors(8, drafts=3).draft_and_verify(2, 4096)
    assert drafting is not None
    assert drafting.exchanges == 266 + 3 * 6
    fast = dataclasses.replace(
        H200, measured_bandwidth=1e15, link=dataclasses.replace(H200.link, bandwidth=1e15)
    )
    only_waiting = Floors(INKLING, Layout(tp=8, drafts=3), fast).draft_and_verify(1, 128)
    assert only_waiting is not None
    assert only_waiting.seconds == pytest.approx((266 + 18) * 4e-6)
    assert only_waiting.break_even == pytest.approx((266 + 18) / 266)


def test_a_model_without_sparse_layers_has_no_place_for_experts() -> None:
    text = dataclasses.replace(INKLING.text, dense_mlp_idx=LAYERS)
    dense = dataclasses.replace(INKLING, text=text)
    floor = Floors(dense, Layout(tp=8), H200, any_experts=True).decode(1, 128)
    assert (floor.experts, floor.exchanges) == ("", 266)
    per_token = 6144 + 66 * (14336 + 24576) + 65 * 6144
    expected = 7 / 8 * (2 * per_token + 2 * 6144 + CHUNKS)
    assert floor.link_bytes == pytest.approx(expected, rel=1e-12)


def test_experts_that_cannot_be_whole_stay_cut() -> None:
    config = ModelConfig.from_file(L6E64)
    odd = dataclasses.replace(config, text=dataclasses.replace(config.text, n_routed_experts=63))
    either = Floors(odd, Layout(tp=8), H200, any_experts=True)
    assert either.prefill(1, 8192).experts == "hidden units"
