"""Launches that are noted in place of being made, and kernels compiled from the notes."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from suzuri.engine.compilation import Compiler, load
from suzuri.engine.launches import Specialization, launch_key, unlaunched
from suzuri.kernels.rms_norm import kernel as norm
from tests.engine.apart import run_apart
from tests.kernels.on_triton import in_interpreter

CPU = torch.device("cpu")


def normed(x_ND: torch.Tensor) -> torch.Tensor:
    return norm.rms_norm(x_ND, torch.ones(x_ND.shape[1]), 1e-6, torch.float32)


@in_interpreter
def test_nothing_is_launched_inside_the_block_and_all_is_as_before_behind_it() -> None:
    x_ND = torch.ones(3, 8)
    run, hook = InterpretedFunction.run, knobs.runtime.jit_cache_hook
    with unlaunched() as found:
        for rows in (3, 3, 2):
            assert not normed(x_ND[:rows]).any(), "memory that no kernel writes holds zeros"
        assert not torch.empty_like(x_ND).any()
        assert not x_ND.new_empty(70, 70).any()
    assert found.count == 3
    assert [kernel.name for kernel in found.kernels] == ["_kernel"]
    assert not found.problems
    assert (InterpretedFunction.run, knobs.runtime.jit_cache_hook) == (run, hook)
    assert torch.allclose(normed(x_ND), torch.ones(3, 8))


@in_interpreter
def test_an_error_inside_the_block_leaves_launches_as_they_were() -> None:
    run = InterpretedFunction.run
    with pytest.raises(KeyError), unlaunched():
        raise KeyError
    assert InterpretedFunction.run is run


@in_interpreter
def test_other_threads_launch_meanwhile() -> None:
    seen: list[torch.Tensor] = []
    with unlaunched() as found:
        other = threading.Thread(target=lambda: seen.append(normed(torch.ones(2, 4))))
        other.start()
        other.join()
    assert torch.allclose(seen[0], torch.ones(2, 4))
    assert found.count == 0


def test_launches_that_triton_compiles_apart_have_keys_of_their_own() -> None:
    x = torch.empty(64)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, 5), {}),
        ((x, 1), {}),
        ((x, 32), {}),
        ((x, 1 << 40), {}),
        ((x[1:], 5), {}),
        ((x.to(torch.bfloat16), 5), {}),
        ((x, 5), {"BLOCK": 1}),
        ((x, 5), {"BLOCK": 2}),
        ((x, 5), {"BLOCK": 2, "num_warps": 4}),
    ]
    function = object()
    keys = {launch_key(function, args, words) for args, words in seen}
    assert len(keys) == len(seen)
    assert launch_key(function, (x, 5), {}) == launch_key(function, (x[4:], 7), {})
    assert launch_key(object(), (x, 5), {}) != launch_key(function, (x, 5), {})


def test_kernels_are_compiled_apart_and_found_here(tmp_path: Path) -> None:
    said = json.loads(run_apart("compiled", str(tmp_path), timeout=600).splitlines()[-1])
    assert said["launches"] == 4
    number = said["kernels"]
    assert number == 2
    assert said["first"] == [number, 0, ["no_such"], None]
    assert said["second"] == [0, number, ["no_such"], None]
    assert said["here"] == [0, number, ["no_such"]]
    assert said["again"] == [2, 0]


class Faulty:
    """A jit function that Triton cannot compile."""

    cache_key = ""

    def preload(self, data: str) -> None:
        raise RuntimeError(f"no registers left for {data}")


def test_a_kernel_that_cannot_be_compiled_does_not_keep_the_others() -> None:
    class Fine(Faulty):
        def preload(self, data: str) -> None:
            loaded.append(data)

    loaded: list[str] = []
    shown: list[int] = []
    kernels = [
        Specialization("m", "bad", "1", Faulty()),
        Specialization("m", "good", "2", Fine()),
    ]
    outcome = load(kernels, CPU, lambda done, total: shown.append(done))
    assert outcome.problems == {"bad": "RuntimeError: no registers left for 1"}
    assert loaded == ["2"]
    assert shown == [1, 2]


def test_a_compiler_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compiler = Compiler()
    assert compiler.problem is not None
    outcome = compiler.compile([Specialization("m", "f", "1", Faulty())])
    assert (outcome.compiled, outcome.cached) == (0, 0)
    compiler.close()
