"""Checkpoint folders for the tests of loading and exporting."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.model.weights import LoadReport, load_weights

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = GOLDEN / "base" / "original"
CASES = sorted(path.parent for path in GOLDEN.glob("*/original/config.json"))
ALL = frozenset({"vision", "audio", "mtp"})
MAIN = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of a folder, by the format's own library."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def changed(folder: Path, change: Change, source: Path = BASE) -> Path:
    """A folder with the tensors of `source`, changed, in one file without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = read_tensors(source)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(source / "config.json", folder)
    return folder


def build(folder: Path = BASE, dtype: torch.dtype = torch.bfloat16) -> Inkling:
    """The folder's model, every value NaN."""
    model = Inkling(ModelConfig.from_file(folder), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def load(folder: Path, want: frozenset[str] = ALL) -> tuple[Inkling, LoadReport]:
    model = build(folder)
    return model, load_weights(model, folder, want=want)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        assert torch.equal(bits(tensor), bits(other[name])), name


def keep_depths(*depths: int) -> Change:
    """Leave only these draft depths."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith("model.mtp.layers.") and int(name.split(".")[3]) not in depths:
                del tensors[name]

    return change
