"""What a run starts from: a checkpoint's weights, or random ones of its shape."""

import os

import torch

from suzuri.log import get_logger
from suzuri.model.checkpoint_files import Checkpoint
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.locate import locate
from suzuri.model.random_weights import initialize
from suzuri.model.reconcile import reconcile
from suzuri.model.weights import load_weights

LOCAL_STD = 0.3
"""Of conv taps and relative-bias banks: few terms that stand beside a residual."""

log = get_logger(__name__)


def find_model(model: str, *, random_weights: bool) -> tuple[ModelConfig, Checkpoint | None]:
    """The shape, without parts that the checkpoint lacks; no checkpoint for random weights."""
    if random_weights:
        return locate(model).config, None
    is_hub = "/" in model and not os.path.exists(os.path.expanduser(model))
    located = locate(model, weights=is_hub)
    if located.folder is None:
        raise ValueError(
            f"model {model!r} is a shape without weights; give a model folder or a hub id, "
            "or start from random ones with --random-weights"
        )
    checkpoint = located.checkpoint()
    return reconcile(located.config, checkpoint, PARTS).config, checkpoint


def fill_model(model: Inkling, checkpoint: Checkpoint | None, seed: int) -> None:
    """With the checkpoint's weights, or drawn ones without."""
    if checkpoint is None:
        draw_weights(model, seed)
        return
    for note in load_weights(model, checkpoint, want=PARTS).notes:
        log.info("%s", note)


def draw_weights(model: Inkling, seed: int) -> None:
    """Matrices normal with std 1 / sqrt(in), so that activations keep their size at any width;
    embeddings with std 1, the head so that logits have size 1; norm weights and scales 1; selection
    biases 0. The same numbers on every device.
    """
    initialize(model, seed, std=1.0)
    head = 1 / (model.decoder.logit_scale * model.config.text.hidden_size**0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or not parameter.dtype.is_floating_point:
                continue
            if name == "decoder.unembed.weight":
                parameter.mul_(head)
            elif name.endswith(("_conv.weight", "rel_proj")):
                parameter.mul_(LOCAL_STD)
            elif not name.endswith(("embed.weight", "encoder.weight")):
                parameter.mul_(parameter.shape[-1] ** -0.5)
