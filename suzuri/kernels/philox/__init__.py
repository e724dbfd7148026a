"""Counter-based random numbers: Philox4x32-10."""

from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.philox import reference


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words per element from a 64-bit key and a 128-bit counter.

    seed int64 (its low and high 32 bits are the key), c0..c3 int64 in [0, 2^32), all broadcastable.
    Returns four int64 tensors in [0, 2^32). Pure integer arithmetic: the same words on every
    device, and those of Triton's `tl.philox(seed, c0, c1, c2, c3)`. No gradients. Source: Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    if dispatch.use_reference(seed):
        return reference.philox(seed, c0, c1, c2, c3)
    if seed.device.type != "cuda":
        raise dispatch.no_kernel("philox", seed)
    # Integers have one value however they are computed, and no step calls this: kernels that need
    # random numbers make their own with `tl.philox`.
    return reference.philox(seed, c0, c1, c2, c3)
