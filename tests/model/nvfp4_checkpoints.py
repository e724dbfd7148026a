"""NVFP4 checkpoints made without the package's own writer, and what their numbers are by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.model.checkpoints import BASE, GOLDEN, Tensors, read_tensors

LAYERS = (3, 4, 5, 6, 7)
"""What the releases would quantise of the golden case `base`."""
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
SUFFIXES = {
    "modelopt": ("", ".scale", ".scale2"),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_global_scale"),
}
Change = Callable[[Tensors], None]


def plain_quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, block scales, global scales) by block amax / 6 and expert amax / 2688."""
    wide = weight.float()
    scale2 = wide.abs().amax((1, 2)) / (6 * 448)
    blocks = wide.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / scale2[:, None, None]).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float()[..., None] * scale2[:, None, None, None]).clamp(min=1e-30)
    code = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    code = code.flatten(-2).to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, scale, scale2


def plain_dequantize(codes: Tensor, scale: Tensor, scale2: Tensor) -> Tensor:
    """The bf16 values, from the definition."""
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    values = E2M1[pairs & 7] * torch.where(pairs > 7, -1.0, 1.0)
    values = values.unflatten(-1, (-1, 16)) * scale.float()[..., None]
    return (values.flatten(-2) * scale2[:, None, None]).bfloat16()


def block_in_config(names: str) -> dict[str, Any]:
    """A quantization_config as its writers put it into config.json."""
    keep = [f"model.llm.layers.{i}.mlp.experts" for i in range(3)]
    if names == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "exclude_modules": keep,
        }
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": keep,
    }


def side_file() -> dict[str, Any]:
    """hf_quant_config.json as released."""
    keep = [f"model.llm.layers.{i}.mlp.experts" for i in range(3)]
    return {
        "producer": {"name": "modelopt", "version": "0.40"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": keep,
        },
    }


def quantised(
    folder: Path,
    *,
    names: str = "modelopt",
    activations: bool = True,
    blocks: tuple[str, ...] = ("config", "side"),
    change: Change | None = None,
) -> Path:
    """A folder like `base` with NVFP4 experts; `blocks`: where the config tells of them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = read_tensors(BASE)
    packed, scales, scale2s = SUFFIXES[names]
    for layer in LAYERS:
        for which in ("w13_weight", "w2_weight"):
            name = f"model.llm.layers.{layer}.mlp.experts.{which}"
            weight = tensors.pop(name)
            codes, scale, scale2 = plain_quantize(weight)
            tensors[name + packed] = codes
            tensors[name + scales] = scale
            tensors[name + scale2s] = scale2 if names == "modelopt" else 1 / scale2
            if activations and names == "modelopt":
                tensors[f"{name}.input_amax"] = torch.tensor([2.5 + layer]).bfloat16()
                tensors[f"{name}.original_shape"] = torch.tensor(list(weight.shape))
            elif activations:
                tensors[f"{name}.input_global_scale"] = torch.tensor([2688.0 / (2.5 + layer)])
    if change is not None:
        change(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((BASE / "config.json").read_text())
    if "config" in blocks:
        config["quantization_config"] = block_in_config(names)
    (folder / "config.json").write_text(json.dumps(config))
    if "side" in blocks and names == "modelopt":
        (folder / "hf_quant_config.json").write_text(json.dumps(side_file()))
    return folder


def dequantised(folder: Path, source: Path, names: str = "modelopt") -> Path:
    """The bf16 checkpoint with the values of a quantised one, worked out by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = read_tensors(source)
    packed, scales, scale2s = SUFFIXES[names]
    for layer in LAYERS:
        for which in ("w13_weight", "w2_weight"):
            name = f"model.llm.layers.{layer}.mlp.experts.{which}"
            parts = [tensors.pop(name + suffix) for suffix in (packed, scales, scale2s)]
            if names != "modelopt":
                parts[2] = 1 / parts[2]
            tensors[name] = plain_dequantize(*parts)
    for name in list(tensors):
        if name.endswith((".input_amax", ".original_shape", ".input_global_scale")):
            del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(GOLDEN / "base" / "original" / "config.json", folder)
    return folder
