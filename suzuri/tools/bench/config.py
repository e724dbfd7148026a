"""What `suzuri bench` can be asked. No torch here."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from tyro.conf import Positional, arg, subcommand

from suzuri.config import parse
from suzuri.tools.bench.cells import KINDS, SKEWED, cell_named

MAX_SEED = 2**62


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"--device {device}: must be cpu, cuda or cuda:N")


def _check_count(flag: str, value: int | None, most: int) -> None:
    if value is not None and not 1 <= value <= most:
        raise ValueError(f"{flag} {value}: must be from 1 to {most}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Time the engine: decode steps, prefill, and requests that arrive over time.

    Random weights, no HTTP. Each cell is shown beside its floor (bytes over bandwidth or FLOPs over
    rate, whichever takes longer) and beside what other systems took. Exit code 0, 2 when the input
    cannot be used.
    """

    models: Positional[tuple[str, ...]] = ()
    """Shapes: presets (tiny), config.json files or folders; their weights are drawn. Without any:
    the shapes of benchmarks/shapes, on a CPU tiny."""

    cells: tuple[str, ...] = ()
    """Which cells: decode, prefill, trace, agents, skewed, or by name: decode:8x8192,
    prefill:1x1024, trace:4, agents:16, decode:64x1024:skewed. Without any: all of the table."""

    device: str = "cuda"
    """Where the models run: cpu, cuda, cuda:1, ..."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights, activations and caches."""

    quick: bool = False
    """Fewer cells, steps and repeats."""

    repeats: int | None = None
    """Times that a cell is measured; the median counts (default 5, quick 3)."""

    steps: int | None = None
    """Decode steps of one measurement (default 32, quick 8)."""

    token_budget: int = 8192
    """Tokens of one step, as the engine's setting of that name."""

    requests: int | None = None
    """Requests of a trace (default 64, quick 16)."""

    card: str | None = None
    """Whose bandwidth and rate the floors are for, by a name that suzuri plan knows (default: the
    GPU that runs; on a CPU h200, and then without a share)."""

    no_peers: bool = False
    """Do not run other systems, even if they are installed."""

    seed: int = 0
    """Seed of weights, prompts and arrivals."""

    out: Annotated[str | None, arg(metavar="FILE")] = None
    """Write everything as JSON, after each cell."""

    def resolve(self) -> "ServingConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        _check_device(self.device)
        for word in self.cells:
            if word not in (*KINDS, SKEWED):
                cell_named(word)
        _check_count("--repeats", self.repeats, 1000)
        _check_count("--steps", self.steps, 10_000)
        _check_count("--token-budget", self.token_budget, 1_000_000)
        _check_count("--requests", self.requests, 100_000)
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        if any(not model.strip() for model in self.models):
            raise ValueError("MODEL is empty; give a preset, a config.json or a folder")
        return self

    @property
    def num_repeats(self) -> int:
        return self.repeats or (3 if self.quick else 5)

    @property
    def num_steps(self) -> int:
        return self.steps or (8 if self.quick else 32)

    @property
    def num_requests(self) -> int:
        return self.requests or (16 if self.quick else 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Time the kernels of one op, or of all, at the shapes of Inkling and Inkling-Small.

    The op's tests run first, and an op whose tests fail is not reported. Exit code 0; 1 when tests
    failed, or when an op could not be timed; 2 when the input cannot be used.
    """

    ops: Positional[tuple[str, ...]] = ()
    """Folders of suzuri/kernels (default: all)."""

    cases: tuple[str, ...] = ()
    """Names in the op's cases.py (default: the true shapes)."""

    device: str = "cuda"
    """Where they run: cpu, cuda, cuda:1, ..."""

    repeats: int = 7
    """Measurements of each case; the median counts."""

    card: str | None = None
    """Whose bandwidth and rate the limits are (default: the GPU that runs; on a CPU none)."""

    no_test: bool = False
    """Report without running the tests, where an installed wheel has none; the JSON says so."""

    out: Annotated[str | None, arg(metavar="FILE")] = None
    """Write everything as JSON, after each op."""

    def resolve(self) -> "KernelsConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        _check_device(self.device)
        _check_count("--repeats", self.repeats, 1000)
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartupConfig:
    """Time an engine's start: from the weights to ready, and from there to the first token.

    Each start has a process of its own: a cold one, for which no kernel is compiled yet, then a
    warm one, which finds what the first has left. Exit code 0; 1 when a small load needed kernels
    that were not there when the engine was ready, which are named; 2 when the input cannot be used.
    """

    model: Positional[str]
    """A folder, a hub id, or with --random-weights a preset or a config.json."""

    random_weights: bool = False
    """Take the shape only and draw the weights."""

    cold: bool = False
    """Only the cold start."""

    no_prepare: bool = False
    """Start as with prepare = False: kernels are compiled on first use."""

    device: str = "cuda"
    """Where the model runs: cpu, cuda, cuda:1, ..."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights, activations and caches."""

    max_context: int | None = None
    """As the engine's setting of that name; so the next two."""

    max_running: int = 64

    token_budget: int = 2048

    seed: int = 0
    """Seed of weights and requests."""

    out: Annotated[str | None, arg(metavar="FILE")] = None
    """Write everything as JSON, after each start."""

    def resolve(self) -> "StartupConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        _check_device(self.device)
        if not self.model.strip():
            raise ValueError("MODEL is empty; give a preset, a config.json or a folder")
        _check_count("--max-context", self.max_context, 1 << 30)
        _check_count("--max-running", self.max_running, 65_536)
        _check_count("--token-budget", self.token_budget, 1_000_000)
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Draw result files of `suzuri bench serving`: tokens/s per GPU against tokens/s per user, and
    the time between tokens by batch."""

    files: Positional[tuple[str, ...]] = ()
    """JSON files that --out wrote."""

    out: Annotated[str, arg(metavar="FILE")] = "bench.png"
    """The PNG to write."""

    def resolve(self) -> "PlotConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        if not self.files:
            raise ValueError("give at least one file that suzuri bench serving --out wrote")
        if not self.out.endswith(".png"):
            raise ValueError(f"--out {self.out}: must end with .png")
        return self


BenchCommand = (
    Annotated[ServingConfig, subcommand(name="serving")]
    | Annotated[KernelsConfig, subcommand(name="kernels")]
    | Annotated[StartupConfig, subcommand(name="startup")]
    | Annotated[PlotConfig, subcommand(name="plot")]
)
BenchConfig = ServingConfig | KernelsConfig | StartupConfig | PlotConfig
"""What follows `suzuri bench`."""


def parse_bench(args: Sequence[str]) -> BenchConfig:
    """The config of a command line. Prints help or the error and exits (0 or 2)."""
    return parse(cast(Any, BenchCommand), prog="suzuri bench", args=args)
