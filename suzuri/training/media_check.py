"""Whether a picture or clip of a sample is one that the model's tower takes. No torch here."""

# pyright: strict

from collections.abc import Collection

import numpy as np

from suzuri.model.config import ModelConfig
from suzuri.types import Array, MediaInput

MEDIA = ("image", "audio")


def check_media(
    media: Collection[MediaInput], tokens_T: Array, config: ModelConfig, towers: Collection[str]
) -> None:
    """Raises ValueError for one that is not as `MediaInput` says, that the model has no tower for
    (`towers`: the kinds that it has one for), or that does not stand on its placeholders."""
    end = 0
    for item in sorted(media, key=lambda item: item.index):
        if item.kind not in MEDIA:
            raise ValueError(f"media of kind {item.kind!r}; there are image and audio")
        if item.kind not in towers:
            raise ValueError(f"a part of kind {item.kind}, the model has no tower for it")
        inputs = np.asarray(item.inputs)
        slot = config.image_token_id if item.kind == "image" else config.audio_token_id
        _check_inputs(item.kind, inputs, config)
        if item.index < end or item.index + len(inputs) > len(tokens_T):
            raise ValueError(
                f"{item.kind} of {len(inputs)} tokens at {item.index}: outside of the "
                f"{len(tokens_T)} tokens, or over another one"
            )
        end = item.index + len(inputs)
        if (tokens_T[item.index : end] != slot).any():
            raise ValueError(
                f"{item.kind} of {len(inputs)} tokens at {item.index}: must stand on as many "
                f"placeholders, token {slot}"
            )


def _check_inputs(kind: str, inputs: Array, config: ModelConfig) -> None:
    if kind == "image":
        vision = config.vision
        assert vision is not None, "there is a tower"
        side = vision.patch_size
        wanted = (vision.temporal_patch_size, side, side, vision.n_channels)
    else:
        assert config.audio is not None, "there is a tower"
        wanted = (config.audio.n_mel_bins,)
    if inputs.ndim < 1 or len(inputs) < 1 or inputs.shape[1:] != wanted:
        need = ", ".join(map(str, ["M", *wanted]))
        raise ValueError(f"{kind} inputs are {list(inputs.shape)}; need [{need}], M at least 1")
    if kind == "image":
        if inputs.dtype.kind not in "fiu" or not np.isfinite(inputs).all():
            raise ValueError(f"{kind} inputs: must be finite numbers")
        return
    assert config.audio is not None, "there is a tower"
    most = config.audio.mel_vocab_size - 1
    if inputs.dtype.kind not in "iu" or inputs.min() < 0 or inputs.max() > most:
        raise ValueError(f"{kind} inputs: must be integers from 0 to {most}")
