"""What a MODEL argument means: a preset, a config.json, a model folder, or a model on the hub.

Every command that takes a model calls `locate`; presets.py says which presets come with weights. No
torch here, and nothing of the hub is imported until one is asked. Read next: hub.py.
"""

# pyright: strict

import dataclasses
from pathlib import Path
from typing import Literal

from suzuri.log import get_logger
from suzuri.model.checkpoint_files import (
    CONFIG_FILE,
    Checkpoint,
    CheckpointError,
    near_folders,
    scan,
)
from suzuri.model.config import PRESETS, ModelConfig, preset
from suzuri.model.hub import (
    DEFAULT_REVISION,
    cache_folder,
    cached_snapshot,
    hub_errors,
    list_files,
    parse_repo,
)
from suzuri.model.hub_errors import HubError
from suzuri.model.presets import SHIPPED, SHORT_NAMES

CONFIG_FILES = (CONFIG_FILE, "hf_quant_config.json")
"""What is fetched of a hub model when only its shape is asked for."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Located:
    """A model that was found. `folder` holds its files; None for a config alone, and for a preset
    whose weights do not come with the package.

    `scanned`: its checkpoint, where finding the model took a look at it already.
    """

    name: str
    config: ModelConfig
    folder: Path | None
    kind: Literal["preset", "config", "folder", "hub"]
    scanned: Checkpoint | None = None

    def checkpoint(self) -> Checkpoint:
        """The files of the folder, each read once. Raises CheckpointError for a fault in them."""
        assert self.folder is not None, f"{self.name} has no files"
        return self.scanned or scan(self.folder)


def locate(model: str, *, weights: bool = False) -> Located:
    """Find the model meant by a preset's name, a path, or a hub id `owner/name[@revision]`.

    An existing path wins. Of a hub model, config.json (and hf_quant_config.json) is fetched into
    the hub's cache, or taken from there when the hub cannot be reached. With `weights` the result
    has a folder with them: of a hub model the complete cached copy, as `suzuri pull` leaves it,
    without asking the network. Raises ValueError that says what is wrong and what to do.
    """
    path = _existing_path(model)
    if path is not None:
        located = _from_path(path)
    elif "/" not in model:
        located = _from_preset(SHORT_NAMES.get(model, model))
    else:
        located = _from_hub(model, weights)
    if weights and located.folder is None:
        raise ValueError(without_weights(model))
    return located


def without_weights(model: str) -> str:
    """What is wrong with a shape, and what to do, where weights are needed."""
    shipped = SHIPPED.get(SHORT_NAMES.get(model, model))
    if shipped is not None:
        return (
            f"the weights of {model!r} are not in this installation ({shipped} has no "
            f"{CONFIG_FILE}); install Suzuri again, or give a model folder or a hub id"
        )
    return (
        f"{model!r} is a shape without weights; give a model folder or a hub id, or ask for random "
        "weights where that is possible (--random-weights, random_weights=True)"
    )


def _existing_path(model: str) -> Path | None:
    """The path, if there is one. ValueError for what can only have been meant as a path."""
    if not model.strip():
        raise ValueError("MODEL is empty; give a preset, a config.json, a folder or a hub id")
    path = Path(model)
    try:
        if model.startswith("~"):
            path = path.expanduser()
        if path.exists():
            return path
        broken = path.is_symlink()
    except OSError as error:
        raise ValueError(f"{model!r} cannot be looked at: {error.strerror}") from error
    except RuntimeError as error:
        raise ValueError(f"{model!r}: {error}") from error
    looks_like_path = (
        model.startswith((".", "/", "~"))
        or model.endswith((".json", "/", *WEIGHT_SUFFIXES))
        or model.partition("@")[0].count("/") > 1
        or "\\" in model
    )
    if "://" not in model and (broken or looks_like_path):
        what = "is a broken link" if broken else "does not exist"
        raise ValueError(
            f"{model!r}: this path {what}. A model on the hub is written owner/name, a preset "
            f"is one of {', '.join(PRESETS)}"
        )
    return None


def _from_path(path: Path) -> Located:
    if path.is_dir():
        if not (path / CONFIG_FILE).exists() and (hint := near_folders(path)):
            raise ValueError(f"{path} has no {CONFIG_FILE}{hint}")
        name = path.resolve().name or str(path)
        return Located(name=name, config=ModelConfig.from_file(path), folder=path, kind="folder")
    if path.name.endswith(WEIGHT_SUFFIXES):
        raise ValueError(f"{path} is a weight file; give the folder that holds it: {path.parent}")
    config = ModelConfig.from_file(path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return Located(name=name, config=config, folder=None, kind="config")


def _from_preset(name: str) -> Located:
    try:
        folder = SHIPPED.get(name)
        if folder is not None and not (folder / CONFIG_FILE).is_file():
            folder = None
        return Located(name=name, config=preset(name), folder=folder, kind="preset")
    except ValueError as error:
        raise ValueError(
            f"{error} (nor is {name!r} a path; a model on the hub is written owner/name)"
        ) from error


def _from_hub(model: str, weights: bool) -> Located:
    repo, revision = parse_repo(model)
    scanned = None
    if weights:
        scanned = _complete_copy(model, repo, revision)
        folder = scanned.directory
    else:
        try:
            folder = _fetch_config(repo, revision)
        except HubError as error:
            raise ValueError(f"{error} (and there is no folder {model} here)") from error
    try:
        config = ModelConfig.from_file(folder)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    return Located(name=repo, config=config, folder=folder, kind="hub", scanned=scanned)


def _complete_copy(model: str, repo: str, revision: str | None) -> Checkpoint:
    folder = cached_snapshot(repo, revision)
    if folder is None:
        raise ValueError(
            f"{model} is not in the hub's cache ({cache_folder(repo).parent}); fetch it with: "
            f"suzuri pull {model}"
        )
    try:
        return scan(folder)
    except CheckpointError as error:
        raise ValueError(
            f"{model} is not complete in the hub's cache: {error}. Go on with: suzuri pull {model}"
        ) from error


def _fetch_config(repo: str, revision: str | None) -> Path:
    """Folder with the config of the hub's present commit, or of the cached one."""
    cached = cached_snapshot(repo, revision)
    try:
        listing = list_files(repo, revision)
    except HubError as error:
        if not error.unreachable:
            raise
        if cached is None:
            raise HubError(f"{error}. No copy of {repo} is in the cache") from error
        log.info("%s; using the cached copy of commit %s", error, cached.name)
        return cached
    if not listing.has(CONFIG_FILES[0]):
        raise HubError(f"{repo} has no config.json at {listing.revision}; it is no model folder")
    # The name of a branch in the cache says which commit was pulled; a plan does not move it.
    wanted = listing.commit if cached is not None else (revision or DEFAULT_REVISION)
    paths = [_download(repo, name, wanted) for name in CONFIG_FILES if listing.has(name)]
    return paths[0].parent


def _download(repo: str, name: str, revision: str) -> Path:
    from huggingface_hub import (
        hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
    )
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    quiet = are_progress_bars_disabled()
    if not quiet:
        disable_progress_bars()  # a bar for two kilobytes
    try:
        with hub_errors(repo, revision):
            return Path(hf_hub_download(repo, name, revision=revision))
    finally:
        if not quiet:
            enable_progress_bars()
