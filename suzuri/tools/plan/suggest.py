"""A well-known setup that a model runs on, as flags of `suzuri plan`; for hints in other commands.

Read next: changes.py, which answers the same for a setup that was asked for.
"""

import dataclasses
from collections.abc import Iterator

from suzuri.model.config import ModelConfig
from suzuri.model.sizes_shard import possible_tp
from suzuri.model.tensor_table import Storage
from suzuri.tools.plan.card import match
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.request import Request, nvfp4_layers, request_of
from suzuri.tools.plan.verdict import fits

FAVOURITE = "h200"
OTHERS = ("b300", "mi355x")
ALONE = " --concurrency 1"


def suggestion(config: ModelConfig, storage: Storage) -> str:
    """Flags for `suzuri plan MODEL` whose answer is yes, for a model stored as `storage`: on the
    fewest H200, else on the fewest of another large card, with plan's other defaults; else for one
    sequence at a time. Of a model that fits nowhere, the flags whose answer says why."""
    is_nvfp4 = bool(storage.nvfp4_layers) and bool(nvfp4_layers(config))
    experts = "nvfp4" if is_nvfp4 else "bf16"
    said = "" if is_nvfp4 == (config.quantization is not None) else f" --experts {experts}"
    asked = PlanConfig(model="", experts=experts)
    for load, flags in ((asked, ""), (dataclasses.replace(asked, concurrency=1), ALONE)):
        for name, request in _setups(config, load):
            if fits(config, request):
                return f"--gpu {name} --num-gpus {request.num_gpus}{said}{flags}"
    return f"--gpu {FAVOURITE} --num-gpus {possible_tp(config)[-1]}{said}"


def _setups(config: ModelConfig, asked: PlanConfig) -> Iterator[tuple[str, Request]]:
    """Every number of GPUs that one copy can be cut over, card by card."""
    for name in (FAVOURITE, *OTHERS):
        gpu = match(name)
        for tp in possible_tp(config):
            yield name, request_of(config, dataclasses.replace(asked, num_gpus=tp), gpu)
