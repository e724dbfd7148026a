"""What `suzuri convert` can be asked. No torch here."""

import dataclasses
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

MAX_SEED = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Write a checkpoint again in another layout, or with quantised experts.

    Goes shard by shard in bounded memory; run the same command again after an interruption and it
    goes on. The new folder appears when it is complete.
    """

    source: Positional[str]
    """Model folder or hub id; with --random-weights also a config.json or a preset."""

    destination: Positional[Path]
    """Folder to write; must not exist, or be empty."""

    layout: Literal["released", "transformers"] | None = None
    """Names and row order to write (default: those of the source; released for random weights)."""

    experts: Literal["bf16", "nvfp4"] | None = None
    """How to store the routed experts (default: as the source). nvfp4 quantises what the releases
    do: routed experts from layer 3 on."""

    names: Literal["modelopt", "compressed-tensors"] | None = None
    """What to call the tensors of NVFP4 experts (default: as the source, else as released by
    ModelOpt). compressed-tensors keeps the inverse of the global scale: refused where that would
    change a value, which it never does for scales that we chose."""

    mtp: bool = True
    """--no-mtp leaves the draft depths off. The transformers layout has no place for them: there
    they stay in mtp.safetensors under their released names, which transformers skips."""

    text_only: bool = False
    """Leave the towers out, whether or not the files hold them."""

    max_shard_gb: float = 5.0
    """Tensor data per file, in GB (one tensor may be larger)."""

    device: str = "cpu"
    """Where experts are quantised; cuda is much faster, the bytes are the same."""

    random_weights: bool = False
    """Take only the shape of the source and draw the weights."""

    seed: int = 0
    """Of --random-weights."""

    restart: bool = False
    """Drop an unfinished conversion to this destination instead of going on with it."""

    @property
    def want(self) -> frozenset[str]:
        """The optional parts to convert."""
        towers = set[str]() if self.text_only else {"vision", "audio"}
        return frozenset(towers | ({"mtp"} if self.mtp else set()))

    def resolve(self) -> "ConvertConfig":
        """Checks fields against each other. Raises ValueError naming the flag and the fix."""
        if not 1e-6 <= self.max_shard_gb <= 1e6:
            raise ValueError(
                f"--max-shard-gb {self.max_shard_gb}: must be from 0.000001 to 1000000"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        if self.seed and not self.random_weights:
            raise ValueError("--seed goes with --random-weights")
        return self
