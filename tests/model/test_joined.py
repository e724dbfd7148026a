"""Ops that join several modules give the model the bits of the modules one by one, state included.

On a CPU they are compositions, so that only the wiring is tested there; on a GPU they are kernels.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.model.batch import pack
from suzuri.model.cache import SequenceCache, decoder_attentions
from suzuri.model.inkling import Inkling
from tests.kernels.compare import LOW, assert_same_bits
from tests.model.models import golden_model, random_ids

STEPS = ((60, 1, 5), (1, 1, 1), (3, 9, 1), (1, 1, 1), (1, 40, 3))
"""New tokens of each of three sequences: prefill, decode, verify, mixed."""


def run(model: Inkling, media: bool) -> list[Tensor]:
    """Hidden rows of every step, and what is remembered in the end."""
    weight, lengths = (
        model.decoder.norm.weight,
        [sum(counts) for counts in zip(*STEPS, strict=True)],
    )
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=3,
        max_tokens=max(lengths),
        dtype=weight.dtype,
        device=weight.device,
        page_size=8,
        undo=2,
    )
    sequences = [random_ids(model, n, seed=n) for n in lengths]
    g = torch.Generator().manual_seed(1)
    features = torch.randn(2, model.config.text.hidden_size, generator=g).to(weight.device)
    found: list[Tensor] = []
    position = [0, 0, 0]
    for counts in STEPS:
        view = cache.view(range(3), position, counts)
        pieces = [ids[p : p + n] for ids, p, n in zip(sequences, position, counts, strict=True)]
        options: dict[str, Any] = {"media": [(0, 1, features)]} if media and counts[0] > 2 else {}
        batch = pack(pieces, first_positions=position, cache=view, device=weight.device, **options)
        found.append(model.decoder(batch))
        position = [p + n for p, n in zip(position, counts, strict=True)]
    for layer in cache.layers:
        found += [layer.k_pages_PTUC, layer.v_pages_PTUC]
        found += [layer.kv_conv_LRC, layer.attn_conv_LRC, layer.mlp_conv_LRC]
    return found


def same(model: Inkling, media: bool) -> None:
    with dispatch.apart():
        expected = run(model, media)
    for i, (one, wanted) in enumerate(zip(run(model, media), expected, strict=True)):
        assert_same_bits(one, wanted, str(i))


@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("case", ["base", "odd"])
def test_the_wiring(case: str, media: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Tensor] = []

    def anywhere(weight: Tensor) -> bool:
        joined.append(weight)
        return not dispatch.is_apart()

    monkeypatch.setattr(dispatch, "use_joined", anywhere)
    same(golden_model(case), media)
    assert len(joined) >= 2 * len(STEPS)


def test_modules_are_called_one_by_one_on_a_cpu_and_where_somebody_watches() -> None:
    weight = golden_model("base").decoder.norm.weight
    assert not dispatch.use_joined(weight) and not dispatch.is_apart()
    with dispatch.apart():
        assert dispatch.is_apart()
        with dispatch.apart():
            pass
        assert dispatch.is_apart()
    assert not dispatch.is_apart()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("case", ["base", "odd", "wide"])
def test_same_bits_on_gpu(case: str, media: bool, dtype: torch.dtype) -> None:
    model = golden_model(case, dtype, "cuda")
    assert dispatch.use_joined(model.decoder.norm.weight)
    same(model, media)
