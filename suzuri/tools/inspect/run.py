"""`suzuri inspect`: what is in a checkpoint, by part, and whether it would load. No torch.

folder.py reads the headers, parts.py sorts the tensors, report.py prints.
"""

import dataclasses
from pathlib import Path

from suzuri.model.checkpoint_files import TensorEntry
from suzuri.model.config import ModelConfig
from suzuri.model.tensor_table import table
from suzuri.tools.inspect.config import InspectConfig
from suzuri.tools.inspect.folder import read_folder
from suzuri.tools.inspect.report import Findings, chosen, show_json, show_tables

LAYOUTS = {"released": "released names", "transformers": "transformers names"}


def run_inspect(config: InspectConfig) -> int:
    """Print what a model holds. Returns the exit code: 0, or 1 when it would not load.

    Raises ValueError naming the path and the fix when there is no model.
    """
    found = find(config.model, shape_only=config.random_weights)
    wanted = None if config.tensors is None else chosen(found.tensors, config.tensors)
    (show_json if config.json else show_tables)(found, wanted)
    return 1 if found.faults else 0


def find(model: str, *, shape_only: bool = False) -> Findings:
    """Everything about the model meant by `model`; with `shape_only` whatever its files hold.

    Raises ValueError when there is none.
    """
    path = _path(model)
    if path is not None and path.is_dir() and not shape_only:
        return in_folder(path, path.resolve().name or str(path))
    # locate reads a folder's config first; above, a folder is shown though its config is refused.
    from suzuri.model.locate import locate

    located = locate(model)
    if located.folder is None or shape_only:
        return of_shape(located.config, located.name)
    found = in_folder(located.folder, located.name)
    if located.kind == "hub" and not found.tensors:
        missing = f"the weights of {model} are not in the hub's cache: suzuri pull {model}"
        shape = of_shape(located.config, located.name)
        return dataclasses.replace(shape, files=found.files, faults=(missing,))
    return found


def in_folder(directory: Path, name: str) -> Findings:
    """What lies in a folder."""
    folder = read_folder(directory)
    return Findings(
        name=name,
        folder=directory,
        layout=LAYOUTS.get(folder.layout or "", "not recognised, or of two layouts at once"),
        config=folder.config,
        tensors=folder.tensors,
        files=folder.files,
        faults=folder.faults,
        notes=folder.notes,
    )


def of_shape(config: ModelConfig, name: str) -> Findings:
    """What the checkpoint of a config would hold, in the released layout."""
    tensors = {
        entry.name: TensorEntry(
            file="",
            dtype=entry.dtype,
            shape=entry.shape,
            start=0,
            nbytes=entry.num_bytes,
            stored_name=entry.name,
        )
        for entry in table(config)
    }
    return Findings(name=name, folder=None, layout="as released", config=config, tensors=tensors)


def _path(model: str) -> Path | None:
    """The path, if there is one; locate says what is wrong with others."""
    try:
        path = Path(model)
        path = path.expanduser() if model.startswith("~") else path
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None
