"""RL on two CPU cores: the small model learns to ask its tools, one after the other.

suzuri rl recipes/nano_tools.py --run_dir=runs/tools --steps=20   # again to go on
suzuri plot runs/tools --out tools.png

Prices are to be looked up and sums to be reckoned by tools that run; a bill takes a price, then a
sum, then the answer. The prompt of each turn is the one before, what was drawn, and what the tools
said, so a conversation is one sample.
"""

import functools

from suzuri.envs.rollout import Limits
from suzuri.envs.tool_sums import ToolSumProblems, ToolSums
from suzuri.rl.algorithms.grpo import dapo
from suzuri.rl.config import EvaluationConfig, RlConfig
from suzuri.training.config import OptimizerConfig

config = RlConfig(
    problems=functools.partial(ToolSumProblems, ToolSums()),
    eval_problems=functools.partial(ToolSumProblems, ToolSums(split="held_out")),
    algorithm=dapo(),
    steps=40,
    groups=16,
    group_size=8,
    limits=Limits(max_tokens=96, max_turns=4),
    evaluation=EvaluationConfig(every=10, size=64),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup=5, schedule="constant"),
    run_dir="runs/tools",
)
