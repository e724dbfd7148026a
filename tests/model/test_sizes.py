"""Sizes from a config alone: weights, sharding, state, workspace, and the one inequality."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.cache import decoder_attentions, draft_attentions, layer_caches
from suzuri.model.config import ModelConfig, preset
from suzuri.model.inkling import Inkling
from suzuri.model.sizes import Layout, Sizes, weights_by_part
from suzuri.model.sizes_shard import (
    Sharding,
    check_sharding,
    part_of_entry,
    possible_tp,
    shard_bytes,
)
from suzuri.model.sizes_state import PAGE_SIZE, state_sizes
from suzuri.model.tensor_table import Storage, released_nvfp4_layers, table

KIB, MIB, GIB = 2**10, 2**20, 2**30
INKLING, SMALL, TINY = preset("inkling"), preset("inkling-small"), preset("tiny")


def state(config: ModelConfig, *, tp: int = 1, kv_dtype: str = "bf16", drafts: int = 0):
    return state_sizes(config, tp=tp, kv_dtype=kv_dtype, drafts=drafts, resume_points=0)


def test_state_of_inkling_is_that_of_the_design() -> None:
    sizes = state(INKLING)
    window = INKLING.text.sliding_window_size
    assert window == sizes.window == 512
    assert sizes.global_per_token == 44 * KIB
    assert sizes.local_per_token == 440 * KIB
    assert sizes.local_per_token * sizes.window == 220 * MIB
    # Three input rows of 16384 (local) or 14336 (global) channels: 12.1 MiB if kept in fp32, half
    # of it in bf16, which loses nothing, because the inputs are bf16.
    assert sizes.conv_rows == 3
    values = 3 * (55 * 16384 + 11 * 14336)
    assert round(values * 4 / MIB, 1) == 12.1
    assert sizes.sequence(1).conv == values * 2
    assert state(SMALL).sequence(1).conv == 3 * 42 * 10240 * 2


def test_state_equals_the_tensors_that_hold_it() -> None:
    drafts, pages = 3, 4
    for config, attentions, is_draft in (
        (TINY, decoder_attentions(TINY), False),
        (TINY, draft_attentions(TINY), True),
    ):
        sizes = state(config, drafts=drafts)
        caches = layer_caches(
            attentions,
            hidden_size=config.text.hidden_size,
            num_pages=pages,
            page_size=PAGE_SIZE,
            num_slots=1,
            ring=sizes.conv_rows,
            dtype=torch.bfloat16,
        )
        kv = sum(c.k_pages_PTUC.nbytes + c.v_pages_PTUC.nbytes for c in caches)
        conv = sum(
            c.kv_conv_LRC.nbytes + c.attn_conv_LRC.nbytes + c.mlp_conv_LRC.nbytes for c in caches
        )
        sequence = sizes.sequence(pages * PAGE_SIZE)
        if is_draft:
            per_token = sizes.draft_global_per_token + sizes.draft_local_per_token
            assert sequence.draft_conv == conv
        else:
            per_token = sizes.global_per_token + sizes.local_per_token
            assert sequence.conv == conv
        assert per_token * pages * PAGE_SIZE == kv


@pytest.mark.parametrize("drafts", [0, 1, 3, 8, 126, 127, 128, 200])
@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 512])
def test_ring_holds_every_window_wherever_page_borders_lie(window: int, drafts: int) -> None:
    sizes = dataclasses.replace(state(INKLING), window=window, drafts=drafts)
    most = 0
    for last in range(2000, 2000 + PAGE_SIZE):
        # Rows first .. last are new; the first of them still sees window - 1 rows before it.
        first_seen = last - drafts - (window - 1)
        most = max(most, last // PAGE_SIZE - first_seen // PAGE_SIZE + 1)
    assert sizes.local_pages(10**6, window) == most
    assert sizes.local_pages(5, window) == 1
    assert sizes.local_pages(10**6, 0) == 0


def test_drafts_have_state_of_their_own() -> None:
    sizes = state(INKLING, drafts=8)
    assert sizes.draft_global_per_token == 2 * 4 * KIB  # depths 1 and 3
    assert sizes.draft_local_per_token == 6 * 8 * KIB
    assert sizes.conv_rows == 3 + 8
    sequence = sizes.sequence(PAGE_SIZE)
    assert sequence.draft_rows == 8 * 6144 * 2
    assert sequence.draft_kv == PAGE_SIZE * (8 + 48) * KIB
    assert state(INKLING, drafts=1).draft_global_per_token == 0


def test_resume_point_pins_a_window_and_a_partial_page() -> None:
    plain = state_sizes(INKLING, tp=1, kv_dtype="bf16", drafts=0, resume_points=2)
    expected = 5 * PAGE_SIZE * 440 * KIB + PAGE_SIZE * 44 * KIB + 4 * plain.conv_row
    assert plain.resume_point(10**6) == expected
    assert plain.sequence(10**6).resume_points == 2 * expected


def test_eight_bit_kv_keeps_a_scale_per_token_and_head() -> None:
    assert state(INKLING, kv_dtype="fp8").global_per_token == 11 * 2 * 8 * (128 + 4)
    with pytest.raises(ValueError, match=r"'int8'.*bf16, fp8"):
        state(INKLING, kv_dtype="int8")


def test_weights_are_the_published_totals() -> None:
    assert sum(weights_by_part(SMALL, Layout(drafts=8)).values()) == 531_912_898_740
    assert weights_by_part(SMALL, Layout(drafts=8))["MTP"] == 4_463_824_912
    layers = released_nvfp4_layers(SMALL)
    nvfp4 = weights_by_part(SMALL, Layout(nvfp4_layers=layers, drafts=8))
    bf16 = weights_by_part(SMALL, Layout(drafts=8))
    for part, num_bytes in nvfp4.items():
        if part != "routed experts":
            assert num_bytes == bf16[part]
    # The values of the released files by dtype; layer 2 stays bf16.
    per_layer = 256 * 3 * 2048 * 4096
    quantised = len(layers) * per_layer
    other = len(layers) * 2 * (256 * 4 + 2 + 3 * 8)
    assert nvfp4["routed experts"] == quantised // 2 + quantised // 16 + other + per_layer * 2


def test_weights_equal_the_parameters_of_the_model() -> None:
    model = Inkling(TINY, dtype=torch.bfloat16, device="meta")
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(weights_by_part(TINY, Layout(drafts=3)).values()) == held
    fewer = weights_by_part(TINY, Layout(drafts=1))["MTP"]
    assert model.draft is not None
    assert fewer == sum(p.nbytes for p in model.draft.depths[0].parameters())
    assert "MTP" not in weights_by_part(TINY, Layout())


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_ranks_together_hold_every_weight(tp: int) -> None:
    layers = released_nvfp4_layers(INKLING)
    repeated = 0
    for entry in table(INKLING, Storage(nvfp4_layers=layers)):
        share = shard_bytes(entry, INKLING, Sharding(tp=tp))
        copies = share * tp / entry.num_bytes
        if any(f".attn.{one}." in entry.name for one in ("wk_dv", "wv_dv", "k_sconv", "v_sconv")):
            heads = entry.shape[0] // 128
            assert copies == max(1, tp / heads), entry.name
        else:
            assert copies in (1, tp), entry.name
        if copies != 1:
            repeated += entry.num_bytes
    whole = ("norm", "gate", "rel_logits_proj", "input_proj", "visual", "audio", "scale2")
    names = [
        entry.name
        for entry in table(INKLING)
        if shard_bytes(entry, INKLING, Sharding(tp=2)) == entry.num_bytes
    ]
    assert names and all(any(word in name for word in (*whole, "global_scale")) for name in names)
    # What every rank keeps whole is small beside the model.
    assert tp == 1 or repeated < 3 * GIB


def test_experts_over_groups_hold_the_same_bytes() -> None:
    layers = released_nvfp4_layers(SMALL)
    by_width = weights_by_part(SMALL, Layout(tp=8, nvfp4_layers=layers))
    by_expert = weights_by_part(SMALL, Layout(tp=8, ep=8, nvfp4_layers=layers))
    assert by_expert["shared experts"] == by_width["shared experts"]
    # The scale of an expert as a whole is kept by its group alone.
    saved = len(layers) * 2 * (256 - 256 // 8) * 4
    assert by_width["routed experts"] - by_expert["routed experts"] == saved


def test_impossible_cuts_are_refused_with_the_nearest() -> None:
    assert possible_tp(INKLING) == (1, 2, 4, 8, 16, 32, 64)
    assert possible_tp(SMALL) == (1, 2, 4, 8, 16, 32)
    with pytest.raises(ValueError, match=r"--tp 6: .*query heads.*nearest possible: 4 and 8"):
        check_sharding(INKLING, Sharding(tp=6))
    with pytest.raises(ValueError, match=r"--tp 128: .*nearest possible: 64 \(all: 1, 2"):
        check_sharding(INKLING, Sharding(tp=128))
    with pytest.raises(ValueError, match=r"--ep 3: .*divide tp; possible: 1, 2, 4, 8"):
        check_sharding(INKLING, Sharding(tp=8, ep=3))
    odd = dataclasses.replace(INKLING, text=dataclasses.replace(INKLING.text, n_routed_experts=250))
    with pytest.raises(ValueError, match=r"--ep 4: 250 routed experts.*at --tp 8: 1, 2$"):
        check_sharding(odd, Sharding(tp=8, ep=4))
    vocabulary = dataclasses.replace(SMALL, text=dataclasses.replace(SMALL.text, vocab_size=201022))
    with pytest.raises(ValueError, match=r"--tp 4: vocab_size 201022"):
        check_sharding(vocabulary, Sharding(tp=4))
    narrow = dataclasses.replace(
        INKLING, text=dataclasses.replace(INKLING.text, intermediate_size=64)
    )
    # 8 hidden units per rank, fewer than an NVFP4 block has columns: blocks lie along the dimension
    # that is summed over, which is never cut.
    check_sharding(narrow, Sharding(tp=8))
    assert possible_tp(narrow)[-1] == 64


def test_every_part_is_named() -> None:
    parts = {part_of_entry(entry) for entry in table(INKLING)}
    assert len(parts) == 10
    embed = [e for e in table(INKLING) if part_of_entry(e) == "attention"]
    assert all(".attn." in entry.name for entry in embed)


def test_workspace_does_not_grow_with_the_context_n26() -> None:
    sizes = Sizes(INKLING, Layout(token_budget=1024, drafts=8), 10**13)

    def buffers(context: int) -> dict[str, int]:
        lines = sizes.lines(context, 4)
        return {
            line.name: line.num_bytes for line in lines if line.group in ("workspace", "reserve")
        }

    at_short = buffers(1024)
    assert buffers(262_144) == at_short == buffers(1_048_576)
    # Kernels of a GPU keep the bias to themselves; elsewhere that of a chunk covers its band of
    # distances: 1024 tokens x 64 heads x 1024, not x 262144.
    assert "relative bias" not in at_short
    on_cpu = Sizes(INKLING, Layout(token_budget=1024, platform="cpu"), 10**13)
    assert on_cpu.workspace["relative bias"] == 1024 * 64 * 1024 * 2
    assert sum(at_short.values()) < 8 * GIB + 10**13 // 50


def test_workspace_follows_the_token_budget() -> None:
    small, large = (Sizes(SMALL, Layout(token_budget=n), 10**12) for n in (1024, 8192))
    assert small.workspace["activations"] * 8 == large.workspace["activations"]
    # Only what is kept of 99 chunks grows, up to 4096 rows.
    kept = large.workspace["logits"] - small.workspace["logits"]
    assert kept == (4096 - 1024) * 99 * 32
    assert large.workspace["local KV in flight"] == 8192 * state(SMALL).local_per_token


def workspace(config: ModelConfig, layout: Layout, concurrency: int = 8) -> dict[str, int]:
    lines = Sizes(config, layout, 10**12).lines(4096, concurrency)
    return {line.name: line.num_bytes for line in lines if line.group == "workspace"}


def test_workspace_of_inkling_over_eight_by_hand() -> None:
    stream = 3 * 6144
    # Rows in expert order and own hidden units; gate and up stay within the kernel.
    experts = 8 * (6144 + 384)
    assert workspace(INKLING, Layout(tp=8, token_budget=1024)) == {
        "activations": 1024 * (stream + experts) * 2,
        # The same once more, and the rows that they give.
        "recorded steps": 1024 * (stream + experts + 6144) * 2,
        "split attention": 4096 * 8 * (128 + 2) * 4,
        # 13 times a buffer of 32 MiB, which is more than 32 rows; 32 bytes per row and chunk.
        "logits": 13 * 32 * MIB + 1024 * 99 * 32,
        # 1024 patches before and after the first fold: 5 x 5 of 3200 pixels become 128 channels.
        "towers": 1024 * 2 * (3200 // 25 * 128) * 4,
        "local KV in flight": 1024 * 55 * KIB,
        # 8 sequences: bias, flags, counts, and the widest table once more while it grows.
        "sampling tables": 8 * 201024 * (4 + 1 + 4 + 4),
        # Batches of 1 to 8, and 32 others; 12 launches of 4 KiB per layer.
        "graphs": (8 + 96) * 12 * 66 * 4096,
    }


def test_workspace_of_small_on_one_by_hand() -> None:
    layers = released_nvfp4_layers(SMALL)
    layout = Layout(token_budget=8192, drafts=8, platform="cpu", nvfp4_layers=layers)
    assert workspace(SMALL, layout, concurrency=3) == {
        "activations": 8192 * (3 * 4096 + 8 * (2 * 4096 + 3 * 2048)) * 2,
        "relative bias": 8192 * 32 * 1024 * 2,
        "split attention": 4096 * 32 * 130 * 4,
        "logits": 13 * 32 * MIB + 4096 * 99 * 32,
        "towers": 1024 * 2 * 16384 * 4,
        "local KV in flight": 8192 * (35 + 6) * 2 * 8 * 128 * 2,
        "sampling tables": 3 * 201024 * 13,
        "one layer's experts unpacked": 4 * 256 * 2048 * 4096 * 2,
    }
    # 700 sequences: graphs for 1 to 8, 16, 24, ..., 512.
    many = workspace(SMALL, Layout(drafts=2), concurrency=700)
    assert many["graphs"] == (8 + 63 + 96) * 12 * (42 + 2) * 4096


def test_activations_are_those_of_the_largest_sub_block() -> None:
    def activations(config: ModelConfig, tp: int = 1, ep: int = 1) -> int:
        layout = Layout(token_budget=1024, tp=tp, ep=ep)
        return workspace(config, layout)["activations"] - stream

    stream = 1024 * 3 * 6144 * 2
    # Whole experts: every row's whole expert, and the channels that come from the other ranks.
    whole = 8 * (6144 + 3072) + 6 * 768
    assert activations(INKLING, tp=8, ep=8) == 1024 * whole * 2
    groups = 8 * (6144 + 768) + 6 * 768
    assert activations(INKLING, tp=8, ep=2) == 1024 * groups * 2
    # Where gathered hidden units and output channels are more than the rows.
    wide = dataclasses.replace(INKLING.text, intermediate_size=12288)
    wide = dataclasses.replace(INKLING, text=wide)
    assert activations(wide, tp=8) == 1024 * 8 * (1536 + 12288 + 768) * 2
    # Without a GPU's kernels all of it, gate and up included.
    layout = Layout(token_budget=1024, tp=8, platform="cpu")
    assert workspace(INKLING, layout)["activations"] - stream == (
        1024 * 8 * (6144 + 3 * 384 + 3072 + 768) * 2
    )
    text = dataclasses.replace(INKLING.text, dense_mlp_idx=66)
    dense = dataclasses.replace(INKLING, text=text)
    assert activations(dense, tp=8) == 1024 * (3 * 3072 + 24576) * 2
    assert activations(dense) == 1024 * 3 * 24576 * 2
    # Queries, keys, values and relative queries, the first three normed, outputs, all outputs.
    narrow = dataclasses.replace(
        INKLING, text=dataclasses.replace(text, dense_intermediate_size=64)
    )
    attention = (12 * 128 + 8 * 16) + 12 * 128 + 8 * 128 + 64 * 128
    assert activations(narrow, tp=8) == 1024 * attention * 2


def test_total_is_the_sum_of_the_lines() -> None:
    sizes = Sizes(SMALL, Layout(tp=2, drafts=2, kv_dtype="fp8"), 10**11, system_bytes=GIB)
    for context, concurrency in ((1, 1), (4097, 3), (1_000_000, 700)):
        lines = sizes.lines(context, concurrency)
        assert sizes.total(context, concurrency) == sum(line.num_bytes for line in lines)
        assert {line.name for line in lines if line.group == "reserve"} == {
            "operating system",
            "driver",
            "process context",
            "collective buffers",
            "fragmentation",
        }


def test_limits_equal_brute_force() -> None:
    limited = dataclasses.replace(TINY, text=dataclasses.replace(TINY.text, model_max_length=700))
    layout = Layout(drafts=2, token_budget=64)
    fixed = Sizes(limited, layout, 0).total(1, 1)
    for extra in (-1, 0, 150_000, 400_000, 1_000_000, 3_000_000, 30_000_000):
        memory = (fixed + extra) * 50 // 49 + 1
        sizes = Sizes(limited, layout, memory)
        for concurrency in (1, 2, 7):
            longest = max((n for n in range(1, 701) if sizes.fits(n, concurrency)), default=0)
            assert sizes.largest_context(concurrency) == longest
        for context in (1, 129, 700):
            most = max((n for n in range(1, 800) if sizes.fits(context, n)), default=0)
            assert min(sizes.largest_concurrency(context), 799) == most


CONTEXTS = st.integers(1, 1_048_576)
NUMBERS = st.integers(1, 3000)


@settings(max_examples=60, deadline=None)
@given(CONTEXTS, CONTEXTS, NUMBERS, NUMBERS, st.integers(2**33, 2**39), st.integers(0, 2**36))
def test_more_memory_never_hurts_and_more_load_never_helps(
    context: int, longer: int, number: int, more: int, memory: int, added: int
) -> None:
    layout = Layout(tp=8, nvfp4_layers=released_nvfp4_layers(SMALL), drafts=8)
    sizes = Sizes(SMALL, layout, memory)
    short, long = sorted((context, longer))
    few, many = sorted((number, more))
    if sizes.fits(long, many):
        assert sizes.fits(short, many) and sizes.fits(long, few)
    if sizes.fits(short, few):
        assert Sizes(SMALL, layout, memory + added).fits(short, few)
    assert sizes.total(short, few) <= sizes.total(long, many)


def test_depths_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--mtp 9: the model has 8 draft depths; give 0 to 8"):
        Sizes(INKLING, Layout(drafts=9), 10**12)
