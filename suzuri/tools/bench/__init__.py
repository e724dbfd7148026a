"""`suzuri bench`: times of the engine and of every kernel, beside floors and other systems.

Reading order: config.py and cells.py (what can be asked), floors.py (the least time of a step),
weights.py, state.py and watch.py (a model, its caches and a clock), measure.py and trace.py (the
cells), serving.py (`bench serving`), peers.py and adapters.py (recorded and present figures of
other systems). ops.py, timing.py, op_tests.py and kernels.py are `bench kernels`; plot.py draws.
Public: BenchCommand, run_bench.
"""
