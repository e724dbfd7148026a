"""RL on two CPU cores: the small model learns to think before it reckons.

No effort is given, so nano thinks about half of these problems only, and gets about half of them
right: longer ones it cannot do at a glance. What is rewarded is the right answer alone.

    suzuri rl recipes/nano_arithmetic.py --run_dir=runs/arithmetic --steps=20   # again to go on
    suzuri plot runs/arithmetic --out arithmetic.png
"""

import functools

from suzuri.envs.mixture import Mixture
from suzuri.envs.rollout import Limits
from suzuri.envs.task import Split
from suzuri.envs.task_env import TaskProblems
from suzuri.rl.algorithms.grpo import dapo
from suzuri.rl.config import EvaluationConfig, RlConfig
from suzuri.training.config import OptimizerConfig

KINDS = ("add3", "subtract3", "two_steps", "negative")
WEIGHTS = {f"arithmetic/{kind}": 1.0 for kind in KINDS}


def problems_of(split: Split) -> functools.partial[TaskProblems]:
    return functools.partial(TaskProblems, Mixture(weights=WEIGHTS, split=split), open_effort=True)


config = RlConfig(
    problems=problems_of("train"),
    eval_problems=problems_of("held_out"),
    algorithm=dapo(),
    steps=24,
    groups=16,
    group_size=8,
    limits=Limits(max_tokens=160),
    evaluation=EvaluationConfig(every=8, size=64, samples=2, temperature=1.0),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup=3, schedule="cosine"),
    run_dir="runs/arithmetic",
)
