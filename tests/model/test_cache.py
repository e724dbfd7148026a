"""State in caches: equal bits for every way of cutting, batching and undoing; bounded workspace."""

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.model.batch import pack
from suzuri.model.cache import SequenceCache, decoder_attentions, draft_attentions
from tests.kernels.compare import assert_same_bits
from tests.model.models import golden_model, random_ids, run_in_chunks

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("chunk", (1, 2, 3, 4, 5, 7))
def test_c01_later_chunks_continue_the_convs(chunk: int) -> None:
    model = golden_model("base")
    ids = random_ids(model, 23)
    sizes = [min(chunk, 23 - first) for first in range(0, 23, chunk)]
    assert_same_bits(run_in_chunks(model, ids, sizes, page_size=4), model.decoder(pack([ids])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ("base", "chain", "odd", "wide"))
def test_mixed_prefill_and_decode_in_one_batch(case: str, dtype: torch.dtype) -> None:
    """Rows of several sequences at different positions, one batch after the other."""
    model = golden_model(case, dtype)
    sequences = [random_ids(model, n, seed=n) for n in (70, 3, 19)]
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=3,
        max_tokens=70,
        dtype=dtype,
        page_size=16,
    )
    parts: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    position = [0, 0, 0]
    for lengths in ((60, 0, 5), (1, 1, 0), (0, 1, 9), (1, 0, 4), (8, 1, 1)):
        members = [s for s in range(3) if lengths[s]]
        firsts, sizes = [position[s] for s in members], [lengths[s] for s in members]
        view = cache.view(members, firsts, sizes)
        pieces = [sequences[s][position[s] : position[s] + lengths[s]] for s in members]
        hidden_ND = model.decoder(pack(pieces, first_positions=firsts, cache=view))
        for s, part in zip(members, hidden_ND.split(sizes), strict=True):
            parts[s].append(part)
            position[s] += len(part)
    for s, ids in enumerate(sequences):
        assert position[s] == len(ids)
        assert_same_bits(torch.cat(parts[s]), model.decoder(pack([ids])))


@pytest.mark.parametrize("undone", (1, 2, 3))
def test_undoing_rejected_tokens_is_continuing_from_an_earlier_position(undone: int) -> None:
    """C07, model part: a verify window whose last tokens were wrong leaves no trace."""
    model = golden_model("base")
    ids = random_ids(model, 24)
    wrong = [(t + 1) % 301 for t in ids]
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=1,
        max_tokens=40,
        dtype=torch.float32,
        page_size=4,
        undo=3,
    )

    def run(tokens: list[int], first: int) -> torch.Tensor:
        view = cache.view([0], [first], [len(tokens)])
        return model.decoder(pack([tokens], first_positions=[first], cache=view))

    run(ids[:10], 0)
    window = [*ids[10 : 14 - undone], *wrong[14 - undone : 14]]
    run(window, 10)
    rest_ND = run(ids[14 - undone :], 14 - undone)
    assert_same_bits(rest_ND, model.decoder(pack([ids]))[14 - undone :])


@pytest.mark.parametrize("case", ("base", "chain", "wide"))
def test_c11_draft_depths_keep_their_own_state(case: str) -> None:
    """Depths decoded row by row through their cache equal the whole, from the first row on."""
    model = golden_model(case)
    assert model.draft is not None
    ids = random_ids(model, 13)
    hidden_ND = model.decoder(pack([ids]))
    for depth in range(len(model.draft.depths)):
        consumed = [*ids[depth + 1 :], *ids[: depth + 1]]
        batch = pack([consumed])
        embedded_ND = model.decoder.embedded(batch)
        whole_ND = model.draft(depth, hidden_ND, embedded_ND, batch)
        cache = SequenceCache(
            model.config,
            draft_attentions(model.config),
            num_sequences=1,
            max_tokens=13,
            dtype=torch.float32,
            page_size=4,
        )
        rows: list[torch.Tensor] = []
        for i, token in enumerate(consumed):
            view = cache.view([0], [i], [1])
            step = pack([[token]], first_positions=[i], cache=view)
            rows.append(model.draft(depth, hidden_ND[i : i + 1], embedded_ND[i : i + 1], step))
        assert_same_bits(torch.cat(rows), whole_ND)
        hidden_ND = whole_ND


def test_a_cache_that_is_too_small_says_so() -> None:
    model = golden_model("base")
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=1,
        max_tokens=8,
        dtype=torch.float32,
    )
    with pytest.raises(ValueError, match="9 tokens in a cache of 8"):
        cache.view([0], [4], [5])
    with pytest.raises(ValueError, match="without a cache every sequence starts at 0"):
        pack([[1]], first_positions=[3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ("base", "narrow", "chain"))
def test_same_bits_on_gpu_for_every_cut(case: str, dtype: torch.dtype) -> None:
    model = golden_model(case, dtype, "cuda")
    sequences = [random_ids(model, n, seed=n) for n in (1, 7, 33, 2, 24)]
    with dispatch.force("reference"):
        packed_ND = model.decoder(pack(sequences, device="cuda"))
        alone = [model.decoder(pack([ids], device="cuda")) for ids in sequences]
        assert_same_bits(packed_ND, torch.cat(alone))
        for chunks in ([23, 1], [5, 5, 5, 5, 4], [7, 7, 7, 3]):
            assert_same_bits(run_in_chunks(model, sequences[-1], chunks, page_size=7), alone[-1])
