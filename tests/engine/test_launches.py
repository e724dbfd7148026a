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
from typing import Any

import pytest
import torch
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
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(synchronize=int))
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
