"""RL on two CPU cores: the small model learns to ask a calculator and to say what it answered.

    suzuri rl recipes/nano_tools.py --run_dir=runs/tools --steps=20   # again to go on
    suzuri plot runs/tools --out tools.png

The calculator really runs. The prompt of each turn is the one before, what was drawn, and what the
tool said, so a conversation is one sample. ToolSums has harder kinds, with a second tool; nano gets
none of those right, and learns nothing from them.
"""

import functools

from suzuri.envs.rollout import Limits
from suzuri.envs.tool_sums import ToolSumProblems, ToolSums
from suzuri.rl.algorithms.grpo import dapo
from suzuri.rl.config import EvaluationConfig, RlConfig
from suzuri.training.config import OptimizerConfig

VARIANTS = ("product",)

config = RlConfig(
    problems=functools.partial(ToolSumProblems, ToolSums(variants=VARIANTS)),
    eval_problems=functools.partial(ToolSumProblems, ToolSums(variants=VARIANTS, split="held_out")),
    algorithm=dapo(),
    steps=24,
    groups=16,
    group_size=8,
    limits=Limits(max_tokens=96, max_turns=4),
    evaluation=EvaluationConfig(every=8, size=64, samples=2, temperature=1.0),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup=3, schedule="cosine"),
    run_dir="runs/tools",
)
