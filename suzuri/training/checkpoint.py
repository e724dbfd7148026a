"""States of a trainer on disk (torch.distributed.checkpoint), and weights for samplers.

A folder appears under its name when all of it is there: a kill at any moment leaves the one before.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import concurrent.futures
import contextlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from suzuri.model.content_hash import content_hash as hash_of_named
from suzuri.model.inkling import Inkling
from suzuri.model.weights import export_weights

NUMBERS = "trainer.json"
PARTIAL_SUFFIX = ".part"
FORMAT = 1


class Saver:
    """Writes states behind the back of training: `save` copies, a thread writes."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "save")
        self._pending: concurrent.futures.Future[None] | None = None

    def save(self, path: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Begins to write. Waits for the state before first, and raises what went wrong there.
        FileExistsError for a path that holds something else than a state."""
        self.wait()
        if path.exists() and not (path / NUMBERS).is_file() and not _is_empty(path):
            raise FileExistsError(f"{path} is there and is no saved state; give a new path")
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._pending = self._thread.submit(write, path, copies, dict(numbers))

    def wait(self) -> None:
        """Returns when nothing is being written; raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _is_empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def write(path: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
    """Writes a state into a new folder, which replaces one of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}-{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    try:
        _write_tensors(part, tensors)
        document = {"format": FORMAT, **numbers}
        with (part / NUMBERS).open("w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        old = path.with_name(part.name + "-old")
        if path.exists():
            path.rename(old)
        part.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # there only if something above failed


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        with _alone():
            save_tensors(dict(tensors), checkpoint_id=str(folder), no_dist=True)
    except CheckpointException as error:
        # It holds a pickled trace for each rank; a full disk comes as what torch's writer found.
        (cause, *_) = (failure[0] for failure in error.failures.values())
        free = shutil.disk_usage(folder.parent).free
        raise OSError(
            f"{folder.parent}: the state could not be written, {free / 1e6:,.0f} MB are free there "
            f"({str(cause).strip() or type(cause).__name__})"
        ) from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The tensors and numbers of a state. Raises ValueError or OSError where it is none."""
    if not (path / NUMBERS).is_file():
        raise FileNotFoundError(f"{path}: no saved state of a trainer ({NUMBERS} is not there)")
    numbers = json.loads((path / NUMBERS).read_text("utf-8"))
    if numbers.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: written by another version; this one reads format {FORMAT}")
    with _alone():
        metadata = FileSystemReader(str(path)).read_metadata()
        tensors: dict[str, Tensor] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), name
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        load_tensors(tensors, checkpoint_id=str(path), no_dist=True)
    return tensors, numbers


def weights_of(model: Inkling) -> list[tuple[str, Tensor]]:
    """All by name, those that are no parameters (quantised experts) included."""
    return [*model.named_parameters(), *model.named_buffers()]


def check(model: Inkling, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError naming a weight that the state has not, or in another shape."""
    for name, weight in weights_of(model):
        saved = tensors.get(f"parameter.{name}", tensors.get(f"master.{name}"))
        if saved is None:
            raise ValueError(f"the saved state has no {name}: it is of another model")
        if saved.shape != weight.shape:
            raise ValueError(
                f"{name}: {list(saved.shape)} in the saved state, {list(weight.shape)} in "
                "this model"
            )


def fill(model: Inkling, tensors: Mapping[str, Tensor]) -> None:
    """The weights that were not trained, quantised experts among them."""
    with torch.no_grad():
        for name, weight in weights_of(model):
            if (saved := tensors.get(f"parameter.{name}")) is not None:
                weight.copy_(saved)


def publish(model: Inkling, path: Path) -> str:
    """Writes the model as a checkpoint folder (released layout) that appears whole or not at all;
    returns `content_hash`."""
    dtype = str(model.decoder.norm.weight.dtype).removeprefix("torch.")
    export_weights(model, path, dtype=dtype)
    return content_hash(model)


def content_hash(model: Inkling) -> str:
    """Of every weight, quantised experts included: name, dtype, shape and bytes."""
    return hash_of_named(weights_of(model))


def sampler_hash(model: Inkling) -> str:
    """`content_hash` without the draft depths: what a server says of the weights that it holds."""
    return hash_of_named([pair for pair in weights_of(model) if not pair[0].startswith("draft.")])


@contextlib.contextmanager
def _alone() -> Generator[None]:
    """One process is what is meant; torch warns of it each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
