"""`suzuri serve`: the processes of a server, from the first line on the terminal to the last.

The port is taken first, then the model is loaded by the engine's process, while the port already
answers /health. SIGTERM and Ctrl-C drain: what runs may end, what comes is refused; a second one
ends at once.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from suzuri.engine.client import EngineClient
from suzuri.engine.messages import VERSION, Load
from suzuri.engine.messages import Progress as Loaded
from suzuri.engine.stream import EngineUnavailable
from suzuri.log import get_logger
from suzuri.server.app import create_app
from suzuri.server.config import ServeConfig
from suzuri.server.protocol import Connection
from suzuri.server.service import Service
from suzuri.server.text_client import Texts, TextUnavailable
from suzuri.server.text_messages import Setup

BACKLOG = 2048
MOST_FILES = 65_536
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection that they do not use (httpx: 5 s): one that is closed here
while a request is on its way is an error there."""
FLUSH_SECONDS = 1
"""After the drain, time for last words to reach their readers."""

log = get_logger(__name__)


def run_serve(config: ServeConfig) -> int:
    """Serve until told to stop. Returns the exit code; raises ValueError or OSError, before weights
    are read where that can be known, for what cannot be served."""
    _allow_connections()
    listener = _listener(config.host, config.port)
    with contextlib.closing(listener):
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, listener))


async def _serve(config: ServeConfig, listener: socket.socket) -> int:
    return await _Server(config, listener).run()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Uvloop's, where it is installed; docs/serve.md has measurements of both."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is given, as asyncio sends small answers at once only where it reads TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}); "
            "stop what does, or give another --port (0 takes a free one)"
        ) from error
    return listener


def _connection(config: ServeConfig) -> type[Connection]:
    # A stream that stalls is ended by EventStream first, which counts it.
    reader_seconds = 1.5 * config.reader_seconds
    fields = {"head_seconds": config.body_seconds, "reader_seconds": reader_seconds}
    return type("Connection", (Connection,), fields)


def _allow_connections() -> None:
    """As many open files as this process may have: each client is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Uvicorn(uvicorn.Server):
    """Signals are handled by _Server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Server:
    def __init__(self, config: ServeConfig, listener: socket.socket) -> None:
        self._config, self._listener = config, listener
        self._shown = _Shown()
        engine = config.engine()
        self._engine = EngineClient(
            Load(
                version=VERSION,
                model=config.model,
                config=engine,
                random_weights=config.random_weights,
                seed=config.seed,
                device=config.device,
                text_only=config.text_only,
                allow_updates=config.allow_weight_updates,
            ),
            stuck_seconds=config.stuck_seconds,
            on_progress=self._shown.show,
        )
        self._texts = Texts(count=config.text_workers)
        self._service = Service(
            engine=self._engine,
            texts=self._texts,
            names=config.names(),
            most_pending=config.max_running + config.max_queue,
            request_seconds=config.request_seconds,
            reader_seconds=config.reader_seconds,
            allows_weight_updates=config.allow_weight_updates,
        )
        app = create_app(
            self._service,
            keys=config.keys(),
            max_body=int(config.max_body_mb * 1e6),
            body_seconds=config.body_seconds,
        )
        self._http = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http=_connection(config),
                ws="none",
                backlog=BACKLOG,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        stop = asyncio.create_task(self._stop.wait())
        code = 0
        try:
            start = asyncio.create_task(self._start())
            await asyncio.wait({start, stop, http}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                start.cancel()
                await asyncio.gather(start, return_exceptions=True)
                if not stop.done():
                    http.result()
                    raise OSError("the HTTP server ended by itself")
                return 0
            start.result()
            ended = asyncio.create_task(self._engine.given_up.wait())
            await asyncio.wait({ended, stop, http}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not stop.done():
                log.error("the engine cannot be kept running: %s", self._engine.why_not_ready)
                code = 1
            ended.cancel()
            await self._drain()
        finally:
            self._http.should_exit = True
            self._http.force_exit = self._signals > 1
            stop.cancel()
            await asyncio.gather(http, stop, return_exceptions=True)
            await self._engine.close()
            await self._texts.close()
        return code

    async def _start(self) -> None:
        await self._texts.launch()
        try:
            with self._shown.bar():
                ready = await self._engine.start()
            setup = Setup(config=ready.config, max_tokens=ready.max_context - 1)
            await self._texts.set_up(setup)
        except (EOFError, TextUnavailable) as error:
            raise ValueError("the process that encodes texts ended at its start") from error
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        keys = "with a key" if self._config.keys() else "without a key"
        log.info(
            "%s: %d tokens of context, %d answers at a time, %s on %s",
            *(ready.model, ready.max_context, ready.max_running, ready.dtype, ready.device),
        )
        print(f"serving {ready.model} on http://{shown}:{port}/v1 ({keys})", flush=True)

    def _signalled(self) -> None:
        self._signals += 1
        self._stop.set()

    async def _drain(self) -> None:
        service = self._service
        service.is_draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.drain_seconds
        if service.works:
            log.info(
                "%d requests may end within %g s", len(service.works), self._config.drain_seconds
            )
        while service.works and loop.time() < end and self._signals < 2:
            await asyncio.sleep(0.05)
        if service.works:
            log.warning("%d requests are told that the server ends", len(service.works))
        for work in list(service.works):
            work.tell(EngineUnavailable("the server is shutting down"))
        flushed = loop.time() + FLUSH_SECONDS
        while service.works and loop.time() < flushed and self._signals < 2:
            await asyncio.sleep(0.02)


class _Shown:
    """Loading, on a terminal as a bar, else in the log."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
        )
        shown = self._console.is_terminal
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not shown
        )
        self._task = self._progress.add_task("starting", total=None)
        self._logged: tuple[str, int] = ("", -1)

    @contextlib.contextmanager
    def bar(self) -> Generator[None]:
        with self._progress:
            yield

    def show(self, loaded: Loaded) -> None:
        total = loaded.total or None
        self._progress.update(
            self._task, description=loaded.stage, completed=loaded.done, total=total
        )
        tenth = 10 * loaded.done // loaded.total if loaded.total else 0
        if not self._console.is_terminal and (loaded.stage, tenth) != self._logged:
            self._logged = (loaded.stage, tenth)
            amount = f" ({loaded.done / 1e9:.1f} of {loaded.total / 1e9:.1f} GB)" if total else ""
            log.info("%s%s", loaded.stage, amount)
        sys.stderr.flush()
