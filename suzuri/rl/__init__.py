"""Reinforcement learning: a sampler plays, an algorithm judges, a trainer learns.

Reading order: algorithms/group.py, algorithms/grpo.py, samples.py, drawing.py, learning.py,
loop.py. Public: `RlConfig`, `run_rl`, `history.check`, and for recipes the algorithms.
"""
