<<<<<<< HEAD
"""Launches that are noted in place of being made, and kernels compiled from the notes."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
=======
"""How many kernels a layer of a decode step launches: every launch is microseconds that the tokens
of a small batch wait for.

Without a GPU the true path is walked with tensors that say they are on one and hold nothing: Triton
launches are counted instead of made, and of torch's ops those that would be kernels.
"""

import collections
import dataclasses
import itertools
import types
from collections.abc import Iterator
from contextlib import contextmanager
>>>>>>> fusions
from typing import Any

import pytest
import torch
<<<<<<< HEAD
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from suzuri.engine.compilation import Compiler, load
from suzuri.engine.launches import Specialization, launch_key, unlaunched
from suzuri.kernels.rms_norm import kernel as norm
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
    words = [sys.executable, "-m", "tests.engine.compiled", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
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
=======
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from suzuri.model.batch import Batch, CacheView
from suzuri.model.cache import decoder_attentions, layer_caches
from suzuri.model.config import ModelConfig, preset
from suzuri.model.inkling import Inkling, randomize

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

MOST = 12
"""Launches of a layer: two products around attention and its three kernels, router, experts, and
two seams."""
ROWS = (1, 8, 64)
LAYERS = (4, 5, 6)
"""The first is counted without, the others with: a layer of either kind of attention."""
NOTHING = {
    *(
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "slice",
        "select",
        "view",
        "_unsafe_view",
    ),
    *("unsqueeze", "squeeze", "unbind", "split", "split_with_sizes", "transpose", "t", "permute"),
    *("expand", "detach", "alias", "_unsafe_view", "as_strided", "_reshape_alias", "unflatten"),
}
"""Ops that only make or look at tensors."""


class OnGpu(Tensor):
    """Says that it is on a GPU; holds nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, value in (("device", torch.device("cuda", 0)), ("is_cuda", True), ("is_cpu", 0)):
            if func == vars(Tensor.__mro__[1])[name].__get__:
                return value
        return super().__torch_function__(func, types, args, _without_memory(kwargs))


class MadeOnGpu(TorchFunctionMode):
    """New tensors are OnGpu."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **_without_memory(kwargs))
        return made.as_subclass(OnGpu) if type(made) is Tensor else made


def _without_memory(words: dict[str, Any] | None) -> dict[str, Any]:
    words = dict(words or {})
    return words | {"device": "meta"} if words.get("device") is not None else words


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NOTHING:
            self.found[f"torch {name}"] += 1
        return func(*args, **(kwargs or {}))


def config_of(layers: int) -> ModelConfig:
    config = preset("tiny")
    kept = tuple(i for i in config.text.local_layer_ids if i < layers)
    text = dataclasses.replace(config.text, num_hidden_layers=layers, local_layer_ids=kept)
    return dataclasses.replace(config, text=text)


def decoding(config: ModelConfig, rows: int, device: str) -> tuple[Inkling, Batch]:
    """A model and a batch of one row each of `rows` sequences."""
    model = Inkling(config, device=device, parts=frozenset()).requires_grad_(False)
    layers = layer_caches(
        decoder_attentions(config),
        hidden_size=config.text.hidden_size,
        num_pages=2,
        page_size=16,
        num_slots=rows,
        ring=6,
        dtype=torch.bfloat16,
        device=device,
    )

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    order = torch.arange(rows + 1, device=device)
    view = CacheView(
        layers=layers,
        global_pages_SM=zeros(rows, 4),
        local_pages_SM=zeros(rows, 4),
        global_slots_N=zeros(rows),
        local_slots_N=zeros(rows),
        conv_slots_S=order[:-1],
    )
    batch = Batch(
        token_ids_N=zeros(rows),
        positions_N=zeros(rows),
        seq_ids_N=order[:-1],
        seq_starts_S1=order,
        single_rows=True,
        cache=view,
    )
    return model, batch


@contextmanager
def a_gpu_that_counts(patch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    card = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    counted = Counted()

    def launched(self: Any, *_: Any, **__: Any) -> None:
        counted.found[f"{self.fn.__module__}.{self.fn.__name__}"] += 1

    for kind in (JITFunction, InterpretedFunction):
        patch.setattr(kind, "run", launched)
    with torch.no_grad(), counted:
        yield counted.found


def launches(layers: int, rows: int, patch: pytest.MonkeyPatch) -> collections.Counter[str]:
    with MadeOnGpu():
        model, batch = decoding(config_of(layers), rows, "cuda")
        with a_gpu_that_counts(patch) as found:
            model.decoder(batch)
    return found


@pytest.mark.parametrize("rows", ROWS)
def test_a_layer_is_a_dozen_launches_at_most(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        before = launches(LAYERS[0], rows, patch)
    for layers in LAYERS[1:]:
        with monkeypatch.context() as patch:
            now = launches(layers, rows, patch)
        of_layer = now - before
        assert 0 < of_layer.total() <= MOST, dict(of_layer)
        assert not [name for name in of_layer if name.startswith("torch ")], dict(of_layer)
        before = now


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_a_layer_is_a_dozen_kernels_at_most_on_a_gpu(rows: int) -> None:
    from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
    from torch.profiler import ProfilerActivity, profile

    found: list[int] = []
    for layers in LAYERS:
        model, batch = decoding(config_of(layers), rows, "cuda")
        randomize(model)
        with torch.no_grad():
            model.decoder(batch)  # compiles, and tests the library's products
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                model.decoder(batch)
                torch.cuda.synchronize()
        events = seen.events() or ()
        found.append(sum(event.device_type == DeviceType.CUDA for event in events))
    assert all(0 < now - before <= MOST for before, now in itertools.pairwise(found))
>>>>>>> fusions
