"""Suzuri serves and trains the Inkling models from one exact model definition.

Rooms, from the ground up: kernels, distributed, model, processing, then engine, training and envs,
then rl, evals, server and tools; cli on top. docs/style.md says who may import whom.
"""

__version__ = "0.1.0"
