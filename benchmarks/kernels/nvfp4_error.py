"""Weight error of our NVFP4 quantiser against plain amax, and which block scales are worth trying.

Relative root mean square error of bf16 weights [1, 512, 4096], drawn with fixed seeds, after
quantising and dequantising. Plain amax is ModelOpt's rule: the global scale is amax / 2688, a block
scale is the e4m3 number nearest to (block amax / 6) / global scale. Writes JSON:

    python benchmarks/kernels/nvfp4_error.py benchmarks/results/nvfp4-error.json
"""

import datetime
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from suzuri.kernels import nvfp4
from suzuri.kernels.nvfp4 import reference

ROWS, COLUMNS = 512, 4096
STD = 0.02
OURS = reference.OFFSETS
LOWS, HIGHS = (0, -1, -2, -3, -4, -6), (0, 2, 4, 5, 6, 7, 8, 9, 12, 16)
WIDEST = tuple(range(-24, 25))


def normal(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=generator)


def student_t(generator: torch.Generator) -> Tensor:
    """4 degrees of freedom."""
    chi_squared = torch.randn(4, ROWS, COLUMNS, generator=generator).square().sum(0)
    return normal(generator) / (chi_squared / 4).sqrt()


def laplace(generator: torch.Generator) -> Tensor:
    uniform = torch.rand(ROWS, COLUMNS, generator=generator) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs() * (1 - 1e-6))


def outlier(generator: torch.Generator) -> Tensor:
    """Normal, but for one value that takes the range of the global scale."""
    values = normal(generator)
    values[0, 0] = 1000
    return values


DISTRIBUTIONS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "normal": normal,
    "Student-t(4)": student_t,
    "Laplace": laplace,
    "normal, one outlier of 1000": outlier,
}


def plain(weight: Tensor, scale2: float) -> Tensor:
    """Plain amax under a global scale; the bf16 values."""
    blocks = weight.float().reshape(-1, 16)
    wanted = blocks.abs().amax(-1, keepdim=True) / 6 / scale2
    stored = wanted.clamp(max=448).to(torch.float8_e4m3fn).float()
    scale = stored * scale2
    rounded = reference._round((blocks / scale.clamp(min=1e-30)).abs())
    return (rounded * blocks.sign() * scale).to(torch.bfloat16).reshape(weight.shape)


def modelopt(weight: Tensor) -> Tensor:
    return plain(weight, weight.abs().amax().item() / 2688)


def power_of_two(weight: Tensor) -> Tensor:
    return plain(weight, 2.0 ** math.ceil(math.log2(weight.abs().amax().item() / 2688)))


def searched(offsets: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def values(weight: Tensor) -> Tensor:
        reference.OFFSETS = offsets
        try:
            return nvfp4.dequantize(nvfp4.quantize(weight.unsqueeze(0)))[0]
        finally:
            reference.OFFSETS = OURS

    return values


def methods() -> dict[str, Callable[[Tensor], Tensor]]:
    found = {
        "plain amax, global scale amax / 2688": modelopt,
        "plain amax, power-of-two global scale": power_of_two,
        "ours": searched(OURS),
    }
    ranges = [(low, OURS[-1]) for low in LOWS] + [(OURS[0], high) for high in HIGHS]
    for low, high in dict.fromkeys(ranges):
        found[f"offsets {low}..{high}"] = searched(tuple(range(low, high + 1)))
    found[f"offsets {WIDEST[0]}..{WIDEST[-1]}"] = searched(WIDEST)
    return found


def error(weight: Tensor, values: Tensor) -> float:
    difference = weight.double() - values.double()
    return math.sqrt(difference.square().sum().item() / weight.double().square().sum().item())


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measure(name: str, draw: Callable[[torch.Generator], Tensor]) -> dict[str, object]:
    generator = torch.Generator().manual_seed(list(DISTRIBUTIONS).index(name))
    weight = (STD * draw(generator)).to(torch.bfloat16)
    errors = {
        method: error(weight, values(weight))
        for method, values in track(methods().items(), description=name)
    }
    first = next(iter(errors.values()))
    return {
        "distribution": name,
        "relative_rms_error": errors,
        "mean_squared_error_over_plain_amax": {
            method: (one / first) ** 2 for method, one in errors.items()
        },
    }


def main(target: Path) -> None:
    rows = [measure(name, draw) for name, draw in DISTRIBUTIONS.items()]
    result = {
        "what": "weight error after NVFP4, relative root mean square",
        "shape": [ROWS, COLUMNS],
        "dtype": "bfloat16",
        "std": STD,
        "offsets": [OURS[0], OURS[-1]],
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": "python benchmarks/kernels/nvfp4_error.py OUT",
        "torch": torch.__version__,
        "rows": rows,
    }
    target.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row["distribution"])
        ratios = row["mean_squared_error_over_plain_amax"]
        errors = row["relative_rms_error"]
        assert isinstance(ratios, dict) and isinstance(errors, dict)
        for method, ratio in ratios.items():
            print(f"  {method:<40} {errors[method]:.6f}  mean square x {ratio:.5f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
