"""All parts of one model together: what a checkpoint holds and what loading fills."""

import torch
from torch import nn

from suzuri.model.audio import AudioEmbedder
from suzuri.model.config import ModelConfig
from suzuri.model.decoder import Decoder
from suzuri.model.mtp import DraftHead
from suzuri.model.tensor_names import OPTIONAL_PARTS
from suzuri.model.vision import VisionEmbedder

PARTS = frozenset(OPTIONAL_PARTS)
"""The optional parts of a model."""


class Inkling(nn.Module):
    """The decoder and the optional parts that the config has and `parts` wants.

    Parameters are uninitialised until `load_weights` or `initialize` fills them. `dtype` is that of
    weights and activations; the router's bias and scale stay at least fp32. Experts that the config
    says are NVFP4 are held so, frozen; with `dequantized` as parameters with the same values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        parts: frozenset[str] = PARTS,
        dequantized: bool = False,
    ) -> None:
        super().__init__()
        if dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"dtype {dtype}: must be bfloat16, float32 or float64")
        if not parts <= PARTS:
            raise ValueError(f"parts {sorted(parts - PARTS)}: there are {sorted(PARTS)}")
        self.config = config
        with torch.device(device):
            quantization = None if dequantized else config.quantization
            layers = () if quantization is None else quantization.layers
            self.decoder = Decoder(config.text, dtype, nvfp4_layers=layers)
            vision = config.vision if "vision" in parts else None
            audio = config.audio if "audio" in parts else None
            depths = config.mtp.num_nextn_predict_layers if "mtp" in parts else 0
            self.vision = VisionEmbedder(vision, dtype) if vision is not None else None
            self.audio = AudioEmbedder(audio, dtype) if audio is not None else None
            self.draft = DraftHead(config, dtype) if depths else None


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Random weights for proofs: no tensor is left at a value that would hide a mistake.

    Matrices normal with std 1 / sqrt(in), vectors and scales near 1, conv taps and relative-bias
    banks of size 0.3.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                mean, std = 0.0, 0.05
            elif name.endswith(("_conv.weight", "rel_proj")):
                mean, std = 0.0, 0.3
            elif parameter.dim() < 2:
                mean, std = 1.0, 0.2
            elif name.endswith("embed.weight") or name.endswith("encoder.weight"):
                mean, std = 0.0, 1.0
            else:
                mean, std = 0.0, parameter.shape[-1] ** -0.5
            for block in parameter.split(256 if parameter.dim() <= 2 else 1):
                block.copy_(mean + std * torch.randn(block.shape, generator=generator))
