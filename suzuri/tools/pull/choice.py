"""Which files of a repository are pulled, and how a plan of it is shown. No torch here."""

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suzuri.model.checkpoint_files import INDEX_SUFFIX
from suzuri.model.hub import HubFile, Listing
from suzuri.tools.pull.places import Place, size_of

NEEDED = (
    *("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"),
    *("LICENSE*", "README*", "NOTICE*"),
)
"""What a server, or the licence, asks for; of the top folder only."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".npz", ".h5", ".msgpack", ".onnx", ".ckpt")
MAX_ROWS = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The files to have, small ones first, and those left out. `whole`: none that a server needs
    is among the latter."""

    files: tuple[HubFile, ...]
    left_out: tuple[HubFile, ...]
    whole: bool


def choose(listing: Listing, include: Sequence[str], exclude: Sequence[str]) -> Choice:
    """The files that the patterns pick. ValueError when they, or the repository, leave nothing."""
    repo = listing.repo
    needed = {file for file in listing.files if is_needed(file.name)}
    if not include:
        _check_model(listing, needed)
    chosen = [
        file
        for file in listing.files
        if (_matches(file.name, include) if include else file in needed)
        and not _matches(file.name, exclude)
    ]
    if not chosen:
        raise ValueError(f"--include and --exclude leave none of the {len(listing.files)} files "
                         f"of {repo}")  # fmt: skip
    return Choice(
        files=tuple(sorted(chosen, key=lambda file: (_is_weight(file.name), file.name))),
        left_out=tuple(file for file in listing.files if file not in chosen),
        whole=needed <= set(chosen),
    )


def is_needed(name: str) -> bool:
    """Whether a file is pulled when no pattern says otherwise."""
    return "/" not in name and _matches(name, NEEDED)


def show_plan(console: Console, choice: Choice, place: Place) -> None:
    """Prints every file with its size and what is here of it, then what is left out."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    for file in choice.files[:MAX_ROWS]:
        have = have_of(place, file)
        state = amount(have) if have else "-"
        if place.held(file):
            state = "all" if place.proven(file) else "all, unchecked"
        table.add_row(escape(file.name), amount(file.size), state)
    if len(choice.files) > MAX_ROWS:
        rest = choice.files[MAX_ROWS:]
        table.add_row(f"and {len(rest)} more", amount(total(rest)), "")
    console.print(table)
    if choice.left_out:
        console.print(escape(f"left out: {_grouped(choice.left_out)}"), soft_wrap=True)


def have_of(place: Place, file: HubFile) -> int:
    """Bytes of a file that need no fetching."""
    if place.held(file) is not None:
        return file.size
    have = size_of(place.unfinished(file))
    return have if have <= file.size else 0


def total(files: Sequence[HubFile]) -> int:
    """Bytes of all files."""
    return sum(file.size for file in files)


def amount(num_bytes: int) -> str:
    """Bytes as people and disks count them: 1 GB = 10^9."""
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def _check_model(listing: Listing, needed: set[HubFile]) -> None:
    where = f"{listing.repo} at {listing.revision}"
    if not any(_is_weight(file.name) for file in needed):
        others = [file.name for file in listing.files if file.name.endswith(OTHER_WEIGHTS)]
        below = [file.name for file in listing.files if _is_weight(file.name)]
        found = ""
        if below:
            found = f"; there is {below[0]} in a subfolder, which is not read"
        elif others:
            found = f"; there is {others[0]}, a format that is not read"
        raise ValueError(f"{where} has no *.safetensors file{found}. --include takes files anyway")
    if not any(file.name == "config.json" for file in needed):
        raise ValueError(
            f"{where} has no config.json: it is no model. --include takes files anyway"
        )


def _is_weight(name: str) -> bool:
    return name.endswith(".safetensors") and not name.endswith(INDEX_SUFFIX)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """As in a shell, but `*` also spans folders, and a folder's name stands for all in it."""
    return any(fnmatchcase(name, p + "*" if p.endswith("/") else p) for p in patterns)


def _grouped(files: Sequence[HubFile]) -> str:
    """Files of a subfolder under its name, with the sizes; --include brings them back."""
    groups: dict[str, list[HubFile]] = {}
    for file in files:
        top, slash, _ = file.name.partition("/")
        groups.setdefault(top + slash, []).append(file)
    words = [
        f"{name} ({f'{len(group)} files, ' if name.endswith('/') else ''}{amount(total(group))})"
        for name, group in groups.items()
    ]
    return ", ".join(words)
