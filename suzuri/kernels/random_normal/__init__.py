"""Normal random numbers that are a function of their place alone."""

import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.random_normal import reference


def random_normal(
    seed: int, stream: int, first: int, count: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Numbers first .. first+count-1 of a stream, mean 0 and std 1: fp32 [count].

    Eight numbers come from each Philox4x32-10 block of key `seed` and counter (number // 8,
    `stream`): sixteen bits each, mapped to that quantile of the normal distribution, so the largest
    is 4.3. The same numbers on every device and for every way of cutting the range. seed and
    first in [0, 2^63), stream in [0, 2^32).
    """
    for name, value, limit in (("seed", seed, 2**63), ("stream", stream, 2**32)):
        if not 0 <= value < limit:
            raise ValueError(f"random_normal: {name} = {value} must be from 0 to {limit - 1}")
    if first < 0 or count < 0:
        raise ValueError(f"random_normal: first = {first} and count = {count} must be at least 0")
    key = torch.tensor(seed, device=device)
    if dispatch.use_reference(key):
        return reference.random_normal(key, stream, first, count)
    if key.device.type != "cuda":
        raise dispatch.no_kernel("random_normal", key)
    from suzuri.kernels.random_normal import kernel

    return kernel.random_normal(key, stream, first, count)
