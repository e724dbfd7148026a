"""`suzuri bench`: one of its three commands."""

from suzuri.tools.bench.config import KernelsConfig, PlotConfig, ServingConfig


def run_bench(config: ServingConfig | KernelsConfig | PlotConfig) -> int:
    """Runs what was asked; returns the exit code. Raises ValueError or OSError in words."""
    match config:
        case ServingConfig():
            from suzuri.tools.bench.serving import run_serving

            return run_serving(config)
        case KernelsConfig():
            from suzuri.tools.bench.kernels import run_kernels

            return run_kernels(config)
        case PlotConfig():
            from suzuri.tools.bench.plot import run_plot

            return run_plot(config)
