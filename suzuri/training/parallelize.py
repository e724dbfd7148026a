"""What changes how a model is run for training without changing its numbers."""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import functools

from torch.utils.checkpoint import checkpoint

from suzuri.model.inkling import Inkling


def recompute_layers(model: Inkling) -> None:
    """From now on a layer keeps its input only, and runs again in the backward pass. Its forward is
    exact, so the second run has the bits of the first."""
    for layer in model.decoder.blocks:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
