"""What `suzuri pull` can be asked. No torch here."""

import dataclasses
from pathlib import Path

from tyro.conf import Positional

from suzuri.model.hub import check_revision, parse_repo

MAX_WORKERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PullConfig:
    """Fetch a model from the hub, or what is missing of it; the same command goes on after a stop.

    Exit code 0 when it is complete, 2 when the input, the hub or the disk is in the way, 130 when
    interrupted.
    """

    repo: Positional[str]
    """owner/name, or owner/name@revision."""

    revision: str | None = None
    """Branch, tag or commit (default main)."""

    to: Path | None = None
    """Put the files into this folder instead of the hub's cache."""

    include: tuple[str, ...] = ()
    """Take the files that match one of these patterns, instead of those that a server needs."""

    exclude: tuple[str, ...] = ()
    """Leave out the files that match one of these patterns."""

    max_workers: int = 8
    """Files that are fetched at the same time."""

    verify: bool = False
    """Also read and hash the files that are there already; without it, those fetched now only."""

    no_verify: bool = False
    """Hash nothing: sizes and headers are checked, contents are not."""

    dry_run: bool = False
    """List what would be fetched, and stop."""

    def resolve(self) -> "PullConfig":
        """Checks the fields and takes `@revision` apart. Raises ValueError naming flag and fix."""
        repo, revision = parse_repo(self.repo)
        if revision is not None and self.revision not in (None, revision):
            raise ValueError(f"--revision {self.revision} contradicts {self.repo}; give one")
        if self.revision is not None:
            check_revision(self.revision, "--revision")
        if not 1 <= self.max_workers <= MAX_WORKERS:
            raise ValueError(f"--max-workers {self.max_workers}: must be from 1 to {MAX_WORKERS}")
        if self.verify and self.no_verify:
            raise ValueError("--verify and --no-verify contradict each other; give one")
        if "" in (*self.include, *self.exclude):
            raise ValueError("--include and --exclude: an empty pattern matches no file")
        to = self.to
        if to is not None:
            try:
                to = to.expanduser()
                other = to.exists() and not to.is_dir()
            except (OSError, RuntimeError) as error:
                raise ValueError(f"--to {self.to}: {error}") from error
            if other:
                raise ValueError(f"--to {to} is a file; give a folder")
        return dataclasses.replace(self, repo=repo, revision=self.revision or revision, to=to)
