"""Weights in a folder, for a model that serves already: all of them are read and compared before
one is changed.

`NewWeights` first, then `write`. Read next: weight_updates.py, which says when.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Set
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from suzuri.kernels.nvfp4 import Nvfp4
from suzuri.model.checkpoint_files import CONFIG_FILE, scan
from suzuri.model.checkpoint_io import CheckpointReader
from suzuri.model.config import ModelConfig
from suzuri.model.content_hash import ContentHash, content_hash
from suzuri.model.inkling import Inkling
from suzuri.model.model_io import ModelWeights
from suzuri.model.reconcile import reconcile
from suzuri.model.transfer import Region, copy, regions
from suzuri.model.weights import PART_MODULES

STORED = ("torch_dtype", "quantization", "unknown_keys")
"""Fields of a config that do not say what the model computes."""


class WeightsRefused(ValueError):
    """These weights are not taken; the model is as it was. `is_conflict`: they are not those that
    were announced, or not what may come next."""

    def __init__(self, message: str, *, is_conflict: bool = False) -> None:
        super().__init__(message)
        self.is_conflict = is_conflict


class WeightsLost(RuntimeError):
    """What the model holds now is neither the old weights nor the new ones."""


class NewWeights:
    """The weights of a folder, checked and ready to be written into `model`. Close it.

    Raises WeightsRefused for a folder that is not there, cut, of another model, or whose content
    is not `expected` (content_hash.py, over the model's parameters). Only reads the model's shapes,
    so that it can run beside it.
    """

    def __init__(self, model: Inkling, folder: str, expected: str | None) -> None:
        self._model = model
        self.num_bytes = 0
        self._reader: CheckpointReader | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with _as_refusals(folder):
                self._reader, self._wanted = _opened(model, _checked(folder))
                self.content_hash = self._read()
                self.num_bytes = self._reader.num_bytes
            if expected is not None and self.content_hash != expected:
                raise WeightsRefused(
                    f"content_hash: {folder} holds weights {self.content_hash}, {expected} were "
                    "announced; what was sent did not arrive (draft depths do not count: of a "
                    "run's weights it is sampler_hash in weights.json)",
                    is_conflict=True,
                )
            undo.pop_all()

    def _read(self) -> str:
        assert self._reader is not None
        hashing = _Hashing(dict(self._model.named_parameters()))
        copy(self._wanted, self._reader, hashing)
        return hashing.text()

    def write(self) -> None:
        """Into the model, in place. Raises WeightsLost where it then holds something else."""
        assert self._reader is not None
        weights = ModelWeights(self._model)
        try:
            copy(self._wanted, self._reader, weights)
        except (OSError, ValueError, AssertionError, RuntimeError) as error:
            raise WeightsLost(f"new weights could not be read to their end ({error})") from error
        found = content_hash(self._model.named_parameters())
        if found != self.content_hash:
            raise WeightsLost(f"weights {self.content_hash} were written, {found} are there")

    def close(self) -> None:
        """May be called again."""
        if self._reader is not None:
            self._reader.__exit__()


@contextlib.contextmanager
def _as_refusals(folder: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise WeightsRefused(
            f"model_path: {folder} cannot be read here ({error.strerror or error})"
        ) from error
    except ValueError as error:
        raise WeightsRefused(f"model_path: {error}") from error


def _opened(model: Inkling, folder: Path) -> tuple[CheckpointReader, list[Region]]:
    """A reader, and what to read in the order of `content_hash`. Raises ValueError or OSError."""
    if ModelWeights(model).nvfp4_layers:
        raise ValueError(
            "this engine holds experts in NVFP4, which new weights would have to be rounded to; "
            "serve a folder with bf16 experts (suzuri convert)"
        )
    want = {part for part, name in PART_MODULES.items() if getattr(model, name) is not None}
    if (folder / CONFIG_FILE).exists():
        _check_config(ModelConfig.from_file(folder), model.config, want, folder)
    checkpoint = scan(folder)
    plan = reconcile(model.config, checkpoint, frozenset(want))
    if absent := sorted(want - plan.parts):
        raise ValueError(f"{folder} has no {absent[0]} part, this engine has one")
    if model.draft is not None and plan.mtp_depths != len(model.draft.depths):
        raise ValueError(
            f"{folder} has {plan.mtp_depths} draft depths, this engine has "
            f"{len(model.draft.depths)}"
        )
    entries = [entry for entry, _ in plan.reads]
    quantised = [entry.name for entry in entries if entry.field != "values"]
    if quantised:
        raise ValueError(f"{folder} holds {quantised[0]} in NVFP4; give bf16 experts")
    ModelWeights(model).check(entries)
    wanted = sorted(regions(entries), key=lambda one: (one.parameter, one.leads.start, one.first))
    return CheckpointReader(checkpoint, plan.reads), wanted


def _checked(name: str) -> Path:
    if not name.strip() or "\0" in name:
        raise ValueError(f"{name!r} is no name of a folder")
    if not Path(name).is_absolute():
        raise ValueError(f"{name!r} must be absolute: whoever serves may run in another folder")
    return Path(name)


def _check_config(theirs: ModelConfig, ours: ModelConfig, parts: Set[str], folder: Path) -> None:
    """Shapes of tensors do not tell all: windows, scales and ids of tokens are only in configs.
    `parts`: optional ones that the engine has."""
    told = [_fields(one) for one in (theirs, ours)]
    for name in sorted({*told[0], *told[1]}):
        part = name.split(".", maxsplit=1)[0]
        if part in PART_MODULES and part not in parts:
            continue
        there, here = (fields.get(name) for fields in told)
        if there != here:
            raise ValueError(
                f"{folder / CONFIG_FILE} is of another model: {name} = {there!r}, here {here!r}"
            )


def _fields(config: object, prefix: str = "") -> dict[str, Any]:
    """By dotted name, but for STORED."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cast("Any", config)):
        value = getattr(config, field.name)
        if field.name in STORED:
            continue
        if dataclasses.is_dataclass(value):
            found |= _fields(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


class _Hashing:
    """A sink (transfer.py) for the hash of what a model would then hold. Of the values, one
    parameter's are kept at a time."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._name, self._values = "", torch.empty(0)
        self._hash = ContentHash()

    def is_nvfp4(self, parameter: str, lead: int) -> bool:
        return False

    def write(self, parameter: str, lead: int, start: int, values: Tensor) -> None:
        if parameter != self._name:
            self._end()
            self._name = parameter
            self._values = torch.empty_like(self._parameters[parameter], device="cpu")
        rows = self._values[lead] if self._values.dim() == 3 else self._values
        rows[start : start + len(values)].copy_(values.view_as(rows[start : start + len(values)]))

    def write_nvfp4(self, parameter: str, lead: int, matrix: Nvfp4) -> None:
        raise AssertionError("not asked for")

    def write_input_amax(self, parameter: str, amax: Tensor | None) -> None:
        raise AssertionError("not asked for")

    def text(self) -> str:
        """Once all is written."""
        self._end()
        return self._hash.text()

    def _end(self) -> None:
        if self._name:
            self._hash.add(self._name, self._values)
