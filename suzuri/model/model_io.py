"""A model as a source and a sink of weights (transfer.py)."""

import collections
from collections.abc import Iterable

import torch
from torch import Tensor

from suzuri.kernels.nvfp4 import Nvfp4
from suzuri.model.inkling import Inkling
from suzuri.model.moe import MoE
from suzuri.model.quantization import Nvfp4Experts
from suzuri.model.tensor_table import Entry
from suzuri.model.transfer import Region


class ModelWeights:
    """The parameters of a model by the names of tensor_table.py, quantised experts included."""

    def __init__(self, model: Inkling) -> None:
        self._parameters = dict(model.named_parameters())
        self._quantised: dict[str, Nvfp4Experts] = {}
        self._written: dict[str, int] = collections.Counter()
        for name, module in model.named_modules():
            if isinstance(module, MoE):
                for part in ("gate_up", "down"):
                    routed = getattr(module, f"routed_{part}")
                    if routed is not None:
                        self._quantised[f"{name}.{part}"] = routed

    @property
    def nvfp4_layers(self) -> tuple[int, ...]:
        """The decoder layers whose routed experts are held in NVFP4."""
        return tuple(sorted({int(name.split(".")[2]) for name in self._quantised}))

    @property
    def has_input_amax(self) -> bool:
        """Whether every quantised parameter knows its largest input."""
        known = [self.input_amax(name) is not None for name in self._quantised]
        return bool(known) and all(known)

    def check(self, entries: Iterable[Entry]) -> None:
        """The table and the model must agree, and each parameter be covered exactly once."""
        shapes: dict[str, tuple[int, ...]] = {}
        ends: dict[str, int] = collections.defaultdict(int)
        starts: dict[tuple[str, int], int] = {}
        for entry in entries:
            shapes[entry.parameter] = entry.parameter_shape
            place = (entry.parameter, entry.start)
            assert starts.setdefault(place, entry.stop) == entry.stop, f"{entry.name}: an overlap"
        for (name, start), stop in sorted(starts.items()):
            assert ends[name] == start, f"{name}: a hole or an overlap"
            ends[name] = stop
        for name, shape in shapes.items():
            held = self._parameters.get(name)
            assert held is not None, f"the model has no parameter {name}"
            experts = self._quantised.get(name)
            routed = 0 if experts is None else experts.codes.shape[0]
            assert (held.shape[0] + routed, *held.shape[1:]) == shape, f"{name}: not the table's"
            assert not held.is_meta, f"{name} has no memory; allocate the model first"
            assert ends[name] == shape[0], f"{name}: not covered by the table"
        left = sorted(self._parameters.keys() - shapes.keys())
        assert not left, f"parameters that the table does not cover: {left[:3]}"

    def check_written(self) -> None:
        """Every value was written exactly once."""
        sizes = {name: tensor.numel() for name, tensor in self._parameters.items()}
        for name, experts in self._quantised.items():
            sizes[name] += 2 * experts.codes.numel()
        wrong = [name for name, size in sizes.items() if self._written[name] != size]
        assert not wrong, f"not written exactly once: {wrong[:3]}"

    def is_nvfp4(self, parameter: str, lead: int) -> bool:
        experts = self._quantised.get(parameter)
        return experts is not None and lead < experts.codes.shape[0]

    def read(self, parameter: str, lead: int, start: int, stop: int) -> Tensor:
        return self._rows(parameter, lead, start, stop)

    def read_nvfp4(self, parameter: str, lead: int) -> Nvfp4:
        return self._quantised[parameter].matrices(lead, lead + 1)

    def input_amax(self, parameter: str) -> Tensor | None:
        experts = self._quantised.get(parameter)
        is_known = experts is not None and bool(experts.input_amax > 0)
        return experts.input_amax if experts is not None and is_known else None

    def write(self, parameter: str, lead: int, start: int, values: Tensor) -> None:
        target = self._rows(parameter, lead, start, start + values.shape[0])
        with torch.no_grad():
            target.copy_(values)
        self._written[parameter] += target.numel()

    def write_nvfp4(self, parameter: str, lead: int, matrix: Nvfp4) -> None:
        experts = self._quantised[parameter]
        experts.codes[lead].copy_(matrix.codes[0])
        experts.block_scales[lead].copy_(matrix.block_scales[0])
        experts.global_scales[lead].copy_(matrix.global_scales[0])
        self._written[parameter] += 2 * matrix.codes.numel()

    def write_input_amax(self, parameter: str, amax: Tensor | None) -> None:
        target = self._quantised[parameter].input_amax
        if amax is None:
            target.zero_()
        else:
            target.copy_(amax)

    def regions(self) -> list[Region]:
        """Every region of the model."""
        found: list[Region] = []
        for name, tensor in self._parameters.items():
            experts = self._quantised.get(name)
            routed = 0 if experts is None else experts.codes.shape[0]
            if tensor.dim() == 3:
                leads, (rows, columns) = range(tensor.shape[0] + routed), tensor.shape[1:]
            else:
                leads, rows = range(1), tensor.shape[0]
                columns = tensor.shape[1] if tensor.dim() == 2 else 1
            found.append(Region(name, leads, 0, rows, columns))
        return found

    def _rows(self, parameter: str, lead: int, start: int, stop: int) -> Tensor:
        """Values [stop - start, columns] as a view."""
        tensor = self._parameters[parameter].detach()
        assert tensor.is_contiguous(), f"{parameter} is not laid out row by row"
        if tensor.dim() == 3:
            experts = self._quantised.get(parameter)
            tensor = tensor[lead - (0 if experts is None else experts.codes.shape[0])]
        return tensor[start:stop].reshape(stop - start, -1)
