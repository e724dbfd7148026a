"""A repository of the model hub: its id, its list of files, its place in the cache.

The requests are those of the package huggingface_hub, which reads its own settings (HF_ENDPOINT,
HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, ...); it is imported only when the hub is asked. No torch here.
hub_errors.py turns its errors into words.
"""

# pyright: strict

import contextlib
import dataclasses
import re
from collections.abc import Generator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from suzuri.model.hub_errors import HubError, in_words

DEFAULT_REVISION = "main"
_REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOB_ID = re.compile(r"[0-9a-f]{40}")
_NOT_A_HUB = (KeyError, TypeError, AttributeError, AssertionError)
"""What reading a list of files ends in when the answer is JSON but no such list."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file of a repository. `digest` is its sha256 or, 40 digits long, its git blob id."""

    name: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """What a repository holds at one commit. `revision` is the name that led there."""

    repo: str
    revision: str
    commit: str
    files: tuple[HubFile, ...]

    def has(self, name: str) -> bool:
        """Whether a file of that name is in the list."""
        return any(file.name == name for file in self.files)


def parse_repo(text: str) -> tuple[str, str | None]:
    """(owner/name, revision or None) of `owner/name[@revision]`. ValueError says what is wrong."""
    repo, at, revision = text.partition("@")
    bare = repo.removeprefix("hf://").removeprefix("https://").removeprefix("http://")
    if bare != repo:
        parts = [part for part in bare.split("/") if part][-2:]
        raise ValueError(f"{text!r}: give the model's id alone, like {'/'.join(parts)!r}")
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or repo.endswith((".", ".git")):
        raise ValueError(
            f"{text!r} is not the id of a model on the hub: that is owner/name, of letters, "
            "digits, '-', '_' and '.', with @revision after it if need be"
        )
    if not at:
        return repo, None
    check_revision(revision, text)
    return repo, revision


def check_revision(revision: str, where: str) -> None:
    """Raises ValueError unless it can be the name of a branch or tag, or a commit."""
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ValueError(f"{where}: {revision!r} cannot be a branch, a tag or a commit")


def list_files(repo: str, revision: str | None) -> Listing:
    """The files of a repository with sizes and hashes; one request, no retry.

    A file whose size or hash the list omits (a mirror's may) is asked for by itself. Raises
    HubError in words.
    """
    from huggingface_hub import (
        HfApi,
        get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType]
    )
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

    wanted = revision or DEFAULT_REVISION
    files: list[HubFile] = []
    with hub_errors(repo, wanted):
        info = HfApi().model_info(
            repo, revision=wanted, files_metadata=True, timeout=HF_HUB_ETAG_TIMEOUT
        )
        commit = info.sha
        if commit is None or not _BLOB_ID.fullmatch(commit):
            raise KeyError("sha")
        for found in info.siblings or ():
            size = found.size if found.lfs is None else found.lfs.size
            digest = found.blob_id if found.lfs is None else found.lfs.sha256
            if size is None or digest is None:
                url = file_url(repo, found.rfilename, commit)
                metadata = get_hf_file_metadata(url, headers=request_headers())
                size, digest = metadata.size, metadata.etag
            if not isinstance(size, int) or size < 0 or not _is_digest(digest):
                raise HubError(
                    f"{endpoint()} tells no size and hash of {found.rfilename!r} in {repo}, so "
                    "that it could not be checked"
                )
            _check_name(repo, found.rfilename)
            files.append(HubFile(name=found.rfilename, size=size, digest=str(digest)))
    return Listing(repo=repo, revision=wanted, commit=commit, files=tuple(files))


def endpoint() -> str:
    """Address of the hub or of the mirror that stands for it. ValueError when it is no address."""
    from huggingface_hub import constants

    address = constants.ENDPOINT
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises when it is no number
    except ValueError:
        usable = False
    if not usable:
        raise HubError(f"HF_ENDPOINT = {address!r} is no address; it looks like https://host")
    return address


def file_url(repo: str, name: str, commit: str) -> str:
    """Where a file's bytes are asked for; the hub may send on from there."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, name, revision=commit, endpoint=endpoint())


def request_headers() -> dict[str, str]:
    """Headers of a request to the hub, with the user's token if there is one."""
    from huggingface_hub.utils import (
        build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    )

    return build_hf_headers(library_name="suzuri")


@contextlib.contextmanager
def hub_errors(repo: str, revision: str) -> Generator[None]:
    """Whatever the hub's library raises inside leaves as a HubError, in words."""
    from huggingface_hub.errors import HfHubHTTPError

    # The base class of httpx or of its successor, whichever is installed.
    http_error = cast(type[OSError], HfHubHTTPError.__mro__[1])
    address = endpoint()
    try:
        yield
    except HubError:
        raise
    except _NOT_A_HUB as error:
        raise HubError(
            f"{address} does not answer like a model hub for {repo}; check HF_ENDPOINT",
            unreachable=True,
        ) from error
    except (http_error, OSError, ValueError) as error:
        raise in_words(
            error,
            repo=repo,
            revision=revision,
            endpoint=address,
            has_token=_has_token(),
        ) from error


def _has_token() -> bool:
    from huggingface_hub import get_token

    try:
        return get_token() is not None
    except (OSError, ValueError):  # its file cannot be read, which may be the very error
        return False


def cache_folder(repo: str) -> Path:
    """Where the hub's cache keeps a repository: blobs/, refs/ and snapshots/."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}"


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The cached folder of a revision if it has a config.json at least. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repo, "config.json", revision=revision or DEFAULT_REVISION)
    except OSError as error:
        raise HubError(f"{cache_folder(repo)} cannot be read: {error.strerror}") from error
    return Path(found).parent if isinstance(found, str) else None


def _is_digest(value: str | None) -> bool:
    return value is not None and bool(_SHA256.fullmatch(value) or _BLOB_ID.fullmatch(value))


def _check_name(repo: str, name: str) -> None:
    """A name in the list becomes a path here: it must stay below the folder."""
    parts = name.split("/")
    unsafe = any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in parts[0]
    if unsafe or any(ord(character) < 32 for character in name):
        raise HubError(f"{repo} lists a file named {name!r}, which is no safe file name; refused")
