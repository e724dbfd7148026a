"""Walks engines of the tiny model that take themselves to be on a GPU, keeps what was found, and
says in JSON what a later start would read: `python -m tests.engine.kept` (not in the interpreter;
XDG_CACHE_HOME is where it is kept)."""

import json
from typing import Any

import torch

from suzuri.engine import kept_walks
from suzuri.engine.rehearsal import walk
from suzuri.kernels.matmul import buckets
from tests.engine.apart import pretend_target
from tests.engine.rehearsed import SMALL, gpu_engine

ENGINES: dict[str, dict[str, Any]] = {
    "first": {},
    "other pools": {"global_pages": 1301, "local_pages": 777, "snapshots": 55},
    "other limit": {"max_context": 80},
}


def main() -> None:
    pretend_target()
    asked: dict[str, object] = {"gpu": "none"}
    buckets.fingerprint = lambda device: asked
    said: dict[str, Any] = {}
    for name, fields in ENGINES.items():
        with gpu_engine(torch.bfloat16, **(SMALL | fields)) as engine:
            print_ = kept_walks.fingerprint(engine.runner, engine.vocabulary)
            kept = kept_walks.read(print_)
            seen, _ = walk(engine.runner, engine.vocabulary)
            shapes = [(128, 64, torch.bfloat16, torch.float32)]
            kept_walks.write(print_, (list(seen.kernels), shapes))
            again = kept_walks.read(print_)
            assert again is not None
            said[name] = {
                "kernels": len(seen.kernels),
                "kept": kept is not None,
                "alike": kept is not None and set(kept[0]) == set(seen.kernels),
                "read": again == (list(seen.kernels), shapes),
                "callable": all(kernel.function is not None for kernel in again[0]),
            }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
