"""NVFP4 checkpoints: equal to the dequantised bf16 model, or refused by name (lines Q and W)."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from suzuri.model.batch import pack
from suzuri.model.checkpoint_files import CheckpointError
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.model.weights import LoadReport, export_weights, load_weights
from tests.model.checkpoints import ALL, BASE, Tensors, assert_same_bits, load, read_tensors
from tests.model.nvfp4_checkpoints import LAYERS, Change, dequantised, quantised

W13 = "model.llm.layers.3.mlp.experts.w13_weight"
W2 = "model.llm.layers.7.mlp.experts.w2_weight"
IDS = [5, 17, 42, 7, 8, 255, 300, 3, 3, 99]


def load_as(
    folder: Path, dtype: torch.dtype, *, dequantized: bool = False
) -> tuple[Inkling, LoadReport]:
    config = ModelConfig.from_file(folder)
    model = Inkling(config, dtype=dtype, dequantized=dequantized)
    return model, load_weights(model, folder, want=ALL)


def logits(model: Inkling) -> Tensor:
    with torch.no_grad():
        return model.decoder.logits(model.decoder(pack([IDS[:6], IDS])))


def refused(folder: Path, *words: str) -> str:
    model = Inkling(ModelConfig.from_file(folder))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, folder, want=ALL)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert_same_bits(before, model.state_dict())
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("names", ["modelopt", "compressed-tensors"])
def test_equal_to_the_dequantised_model(tmp_path: Path, names: str, dtype: torch.dtype) -> None:
    """Held quantised, dequantised on loading, or dequantised by hand: the same bits."""
    folder = quantised(tmp_path / "nvfp4", names=names)
    by_hand, _ = load_as(dequantised(tmp_path / "bf16", folder, names), dtype)
    expected = logits(by_hand)
    held, report = load_as(folder, dtype)
    assert report.notes == () and held.decoder.blocks[3].mlp.routed_down is not None
    assert torch.equal(logits(held), expected)
    at_once, _ = load_as(folder, dtype, dequantized=True)
    assert torch.equal(logits(at_once), expected)
    assert_same_bits(at_once.state_dict(), by_hand.state_dict())
    original, _ = load_as(BASE, dtype)
    assert not torch.equal(logits(original), expected)  # the quantised experts were used


def test_quantised_experts_are_held_as_stored(tmp_path: Path) -> None:
    folder = quantised(tmp_path)
    model, _ = load_as(folder, torch.bfloat16)
    stored, state = read_tensors(folder), model.state_dict()
    for part, name in (("gate_up", "w13_weight"), ("down", "w2_weight")):
        for layer in LAYERS:
            ours = f"decoder.layers.{layer}.mlp.routed_{part}"
            theirs = f"model.llm.layers.{layer}.mlp.experts.{name}"
            assert torch.equal(state[f"{ours}.codes"], stored[theirs])
            scales = state[f"{ours}.block_scales"].view(torch.uint8)
            assert torch.equal(scales, stored[f"{theirs}.scale"].view(torch.uint8))
            assert torch.equal(state[f"{ours}.global_scales"], stored[f"{theirs}.scale2"])
            assert torch.equal(state[f"{ours}.input_amax"], stored[f"{theirs}.input_amax"])
    assert state["decoder.layers.3.mlp.gate_up"].shape[0] == 2  # the shared experts alone
    assert state["decoder.layers.2.mlp.gate_up"].shape[0] == 10  # not quantised
    assert not any("routed" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("activations", [True, False])
def test_save_and_load_is_exact(tmp_path: Path, activations: bool) -> None:
    folder = quantised(tmp_path / "in", activations=activations)
    model, _ = load_as(folder, torch.bfloat16)
    export_weights(model, tmp_path / "out")
    before, after = read_tensors(folder), read_tensors(tmp_path / "out")
    if not activations:
        after = {k: v for k, v in after.items() if not k.endswith(".original_shape")}
    assert_same_bits(before, after)
    assert ModelConfig.from_file(tmp_path / "out") == ModelConfig.from_file(folder)
    again, _ = load_as(tmp_path / "out", torch.bfloat16)
    assert_same_bits(again.state_dict(), model.state_dict())


def test_export_in_the_other_layout_is_exact(tmp_path: Path) -> None:
    model, _ = load_as(quantised(tmp_path / "in"), torch.bfloat16)
    export_weights(model, tmp_path / "out", layout="transformers")
    stored, released = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "in")
    name = "model.language_model.layers.3.mlp.experts.gate_up_proj"
    codes, scales = stored[name], stored[f"{name}.scale"].view(torch.uint8)
    before = released[f"{W13}.scale"].view(torch.uint8)
    assert torch.equal(codes, torch.cat([released[W13][:, 0::2], released[W13][:, 1::2]], 1))
    assert torch.equal(scales, torch.cat([before[:, 0::2], before[:, 1::2]], 1))
    again, report = load_as(tmp_path / "out", torch.bfloat16)
    assert report.notes == ()
    assert_same_bits(again.state_dict(), model.state_dict())


def test_export_dequantised_and_quantised_again(tmp_path: Path) -> None:
    """What our quantiser made comes back byte for byte through bf16."""
    model, _ = load(BASE)
    export_weights(model, tmp_path / "one", experts="nvfp4")
    held, report = load_as(tmp_path / "one", torch.bfloat16)
    assert report.notes == ("NVFP4 experts without activation scales: weight-only",)
    export_weights(held, tmp_path / "bf16", experts="bf16")
    plain, _ = load_as(tmp_path / "bf16", torch.bfloat16)
    assert plain.config.quantization is None and torch.equal(logits(plain), logits(held))
    export_weights(plain, tmp_path / "two", experts="nvfp4")
    assert_same_bits(read_tensors(tmp_path / "one"), read_tensors(tmp_path / "two"))


# Q01, Q04: what the checkpoint says about itself.


@pytest.mark.parametrize("names", ["modelopt", "compressed-tensors"])
def test_q01_without_activation_scales_it_is_weight_only(tmp_path: Path, names: str) -> None:
    folder = quantised(tmp_path / "without", names=names, activations=False)
    model, report = load_as(folder, torch.float32)
    assert report.notes == ("NVFP4 experts without activation scales: weight-only",)
    full, _ = load_as(quantised(tmp_path / "with", names=names), torch.float32)
    assert torch.equal(logits(model), logits(full))


def test_q01_some_activation_scales_are_a_fault(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[f"{W13}.input_amax"]

    refused(quantised(tmp_path, change=change), f"{W13}.input_amax [1] is missing", "1 problem")


def test_q04_block_in_config_or_side_file_or_both(tmp_path: Path) -> None:
    outputs: list[Tensor] = []
    for i, blocks in enumerate((("config",), ("side",), ("config", "side"))):
        folder = quantised(tmp_path / str(i), blocks=blocks)
        model, report = load_as(folder, torch.float32)
        assert report.notes == () and model.config.quantization is not None
        assert model.config.quantization.layers == LAYERS
        outputs.append(logits(model))
        assert torch.equal(outputs[0], outputs[-1])
    # In neither: a bf16 checkpoint is bf16, and quantised tensors are found all the same.
    assert ModelConfig.from_file(BASE).quantization is None
    model, report = load_as(quantised(tmp_path / "none", blocks=()), torch.float32)
    assert "NVFP4, which neither config.json nor hf_quant_config.json says" in report.notes[0]
    assert torch.equal(logits(model), outputs[0])


def test_q04_block_that_contradicts_the_files(tmp_path: Path) -> None:
    folder = quantised(tmp_path)
    file = folder / "hf_quant_config.json"
    side = json.loads(file.read_text())
    side["quantization"]["exclude_modules"].append("model.llm.layers.5.mlp.experts")
    file.write_text(json.dumps(side))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "model.llm.layers.5.mlp.experts.w13_weight", "excludes the experts of layer 5")


def test_config_says_nvfp4_but_the_files_are_bf16(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        plain = read_tensors(BASE)
        for name in list(tensors):
            if ".experts." in name and name not in plain:
                del tensors[name]
        tensors.update({k: v for k, v in plain.items() if ".experts." in k})

    refused(quantised(tmp_path, change=change), f"{W13} has shape", f"{W13}.scale2 [8] is missing")


# Faults of single tensors, all found before anything is computed.


def drop(name: str) -> Change:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def put(name: str, value: Tensor) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(f"{W13}.scale"), [f"{W13}.scale [8, 64, 4] is missing"]),
        (drop(f"{W13}.scale2"), [f"{W13}.scale2 [8] is missing"]),
        (drop(f"{W2}.scale2"), [f"{W2}.scale2 [8] is missing"]),
        (drop(f"{W2}.original_shape"), [f"{W2}.original_shape [3] is missing"]),
        (drop(W2), [f"{W2} [8, 64, 16] is missing"]),
        (put(W2, torch.zeros(8, 64, 16, dtype=torch.int8)), [W2, "dtype I8; must be U8"]),
        (put(f"{W2}.scale", torch.ones(8, 64, 2)), [f"{W2}.scale", "F32; must be F8_E4M3"]),
        (
            put(f"{W2}.scale", torch.ones(8, 64, 2).to(torch.float8_e5m2)),
            ["F8_E5M2; must be F8_E4M3"],
        ),
        (put(f"{W2}.scale", torch.ones(8, 64, 4).to(torch.float8_e4m3fn)), ["[8, 64, 4]; must"]),
        (put(f"{W2}.scale2", torch.ones(8).bfloat16()), [f"{W2}.scale2", "BF16; must be F32"]),
        (put(f"{W2}.scale2", torch.ones(7)), ["shape [7]; must be [8]"]),
        (put(f"{W2}.scale2", torch.ones(8, 2)), ["shape [8, 2]; must be [8]"]),
        (put(f"{W2}.scale2", torch.tensor([1.0] * 7 + [torch.nan])), ["is nan for expert 7"]),
        (put(f"{W2}.scale2", torch.tensor([1.0, 0] * 4)), ["is 0.0 for expert 1"]),
        (put(f"{W2}.scale2", -torch.ones(8)), ["is -1.0 for expert 0"]),
        (put(f"{W2}.scale2", -torch.ones(8, 1)), ["is -1.0 for expert 0"]),
        (
            put(f"{W2}.scale2", torch.tensor([1.0] * 6 + [1.2645e35] * 2)),
            ["expert 6; must be below 1.2"],
        ),
        (put(f"{W2}.scale2", torch.tensor(1.0)), ["shape []; must be [8]"]),
        (put(f"{W2}.original_shape", torch.tensor([8, 64, 16])), ["[8, 64, 16]", "[8, 64, 32]"]),
        *(
            (
                put(f"{W2}.input_amax", torch.tensor([value]).bfloat16()),
                [f"is {value!r}; the scale"],
            )
            for value in (math.nan, math.inf, -1.0, 0.0)
        ),
        (put(f"{W2}.scale3", torch.ones(8)), [f"{W2}.scale3 is surplus"]),
        (
            put("model.llm.layers.3.mlp.shared_experts.shared_w2_weight.scale2", torch.ones(2)),
            ["shared_w2_weight.scale2 is surplus"],
        ),
        (put("model.llm.layers.3.attn.wo_ud.weight.scale", torch.ones(2)), ["wo_ud.weight.scale"]),
    ],
)
def test_a_faulty_tensor_is_named(tmp_path: Path, change: Change, words: list[str]) -> None:
    refused(
        quantised(tmp_path, change=change), "model.safetensors" if len(words) > 1 else "", *words
    )


@pytest.mark.parametrize(
    ("byte", "words"),
    [
        (0x7F, "NaN"),
        (0xFF, "NaN"),
        (0x81, "a negative scale"),
        (0xBF, "a negative scale"),
        (0xFE, "a negative scale"),
    ],
)
def test_block_scale_that_cannot_be(tmp_path: Path, byte: int, words: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{W2}.scale"].view(torch.uint8)[5, 3, 1] = byte

    folder = quantised(tmp_path, change=change)
    with pytest.raises(CheckpointError, match=rf"{W2}\.scale holds {words}, in expert 5"):
        load_as(folder, torch.bfloat16)


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7E, 0x80])
def test_block_scale_of_any_other_byte_loads(tmp_path: Path, byte: int) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{W2}.scale"].view(torch.uint8)[5, 3, 1] = byte

    folder = quantised(tmp_path / "nvfp4", change=change)
    model, _ = load_as(folder, torch.float32, dequantized=True)
    by_hand, _ = load_as(dequantised(tmp_path / "bf16", folder), torch.float32)
    assert_same_bits(model.state_dict(), by_hand.state_dict())


def divisors(value: float, expert: int) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[f"{W2}.weight_global_scale"][expert] = value

    return change


@pytest.mark.parametrize("value", [1e-39, 1e-45, 7.8e-36, 0.0, -1.0, math.inf, math.nan])
def test_divisor_whose_inverse_is_no_scale(tmp_path: Path, value: float) -> None:
    """From 7.9e-36 on, 2688 times its inverse is finite in bf16."""
    folder = quantised(tmp_path, names="compressed-tensors", change=divisors(value, 3))
    refused(folder, f"{W2}.weight_global_scale is ", " for expert 3; must be ", "1 problem(s)")


@pytest.mark.parametrize("value", [7.95e-36, 3e38])
def test_the_smallest_and_largest_divisors_give_finite_weights(
    tmp_path: Path, value: float
) -> None:
    def change(tensors: Tensors) -> None:
        divisors(value, 3)(tensors)
        tensors[f"{W2}.weight_packed"][3] = 0x77
        tensors[f"{W2}.weight_scale"].view(torch.uint8)[3] = 0x7E

    folder = quantised(tmp_path, names="compressed-tensors", change=change)
    model, _ = load_as(folder, torch.bfloat16, dequantized=True)
    expert = model.state_dict()["decoder.layers.7.mlp.down"][3]
    assert expert.unique().numel() == 1 and bool((expert.isfinite() & (expert > 0)).all())


@pytest.mark.parametrize("divisor", [0.0, -3.0, math.nan, math.inf, 1e-38])
def test_activation_divisor_that_cannot_be(tmp_path: Path, divisor: float) -> None:
    change = put(f"{W2}.input_global_scale", torch.tensor([divisor]))
    folder = quantised(tmp_path, names="compressed-tensors", change=change)
    refused(folder, f"{W2}.input_global_scale is ", "loads as weight-only")


def test_activation_scales_of_both_kinds_of_names_are_the_same(tmp_path: Path) -> None:
    """A divisor is 448 * 6 / amax; read and written."""
    for names in ("modelopt", "compressed-tensors"):
        model, _ = load_as(quantised(tmp_path / names, names=names), torch.bfloat16)
        for layer in LAYERS:
            held = model.state_dict()[f"decoder.layers.{layer}.mlp.routed_down.input_amax"]
            assert held.tolist() == [2.5 + layer]
    export_weights(model, tmp_path / "out")
    written = read_tensors(tmp_path / "out")[f"{W2}.input_global_scale"]
    assert written.tolist() == [torch.tensor(2688 / 9.5).item()]


def test_global_scales_may_be_a_column(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".scale2")]:
            tensors[name] = tensors[name].reshape(-1, 1)

    expected, _ = load_as(quantised(tmp_path / "row"), torch.float32)
    model, _ = load_as(quantised(tmp_path / "column", change=change), torch.float32)
    assert_same_bits(model.state_dict(), expected.state_dict())


def test_every_fault_of_a_value_is_listed(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{W13}.scale2"][2] = 0
        tensors[f"{W2}.input_amax"][0] = math.nan
        tensors[f"{W2}.original_shape"][0] = 9

    folder = quantised(tmp_path, change=change)
    refused(folder, f"{W13}.scale2 is", f"{W2}.input_amax is", "holds [9, ", "3 problem(s)")


def test_one_value_may_be_0_dim_or_1_dim(tmp_path: Path) -> None:
    """Scales of one value: writers mix [] and [1], also for the router's and the MLP's."""

    def change(tensors: Tensors) -> None:
        for name, value in list(tensors.items()):
            if name.endswith((".input_amax", ".global_scale")):
                tensors[name] = value.reshape(())

    expected, _ = load_as(quantised(tmp_path / "plain"), torch.float32)
    model, _ = load_as(quantised(tmp_path / "0dim", change=change), torch.float32)
    assert_same_bits(model.state_dict(), expected.state_dict())


def test_divisors_may_be_one_for_all_experts(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"0dim": (), "one": (1,), "column": (8, 1)}
    outputs: list[Tensor] = []
    for kind, shape in shapes.items():

        def change(tensors: Tensors, shape: tuple[int, ...] = shape) -> None:
            for name in list(tensors):
                if name.endswith("global_scale") and ".experts." in name and "input" not in name:
                    tensors[name] = torch.full(shape, 1024.0)

        folder = quantised(tmp_path / kind, names="compressed-tensors", change=change)
        outputs.append(logits(load_as(folder, torch.float32)[0]))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


# W01, W02 for quantised checkpoints.


@pytest.mark.parametrize("tenth", range(10))
def test_w01_shard_cut_at_any_tenth(tmp_path: Path, tenth: int) -> None:
    folder = quantised(tmp_path)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size * tenth // 10)
    refused(folder, "model.safetensors is cut off", "bytes")


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_w02_missing_shard_of_a_quantised_checkpoint(tmp_path: Path, missing: int) -> None:
    model, _ = load_as(quantised(tmp_path / "in"), torch.bfloat16)
    export_weights(model, tmp_path / "out", max_shard_bytes=300_000)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) >= 3
    shards[missing - 1].unlink()
    refused(tmp_path / "out", shards[missing - 1].name, "names files that are not there")
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    refused(tmp_path / "out", shards[missing - 1].name, "lacks")
