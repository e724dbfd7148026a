"""`suzuri bench`: one of its commands."""

from suzuri.tools.bench.config import (
    BenchConfig,
    KernelsConfig,
    PlotConfig,
    ServingConfig,
    StartupConfig,
)


def run_bench(config: BenchConfig) -> int:
    """Runs what was asked; returns the exit code. Raises ValueError or OSError in words."""
    match config:
        case ServingConfig():
            from suzuri.tools.bench.serving import run_serving

            return run_serving(config)
        case KernelsConfig():
            from suzuri.tools.bench.kernels import run_kernels

            return run_kernels(config)
        case StartupConfig():
            from suzuri.tools.bench.startup import run_startup

            return run_startup(config)
        case PlotConfig():
            from suzuri.tools.bench.plot import run_plot

            return run_plot(config)
