"""Makes an engine ready before it serves: what would be compiled, tested or recorded on first use
is compiled, tested and recorded now.

Read `Preparation.prepare`: a walk through the steps finds the kernels (rehearsal.py), or their list
is there from an earlier start (kept_walks.py); they are compiled on all cores (compilation.py), the
library's products are tested (kernels/matmul/buckets.py), one short request runs, and steps of the
common sizes are recorded. On GPUs only: this file loads Triton. Nothing here may keep an engine
from serving: what fails is told, and comes on first use as it would have.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator

import torch

from suzuri.engine import kept_walks
from suzuri.engine.compilation import Compiler, load
from suzuri.engine.engine import Engine
from suzuri.engine.launches import TRITON_ERRORS, Specialization
from suzuri.engine.rehearsal import walk
from suzuri.engine.runner import Runner
from suzuri.engine.warm_up import warm_up
from suzuri.kernels.matmul import buckets
from suzuri.log import get_logger

Show = Callable[[str, int, int], None]
"""(what, done, total)."""
GRAPH_SECONDS = 4.0
"""For recording; what is not recorded then is recorded when it is wanted for the second time."""
SMALL = 8
"""Rows of steps that are all recorded; of larger ones the powers of two."""
LONG = 2048
"""Tokens of a prompt from which on only powers of two are recorded: each is a whole step's time."""
MOST_NAMED = 3
log = get_logger(__name__)


@dataclasses.dataclass
class Prepared:
    """What a preparation did, in seconds by phase and in numbers."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    kernels: int = 0
    compiled: int = 0
    cached: int = 0
    products: int = 0
    graphs: int = 0
    problems: list[str] = dataclasses.field(default_factory=list[str])

    @property
    def text(self) -> str:
        """For the log."""
        times = ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())
        return (
            f"ready: {times}; {self.kernels} kernels ({self.compiled} compiled, {self.cached} from "
            f"the cache), {self.products} products tested, {self.graphs} steps recorded"
        )


class Preparation:
    """One engine's start, on a GPU. Make it before weights are read: what compiles is started then,
    and is ready when it is needed. `close` in the end, whatever happened."""

    def __init__(self) -> None:
        self._compiler = Compiler()

    def close(self) -> None:
        """Leaves no process behind."""
        self._compiler.close()

    def prepare(
        self,
        engine: Engine,
        show: Show = lambda what, done, total: None,
        *,
        has_weights: bool = True,
    ) -> Prepared:
        """All phases; without weights, those that read none. The engine must be idle; it is so
        again, and has the state it had."""
        done, runner = Prepared(), engine.runner
        kernels, shapes = list[Specialization](), list[buckets.Shape]()
        with _phase(done, "walk"):
            kernels, shapes = self._walk(engine, show, done)
        _give_back(runner.device)  # the driver loads kernels into memory that torch does not hold
        with _phase(done, "compile"):
            self._compile(kernels, runner.device, show, done)
        for i, shape in enumerate(shapes):
            with _phase(done, "self-tests"):
                show("testing products", i, len(shapes))
                buckets.prepare([shape], runner.device)
                done.products += 1
        _give_back(runner.device)
        if has_weights:
            with _phase(done, "first request"):
                show("running a first request", 0, 1)
                warm_up(engine)
        if has_weights and runner.graphs is not None:
            with _phase(done, "graphs"):
                self._record(runner, show, done)
        for problem in done.problems[:MOST_NAMED]:
            log.warning("not prepared, and so made on first use: %s", problem)
        if len(done.problems) > MOST_NAMED:
            log.warning("and %d more that are not prepared", len(done.problems) - MOST_NAMED)
        log.info("%s", done.text)
        return done

    def _walk(self, engine: Engine, show: Show, done: Prepared) -> kept_walks.Found:
        """As an earlier start found it, or now."""
        show("finding kernels", 0, 1)
        runner, print_ = engine.runner, None
        if runner.device.type == "cuda":
            with contextlib.suppress(*TRITON_ERRORS):  # without one nothing is kept
                print_ = kept_walks.fingerprint(runner, engine.vocabulary)
        if print_ is not None and (kept := kept_walks.read(print_)) is not None:
            return kept
        seen, shapes = walk(
            runner, engine.vocabulary, lambda n, total: show("finding kernels", n, total)
        )
        found = list(seen.kernels), shapes
        if print_ is not None and not seen.problems:
            kept_walks.write(print_, found)
        done.problems += [f"{name}: {why}" for name, why in seen.problems.items()]
        return found

    def _compile(
        self, kernels: list[Specialization], device: torch.device, show: Show, done: Prepared
    ) -> None:
        done.kernels = len(kernels)
        apart = self._compiler.compile(
            kernels, lambda n, total: show("compiling kernels", n, total)
        )
        if self._compiler.problem is not None:
            log.warning(
                "kernels are compiled in this process, which takes longer: the one that is meant "
                "for it failed (%s)",
                self._compiler.problem,
            )
        self._compiler.close()
        here = load(kernels, device, lambda n, total: show("loading kernels", n, total))
        if twice := apart.names & here.names:
            # Some of a name, perhaps: kernels have one for all their forms.
            log.info("compiled in both processes: %s", ", ".join(sorted(twice)))
        done.compiled = max(apart.compiled, here.compiled)
        done.cached = len(kernels) - done.compiled - len(here.problems)
        done.problems += [f"{name}: {why}" for name, why in here.problems.items()]

    def _record(self, runner: Runner, show: Show, done: Prepared) -> None:
        """Decode steps of all small batches, then of larger ones, then one prompt, longest first,
        as long as the time lasts."""
        assert runner.graphs is not None
        sizes = runner.graphs.sizes.decode
        powers = [size for size in sizes if size > SMALL and size & (size - 1) == 0]
        wanted = [(size, 0) for size in (*(size for size in sizes if size <= SMALL), *powers)]
        for rows in reversed(runner.graphs.sizes.rows):
            # A whole size, and with padding, which is a sequence more.
            if rows & (rows - 1) == 0:
                wanted += [(rows, 1), (rows, 2)]
            elif rows < LONG:
                wanted.append((rows, 2))
        end = time.monotonic() + GRAPH_SECONDS
        for i, size in enumerate(wanted):
            show("recording steps", i, len(wanted))
            if time.monotonic() > end:
                return
            done.graphs += runner.record(*size)


@contextlib.contextmanager
def _phase(done: Prepared, name: str) -> Generator[None]:
    """Times the block; what fails in it is noted, and the next block goes on."""
    start = time.monotonic()
    try:
        yield
    except TRITON_ERRORS as error:
        done.problems.append(f"{name}: {type(error).__name__}: {error}")
    finally:
        done.seconds[name] = done.seconds.get(name, 0.0) + time.monotonic() - start


def _give_back(device: torch.device) -> None:
    """Memory of steps of sizes that may not come again."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
