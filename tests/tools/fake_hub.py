"""A model hub on a port of this machine: what the real one answers, and what can go wrong there.

It speaks the three requests that a pull makes (the list of files, HEAD and GET of one file, the
latter for large files by a redirect to another host), counts every byte that it sends, and breaks
where a test tells it to.
"""

import dataclasses
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.waiting import PATIENCE

COMMIT = "1234567890abcdef1234567890abcdef12345678"


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclasses.dataclass
class Repo:
    """Files by name at each commit, and whom the hub lets read them."""

    files: dict[str, bytes]
    commits: dict[str, str] = dataclasses.field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None
    gated: bool = False
    listed_sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    bare_list: bool = False
    """The list has names only, as some mirrors give it."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """One answered request for a file's bytes: which ones left this server."""

    name: str
    start: int
    count: int


@dataclasses.dataclass
class Trouble:
    """What to do wrong, by file name; `list` stands for the list of files."""

    status: dict[str, list[tuple[int, dict[str, str]]]] = dataclasses.field(default_factory=dict)
    cut_after: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    corrupt: dict[str, int] = dataclasses.field(default_factory=dict)
    ignore_range: bool = False
    seconds_per_piece: float = 0.0
    holds_list: bool = False
    """The list waits for `FakeHub.go_on`."""
    hold_after: dict[str, int] = dataclasses.field(default_factory=dict)
    """So many bytes of a file come, the rest waits for `FakeHub.go_on`."""
    body: bytes | None = None
    """Answer to the request for the list, instead of one."""


class FakeHub:
    """The state of one server: its repositories, its troubles, and what it has sent."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.trouble = Trouble()
        self.sent: list[Sent] = []
        self.requests: list[tuple[str, str]] = []
        self.leaked_tokens = 0
        self.lock = threading.Lock()
        self.go_on = threading.Event()
        self.url = ""

    def bytes_of(self, name: str) -> int:
        return sum(sent.count for sent in self.sent if sent.name == name)

    def forget(self) -> None:
        self.sent.clear()
        self.requests.clear()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


@contextmanager
def running() -> Iterator[FakeHub]:
    """A server in a thread, on a free port."""
    hub = FakeHub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+?)/(.+)", path)
        try:
            if listing:
                self._list(listing[1], listing[2] or "main")
            elif path.startswith("/cdn/"):
                self._cdn(path, body)
            elif file:
                self._file(file[1], file[2], file[3], body)
            else:
                self._plain(404, b"")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _plain(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _troubled(self, key: str) -> bool:
        with self.hub.lock:
            waiting = self.hub.trouble.status.get(key, [])
            answer = waiting.pop(0) if len(waiting) > 1 else (waiting[0] if waiting else None)
        if answer is None or answer[0] == 200:
            return False
        self._plain(answer[0], b"", answer[1])
        return True

    def _admitted(self, repo: str, *, to_file: bool) -> Repo | None:
        """The repository if it is there and the caller may see it; else the refusal is sent."""
        known = self.hub.repos.get(repo)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given == "wrong":
            self._plain(
                401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"}
            )
        elif known is None or (known.token is not None and given != known.token):
            code = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._plain(404 if given else 401, b"", code)
        elif known.gated and to_file:
            self._plain(403 if given else 401, b"", {"X-Error-Code": "GatedRepo"})
        else:
            return known
        return None

    def _commit(self, repo: Repo, revision: str) -> str | None:
        commit = repo.commits.get(revision, revision)
        if commit in repo.commits.values():
            return commit
        self._plain(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return None

    def _list(self, name: str, revision: str) -> None:
        if self._troubled("list"):
            return
        if self.hub.trouble.holds_list:
            self.hub.go_on.wait(PATIENCE)
        if self.hub.trouble.body is not None:
            self._plain(200, self.hub.trouble.body)
            return
        repo = self._admitted(name, to_file=False)
        commit = None if repo is None else self._commit(repo, revision)
        if repo is None or commit is None:
            return
        siblings: list[dict[str, Any]] = []
        for file, data in repo.files.items():
            size = repo.listed_sizes.get(file, len(data))
            entry: dict[str, Any] = {"rfilename": file}
            if not repo.bare_list:
                entry |= {"size": size, "blobId": blob_id(data)}
            if is_large(file) and not repo.bare_list:
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"size": size, "sha256": digest, "pointerSize": 134}
            siblings.append(entry)
        document = {"id": name, "sha": commit, "siblings": siblings, "private": False}
        self._plain(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str, body: bool) -> None:
        if self._troubled(file):
            return
        repo = self._admitted(name, to_file=True)
        commit = None if repo is None else self._commit(repo, revision)
        if repo is None or commit is None:
            return
        data = repo.files.get(file)
        common = {"X-Repo-Commit": commit}
        if data is None:
            self._plain(404, b"", common | {"X-Error-Code": "EntryNotFound"})
        elif is_large(file):
            # Another host name, so that a client must not send its token along.
            host = self.hub.url.replace("127.0.0.1", "localhost")
            headers = common | {
                "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{host}/cdn/{name}/{file}",
            }
            self._plain(302, b"", headers)
        else:
            self._bytes(file, data, common | {"ETag": f'"{blob_id(data)}"'}, body)

    def _cdn(self, path: str, body: bool) -> None:
        if "Authorization" in self.headers:
            self.hub.leaked_tokens += 1
        owner, name, file = path.removeprefix("/cdn/").split("/", 2)
        self._bytes(file, self.hub.repos[f"{owner}/{name}"].files[file], {}, body)

    def _bytes(self, file: str, data: bytes, headers: dict[str, str], body: bool) -> None:
        trouble = self.hub.trouble
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and not trouble.ignore_range else 0
        end = len(data)
        if asked and not trouble.ignore_range and asked[2]:
            end = min(end, int(asked[2]) + 1)
        if start and start >= len(data):
            self._plain(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        with self.hub.lock:
            if trouble.corrupt.get(file, 0) > 0 and body:
                trouble.corrupt[file] -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
            cuts = trouble.cut_after.get(file, [])
            stop = min(end, start + cuts.pop(0)) if cuts and body else end
        partly = bool(start) or end < len(data)
        self.send_response(206 if partly else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - start))
        if partly:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        count = 0
        try:
            for at in range(start, stop, 4096):
                if count >= trouble.hold_after.get(file, len(data)):
                    self.hub.go_on.wait(PATIENCE)
                piece = data[at : min(at + 4096, stop)]
                self.wfile.write(piece)
                count += len(piece)
                if trouble.seconds_per_piece:
                    time.sleep(trouble.seconds_per_piece)
        finally:
            with self.hub.lock:
                self.hub.sent.append(Sent(file, start, count))
        if stop < end:
            self.close_connection = True
