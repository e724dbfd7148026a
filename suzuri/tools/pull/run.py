"""`suzuri pull`: a model from the hub, complete and checked, or the reason why not.

The steps read top-down in `run_pull`. choice.py says which files, places.py where they
go, fetch.py how one comes, workers.py how many come at once. No torch here.
"""

import sys

from rich.console import Console
from rich.markup import escape

from suzuri.log import get_logger
from suzuri.model.checkpoint_files import CheckpointError, scan
from suzuri.model.config import ModelConfig
from suzuri.model.hub import HubFile, Listing, cache_folder, cached_snapshot, list_files
from suzuri.model.hub_errors import HubError
from suzuri.model.locate import CONFIG_FILES
from suzuri.tools.pull.choice import Choice, amount, choose, have_of, show_plan, total
from suzuri.tools.pull.config import PullConfig
from suzuri.tools.pull.places import CachePlace, FolderPlace, Place, free_bytes
from suzuri.tools.pull.workers import check_held, fetch_all

SPARE_BYTES = 1_000_000_000
"""Left free, for everything else that writes to the same disk during the hours this may take."""

log = get_logger(__name__)


def run_pull(config: PullConfig) -> int:
    """Pull a model. Returns the exit code: 0 when it is complete, 130 when interrupted.

    Raises ValueError or OSError where the input, the hub or the disk is in the way; what was
    fetched until then stays, and the next run goes on from it.
    """
    console = Console()
    try:
        listing = list_files(config.repo, config.revision)
    except HubError as error:
        return _offline(config, error, console)
    choice = choose(listing, config.include, config.exclude)
    place = _place(config, listing)
    console.print(escape(f"{listing.repo} at {listing.revision}, commit {listing.commit[:12]}"))
    show_plan(console, choice, place)
    wanted = total(choice.files)
    here = sum(have_of(place, file) for file in choice.files)
    print(
        f"{len(choice.files)} files, {amount(wanted)}: {amount(here)} here, "
        f"{amount(wanted - here)} to fetch into {_root(place)} "
        f"({amount(free_bytes(place.folder))} free)"
    )
    if config.dry_run:
        return 0
    try:
        _bring(config, listing, choice, place, console)
    except KeyboardInterrupt:
        here = sum(have_of(place, file) for file in choice.files)
        print(
            f"suzuri pull: interrupted; {amount(here)} of {amount(wanted)} are kept. The same "
            "command goes on from there",
            file=sys.stderr,
        )
        return 130
    except HubError as error:
        here = sum(have_of(place, file) for file in choice.files)
        raise HubError(
            f"{error}. {amount(here)} of {amount(wanted)} are kept; the same command goes on from "
            "there"
        ) from error
    place.finish()
    return _verdict(config, listing.repo, listing.commit, choice, place, console)


def _place(config: PullConfig, listing: Listing) -> Place:
    if config.to is not None:
        return FolderPlace(folder=config.to)
    return CachePlace(
        storage=cache_folder(listing.repo), commit=listing.commit, revision=listing.revision
    )


def _root(place: Place) -> str:
    return str(place.storage if isinstance(place, CachePlace) else place.folder)


def _bring(
    config: PullConfig, listing: Listing, choice: Choice, place: Place, console: Console
) -> None:
    """Everything from the list to complete files in their place."""
    verify = not config.no_verify
    held = [file for file in choice.files if place.held(file) is not None]
    doubtful = [file for file in held if config.verify or (verify and not place.proven(file))]
    damaged = check_held(place, doubtful, config.max_workers, console)
    for file in damaged:
        log.warning("%s is here but has not the hash that the hub lists; fetching it", file.name)
    for file in held:
        if file not in damaged:
            source = place.held(file)
            assert source is not None
            place.put(file, source, proven=verify or place.proven(file))
    missing = [file for file in choice.files if file not in held or file in damaged]
    if not missing:
        print("already complete: nothing to fetch")
        return
    _check_disk(place, missing, damaged)
    first = [file for file in missing if file.name in CONFIG_FILES]
    if first and not config.include:
        # Two kilobytes first: they tell whether the other 600 GB can be used.
        fetch_all(listing, place, first, damaged, verify, config.max_workers, console)
        missing = [file for file in missing if file not in first]
        _read_config(place, listing.repo)
    fetch_all(listing, place, missing, damaged, verify, config.max_workers, console)


def _check_disk(place: Place, missing: list[HubFile], damaged: list[HubFile]) -> None:
    needed = sum(
        file.size if file in damaged else file.size - have_of(place, file) for file in missing
    )
    free = free_bytes(place.folder)
    spare = min(SPARE_BYTES, needed)
    if needed + spare > free:
        raise ValueError(
            f"{_root(place)}: {amount(needed)} more are needed (and {amount(spare)} to spare), and "
            f"{amount(free)} are free there; free some, or go elsewhere with --to DIR, or with "
            "HF_HOME for the whole cache"
        )


def _read_config(place: Place, repo: str) -> ModelConfig:
    try:
        return ModelConfig.from_file(place.folder)
    except ValueError as error:
        raise ValueError(
            f"{repo} cannot be used: {error}. To have its files all the same: --include '*'"
        ) from error


def _verdict(
    config: PullConfig, repo: str, commit: str, choice: Choice, place: Place, console: Console
) -> int:
    """Looks at the folder as a loader would, and says what it is and how to name it."""
    if not choice.whole or config.include:
        print(f"OK: {len(choice.files)} chosen files of {repo} are in {place.folder}")
        return 0
    try:
        checkpoint = scan(place.folder)
    except CheckpointError as error:
        raise ValueError(
            f"every file of {repo} is here as the hub lists it, and yet the model is not whole: "
            f"{error}"
        ) from error
    model = _read_config(place, repo)
    for note in checkpoint.notes:
        console.print(escape(note), soft_wrap=True)
    data = sum(entry.nbytes for entry in checkpoint.tensors.values())
    console.print(
        f"{_shape(model)}; {len(checkpoint.tensors)} tensors, {amount(data)}", soft_wrap=True
    )
    revision = f"@{config.revision}" if config.revision else ""
    name = str(place.folder) if config.to is not None else f"{repo}{revision}"
    console.print(escape(f"use it as: {name}"), soft_wrap=True)
    print(f"OK: {repo} at {commit[:12]} is complete: {place.folder}")
    return 0


def _shape(model: ModelConfig) -> str:
    text = model.text
    words = [f"{text.num_hidden_layers} layers of width {text.hidden_size}"]
    if text.dense_mlp_idx < text.num_hidden_layers:
        words.append(f"{text.n_routed_experts} experts, {text.num_experts_per_tok} per token")
    words += [name for name, tower in (("images", model.vision), ("audio", model.audio)) if tower]
    if model.mtp_depths:
        words.append(f"{model.mtp_depths} draft depths")
    return ", ".join(words)


def _offline(config: PullConfig, error: HubError, console: Console) -> int:
    """Without the hub, a complete copy is as good; anything less is an error."""
    folder = config.to if config.to is not None else cached_snapshot(config.repo, config.revision)
    if not error.unreachable or config.include or config.exclude or folder is None:
        raise error
    try:
        scan(folder)
        ModelConfig.from_file(folder)
    except ValueError as fault:
        raise HubError(f"{error}. What is here is not complete: {fault}") from fault
    console.print(escape(str(error)), soft_wrap=True)
    print(f"OK: the copy in {folder} is complete; it was not compared with the hub")
    return 0
