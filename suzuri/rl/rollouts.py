"""Batches as files: what was drawn in a step, to look at, to learn from again, or to find a fault.

RUN_DIR/rollouts/step-N.safetensors: arrays of numbers, and in the header JSON that says where they
belong. Records (env.py, types.py) are written field by field, whatever fields they have. No torch.
"""

# pyright: strict

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from suzuri import types
from suzuri.envs import env
from suzuri.envs.env import Trajectory
from suzuri.types import Array

FOLDER = "rollouts"
FORMAT = 1
HEADER = "suzuri_rollouts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempted:
    """A problem and the attempts at it. `place`: its number in the run."""

    place: int
    name: str
    trajectories: Sequence[Trajectory]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The batch of a step. `version`: of the weights that drew last when it was learned from."""

    step: int
    version: int
    groups: Sequence[Attempted]


def path_of(folder: Path, step: int) -> Path:
    """`folder`: the rollouts of a run."""
    return folder / f"step-{step:06d}.safetensors"


def save_rollouts(folder: Path, rollouts: Rollouts) -> None:
    """The file is there whole or not at all."""
    arrays = _Arrays()
    header = {"format": FORMAT, "rollouts": _packed(rollouts, arrays)}
    path = path_of(folder, rollouts.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(save(arrays.by_name, {HEADER: json.dumps(header)}))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def check_rollouts(folder: Path, steps: Iterable[int]) -> None:
    """Raises ValueError naming the first step whose file is not there."""
    for step in steps:
        if not path_of(folder, step).is_file():
            raise ValueError(_missing(path_of(folder, step)))


def _missing(path: Path) -> str:
    return f"{path} is not there: give a run that saved this step (save_rollouts)"


def load_rollouts(folder: Path, step: int) -> Rollouts:
    """Raises ValueError naming a file that is not there or not whole."""
    path = path_of(folder, step)
    try:
        opened: Any = safe_open(str(path), "np")
        with opened as file:
            metadata: dict[str, str] = dict(file.metadata() or {})
            header: Any = json.loads(metadata[HEADER])
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}, not {FORMAT}")
            names: list[str] = list(file.keys())
            arrays: dict[str, Array] = {name: file.get_tensor(name) for name in names}
        found = _unpacked(header["rollouts"], arrays)
    except FileNotFoundError as error:
        raise ValueError(_missing(path)) from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as rollouts: {error}") from error
    if not isinstance(found, Rollouts) or found.step != step:
        raise ValueError(f"{path} holds something else than the rollouts of step {step}")
    return found


def _kinds() -> Mapping[str, type]:
    """The records that may be in a file, by name."""
    modules = [vars(module).values() for module in (types, env)]
    known = [one for values in modules for one in values if isinstance(one, type)]
    return {
        kind.__name__: kind
        for kind in [Rollouts, Attempted, *known]
        if dataclasses.is_dataclass(kind)
    }


def _packed(value: Any, arrays: "_Arrays") -> Any:
    """As JSON. Arrays, and lists of numbers of one type, are put into `arrays`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        packed = {one.name: _packed(getattr(value, one.name), arrays) for one in fields}
        return {"record": type(value).__name__, "fields": packed}
    if isinstance(value, np.ndarray):
        return {"array": arrays.add(cast("Array", value))}
    if isinstance(value, np.generic):
        return _packed(value.item(), arrays)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {"mapping": {name: _packed(one, arrays) for name, one in items}}
    if isinstance(value, list | tuple):
        values = cast("Sequence[Any]", value)
        if values and {type(one) for one in values} in ({int}, {float}):
            dtype = np.int64 if type(values[0]) is int else np.float64
            return {"numbers": arrays.add(np.array(values, dtype))}
        return [_packed(one, arrays) for one in values]
    if isinstance(value, float) and not np.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{type(value).__name__} cannot be saved with rollouts")


class _Arrays:
    """Arrays under numbers. What attempts share, such as a picture, is written once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Array] = {}
        self._known: dict[int, tuple[Array, str]] = {}

    def add(self, array: Array) -> str:
        known = self._known.get(id(array))
        if known is not None:
            return known[1]
        name = str(len(self.by_name))
        self._known[id(array)] = array, name  # held, so that no other one gets its id
        self.by_name[name] = np.array(array, order="C")
        return name


def _unpacked(value: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(value, list):
        return [_unpacked(one, arrays) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    packed = cast("dict[str, Any]", value)
    if "record" in packed:
        kind = _kinds()[packed["record"]]
        fields = {name: _unpacked(one, arrays) for name, one in packed["fields"].items()}
        return kind(**fields)
    if "mapping" in packed:
        return {name: _unpacked(one, arrays) for name, one in packed["mapping"].items()}
    if "float" in packed:
        return float(packed["float"])
    return arrays[packed["array"]] if "array" in packed else arrays[packed["numbers"]].tolist()
