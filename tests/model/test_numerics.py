"""Lines N* of the known faults (docs/faults.md) at model level; op level: tests/kernels."""

import copy

import pytest
import torch

from suzuri.kernels.sample_tokens import sample_tokens
from suzuri.model.batch import pack
from suzuri.model.cache import SequenceCache, decoder_attentions
from suzuri.model.inkling import Inkling
from suzuri.model.moe import MoE
from suzuri.tools.golden import greedy, recorded
from tests.kernels.compare import assert_same_bits
from tests.model.models import (
    CASES,
    expected,
    golden_model,
    random_ids,
    run_in_chunks,
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_n01_chunked_prefill_and_decode_equal_the_whole(case: str, dtype: torch.dtype) -> None:
    model = golden_model(case, dtype)
    ids = random_ids(model, 24, seed=1)
    whole_ND = model.decoder(pack([ids]))
    for chunks in ([23, 1], [5, 5, 5, 5, 4], [1] * 24, [7, 7, 7, 3]):
        assert_same_bits(run_in_chunks(model, ids, chunks, page_size=7), whole_ND)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ("base", "odd"))
def test_n03_ragged_batch_equals_each_alone(case: str, dtype: torch.dtype) -> None:
    model = golden_model(case, dtype)
    sequences = [random_ids(model, n, seed=n) for n in (1, 7, 33, 2, 1, 129)]
    packed_ND = model.decoder(pack(sequences))
    alone_ND = torch.cat([model.decoder(pack([ids])) for ids in sequences])
    assert_same_bits(packed_ND, alone_ND)
    backwards_ND = model.decoder(pack(sequences[::-1]))
    assert_same_bits(
        torch.cat(backwards_ND.split([len(s) for s in sequences[::-1]])[::-1]), alone_ND
    )


@pytest.mark.slow
@pytest.mark.parametrize("length", (253, 361, 505, 541, 721, 1009, 1441))
def test_n05_result_does_not_depend_on_chunk_size(length: int) -> None:
    model = golden_model("base")
    ids = random_ids(model, length, seed=length)
    whole_ND = model.decoder(pack([ids]))
    for chunk in (512, 256):
        sizes = [min(chunk, length - first) for first in range(0, length, chunk)]
        assert_same_bits(run_in_chunks(model, ids, sizes), whole_ND)


@pytest.mark.parametrize("case", ("base", "chain"))
def test_n09_greedy_decode_equals_repeated_full_forward(case: str) -> None:
    model = golden_model(case)
    sequences = [random_ids(model, n, seed=n) for n in (3, 9, 20)]
    decoded: list[list[int]] = []
    for ids in sequences:
        tokens, rows_NV = greedy(model, pack([ids]), 30)
        repeated = list(ids)
        for i in range(30):
            logits_1V = model.decoder.logits(model.decoder(pack([repeated]))[-1:])
            assert torch.equal(logits_1V[0], rows_NV[i])
            repeated.append(int(logits_1V.argmax()))
        assert repeated[len(ids) :] == tokens.tolist()
        decoded.append(repeated)
    assert decode_together(model, sequences, 30) == decoded


def decode_together(model: Inkling, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Greedy decoding of a ragged batch through one cache, every sequence in every step."""
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=len(prompts),
        max_tokens=max(map(len, prompts)) + num_new,
        dtype=model.decoder.norm.weight.dtype,
        page_size=16,
    )
    sequences = [list(ids) for ids in prompts]
    pieces, firsts = [list(ids) for ids in prompts], [0] * len(prompts)
    for _ in range(num_new):
        lengths = [len(piece) for piece in pieces]
        view = cache.view(range(len(prompts)), firsts, lengths)
        hidden_ND = model.decoder(pack(pieces, first_positions=firsts, cache=view))
        ends = torch.tensor(lengths).cumsum(0) - 1
        chosen = model.decoder.logits(hidden_ND[ends]).argmax(-1).tolist()
        firsts = [first + length for first, length in zip(firsts, lengths, strict=True)]
        pieces = [[token] for token in chosen]
        for ids, token in zip(sequences, chosen, strict=True):
            ids.append(token)
    return sequences


def test_n14_zero_convs_return_their_input_and_the_layer_adds_its_own_residual() -> None:
    model = copy.deepcopy(golden_model("base"))
    for name, parameter in model.decoder.named_parameters():
        if name.endswith("_conv.weight"):
            parameter.zero_()
    ids = random_ids(model, 24)
    with recorded(model) as records:
        model.decoder(pack([ids]))
    h_ND = records[model.decoder.embed_norm]
    for layer in model.decoder.blocks:
        assert torch.equal(records[layer.attn_conv], records[layer.attn])
        assert torch.equal(records[layer.mlp_conv], records[layer.mlp])
        middle_ND = h_ND + records[layer.attn]
        assert torch.equal(records[layer.mlp_norm], layer.mlp_norm(middle_ND))
        assert torch.equal(records[layer], middle_ND + records[layer.mlp])
        h_ND = records[layer]


@pytest.mark.parametrize("case", ("base", "narrow", "alldense"))
def test_n15_logits_are_scaled_exactly_once(case: str) -> None:
    """Hidden rows leave the model unscaled; logits recomputed outside equal the served ones."""
    model = golden_model(case, torch.float64)
    ids = expected(case)["text.input_ids"][0].tolist()
    with recorded(model) as records:
        hidden_ND = model.decoder(pack([ids]))
    text = model.config.text
    last_ND = records[model.decoder.blocks[-1]]
    rms_N1 = torch.sqrt((last_ND * last_ND).mean(-1, keepdim=True) + text.rms_norm_eps)
    torch.testing.assert_close(hidden_ND, last_ND / rms_N1 * model.decoder.norm.weight)
    multiplier = text.logits_mup_width_multiplier or 1.0
    outside_NV = hidden_ND @ model.decoder.unembed.weight.T / multiplier
    logits_NV = model.decoder.logits(hidden_ND)
    torch.testing.assert_close(logits_NV, outside_NV[:, : text.unpadded_vocab_size])


def test_n18_padding_rows_are_never_seen() -> None:
    model = copy.deepcopy(golden_model("base"))
    text = model.config.text
    model.decoder.unembed.weight[text.unpadded_vocab_size :] = 1e4
    hidden_ND = model.decoder(pack([random_ids(model, 24)]))
    logits_NV = model.decoder.logits(hidden_ND)
    assert logits_NV.shape[1] == text.unpadded_vocab_size == 301
    assert torch.equal(logits_NV, golden_model("base").decoder.logits(hidden_ND))
    rows_NV = logits_NV[-1:].expand(500, -1)
    drawn = sample_tokens(
        rows_NV,
        torch.ones(500),
        torch.arange(500),
        torch.full((500,), 24),
        torch.zeros(500, dtype=torch.int64),
    )
    assert int(drawn.max()) < text.unpadded_vocab_size
    assert len(drawn.unique()) > 5
    top = logits_NV.topk(20).indices
    assert int(top.max()) < text.unpadded_vocab_size


def test_n20_selection_bias_stays_out_of_the_weights() -> None:
    model = copy.deepcopy(golden_model("base"))
    router = next(b.mlp.router for b in model.decoder.blocks if isinstance(b.mlp, MoE))
    router.bias[3] += 100
    with recorded(model) as records:
        model.decoder(pack([random_ids(model, 24)]))
    experts_NK, weights_NJ, logits_NE = records[router]
    assert (experts_NK == 3).any(-1).all()
    assert (experts_NK.diff(dim=-1) > 0).all()
    text = model.config.text
    chosen_NJ = torch.cat(
        [logits_NE.gather(1, experts_NK), logits_NE[:, text.n_routed_experts :]], 1
    )
    share_NJ = torch.sigmoid(chosen_NJ)
    share_NJ = share_NJ / share_NJ.sum(-1, keepdim=True)
    wanted_NJ = share_NJ * text.route_scale * router.global_scale
    torch.testing.assert_close(weights_NJ, wanted_NJ, rtol=1e-5, atol=1e-6)


def test_left_padding_cannot_exist_and_positions_count_real_tokens() -> None:
    """Pitfall 7: the scale of global layers depends on the position among real tokens only: rows of
    a sequence behind another one in the pack keep their bits."""
    model = golden_model("chain")
    ids = random_ids(model, 24)
    alone_ND = model.decoder(pack([ids]))
    behind_ND = model.decoder(pack([[0, 0, 0], ids]))[3:]
    assert_same_bits(behind_ND, alone_ND)
