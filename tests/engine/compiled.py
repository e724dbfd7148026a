"""Compiles kernels of the tiny model for a GPU that is not here, twice, and says what happened:
`python -m tests.engine.compiled FOLDER` (not in the interpreter) prints JSON."""

import json
import sys
from typing import Any

import torch
from triton import knobs

from suzuri.engine.compilation import Compiler, load
from suzuri.engine.launches import Specialization, unlaunched
from suzuri.kernels.rms_norm import kernel as norm
from suzuri.kernels.swiglu import kernel as swiglu
from tests.engine.apart import pretend_target

CPU = torch.device("cpu")


def launch() -> None:
    x_ND = torch.empty(4, 96)
    norm.rms_norm(x_ND, x_ND[0], 1e-6, torch.float32)
    swiglu.swiglu(x_ND, torch.bfloat16)


def main() -> None:
    pretend_target()
    knobs.cache.dir = sys.argv[1]
    with unlaunched() as found:
        launch()
        launch()
    kernels = [*found.kernels, Specialization("suzuri.kernels.swiglu.kernel", "no_such", "{}")]
    said: dict[str, Any] = {"launches": found.count, "kernels": len(found.kernels)}
    for name in ("first", "second"):
        compiler = Compiler()
        outcome = compiler.compile(kernels)
        compiler.close()
        said[name] = [outcome.compiled, outcome.cached, sorted(outcome.problems), compiler.problem]
    here = load(kernels, CPU)
    said["here"] = [here.compiled, here.cached, sorted(here.problems)]
    with unlaunched() as again:
        launch()
    said["again"] = [again.count, len(again.kernels)]  # what is loaded is not to be compiled
    print(json.dumps(said))


if __name__ == "__main__":
    main()
