"""The file beside config.json in which ModelOpt's checkpoints say what is quantised.

quantization_blocks.py reads and writes what is in it. No torch here.
"""

# pyright: strict

import dataclasses
from typing import Any

from suzuri.model.config import ModelConfig, Spelling
from suzuri.model.quantization_blocks import write_side_file


def side_file(config: ModelConfig, spelling: Spelling = "released") -> dict[str, Any] | None:
    """hf_quant_config.json of a quantised model; None when there is none to write, because
    nothing is quantised or the names are those of compressed-tensors.

    Lists every module that is not quantised, layer by layer, by its name in that spelling's
    layout; draft depths are not listed, as in the releases.
    """
    return write_side_file(dataclasses.asdict(config), spelling)
