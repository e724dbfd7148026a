"""Random weights: the promised distribution, and the same values however the model is held."""

import dataclasses
from pathlib import Path

import pytest
import torch

from suzuri.model.config import ModelConfig, Quantization, preset
from suzuri.model.inkling import Inkling
from suzuri.model.random_weights import RandomWeights, initialize
from suzuri.model.tensor_table import parameter_shapes, table
from suzuri.model.weights import export_weights, load_weights
from tests.model.checkpoints import ALL, assert_same_bits, read_tensors


def drawn(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inkling:
    model = Inkling(config, dtype=dtype)
    initialize(model, seed)
    return model


def test_matrices_are_normal_the_rest_is_plain() -> None:
    for name, value in drawn(preset("tiny")).named_parameters():
        if value.dim() == 1:
            assert bool((value == (0 if name.endswith("router.bias") else 1)).all()), name
            continue
        # Five standard errors of mean and deviation.
        spread = 5 * 0.02 / value.numel() ** 0.5
        assert abs(value.float().mean().item()) < spread, name
        assert abs(value.float().std().item() - 0.02) < spread, name


def test_seeds_and_parameters_differ() -> None:
    one, other = drawn(preset("tiny")), drawn(preset("tiny"), seed=1)
    values = dict(one.named_parameters())
    assert not torch.equal(values["decoder.embed.weight"], other.decoder.embed.weight)
    assert not torch.equal(values["decoder.embed.weight"], values["decoder.unembed.weight"])


def test_same_values_in_every_dtype_and_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drawn(preset("tiny")).state_dict()
    wide = drawn(preset("tiny"), torch.float32).state_dict()
    for name, value in expected.items():
        assert torch.equal(value.float(), wide[name].float()), name
    monkeypatch.setattr("suzuri.model.transfer.CHUNK_BYTES", 999)
    assert_same_bits(drawn(preset("tiny")).state_dict(), expected)


def test_quantised_in_place_equals_quantised_by_export(tmp_path: Path) -> None:
    config = dataclasses.replace(
        preset("tiny"), quantization=Quantization(names="modelopt", layers=(3, 4, 5))
    )
    held = drawn(config)
    export_weights(drawn(preset("tiny")), tmp_path / "out", experts="nvfp4")
    loaded = Inkling(ModelConfig.from_file(tmp_path / "out"))
    load_weights(loaded, tmp_path / "out", want=ALL)
    assert_same_bits(held.state_dict(), loaded.state_dict())
    export_weights(held, tmp_path / "again")
    assert_same_bits(read_tensors(tmp_path / "again"), read_tensors(tmp_path / "out"))


def test_a_part_of_a_parameter_needs_no_other() -> None:
    config = preset("inkling")
    source = RandomWeights(parameter_shapes(table(config)), seed=7)
    name = "decoder.layers.40.mlp.gate_up"
    rows = source.read(name, 200, 6000, 6010)
    assert rows.shape == (10, 6144) and rows.dtype == torch.bfloat16
    assert torch.equal(source.read(name, 200, 6003, 6005), rows[3:5])
    assert not torch.equal(source.read(name, 201, 6000, 6010), rows)
