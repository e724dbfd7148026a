"""Times of making weights in place: random draws, quantising and dequantising; and their bits.

    python benchmarks/weights.py --device cuda --json OUT    # of benchmarks/shapes/L6E64

Draws the whole shape on the device (median of three), then quantises and dequantises one expert
matrix. A few regions are drawn and quantised on the CPU too and must have the same bytes.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch

from suzuri.kernels import dispatch, nvfp4
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.model.random_weights import RandomWeights, initialize
from suzuri.model.tensor_table import parameter_shapes, table


def seconds(action: Callable[[], object], device: str, repeats: int = 3) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def equal_regions(config: ModelConfig, device: str) -> int:
    """How many regions were compared; AssertionError at the first that differs."""
    shapes = parameter_shapes(table(config))
    here, there = RandomWeights(shapes), RandomWeights(shapes, device=device)
    compared = 0
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        rows = shape[-2]
        for lead in {0, shape[0] - 1} if len(shape) == 3 else {0}:
            start = max(0, rows - 16)
            one = here.read(name, lead, start, rows)
            other = there.read(name, lead, start, rows)
            assert torch.equal(one, other.cpu()), name
            if len(shape) == 3:
                with dispatch.force("reference"):
                    a, b = nvfp4.quantize(one[None]), nvfp4.quantize(other[None])
                    assert torch.equal(a.codes, b.codes.cpu()), name
                    assert torch.equal(
                        a.block_scales.view(torch.uint8), b.block_scales.cpu().view(torch.uint8)
                    ), name
            compared += 1
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--config", default="benchmarks/shapes/L6E64/config.json")
    parser.add_argument("--json")
    options = parser.parse_args()
    config = ModelConfig.from_file(options.config)
    device = options.device
    regions = equal_regions(config, device)
    model = Inkling(config, device=device)
    num_values = sum(parameter.numel() for parameter in model.parameters())
    draw = seconds(lambda: initialize(model), device)
    moe = next(block.mlp for block in model.decoder.blocks if hasattr(block.mlp, "router"))
    expert = moe.gate_up[:1].detach()
    with dispatch.force("reference"):
        quantise = seconds(lambda: nvfp4.quantize(expert), device)
        quantised = nvfp4.quantize(expert)
        dequantise = seconds(lambda: nvfp4.dequantize(quantised), device)
    result = {
        "device": torch.cuda.get_device_name() if device != "cpu" else platform.machine(),
        "torch": torch.__version__,
        "config": options.config,
        "parameters": num_values,
        "regions_equal_to_cpu": regions,
        "draw_s": round(draw, 3),
        "draw_values_per_s": round(num_values / draw),
        "expert_values": expert.numel(),
        "quantise_s": round(quantise, 5),
        "quantise_values_per_s": round(expert.numel() / quantise),
        "dequantise_values_per_s": round(expert.numel() / dequantise),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
