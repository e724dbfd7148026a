"""RL on two CPU cores: the small model learns to answer questions on pictures of shapes.

suzuri rl recipes/nano_pictures.py --run_dir=runs/pictures --steps=20   # again to go on
suzuri plot runs/pictures --out pictures.png
"""

import functools

from suzuri.envs.mixture import Mixture
from suzuri.envs.rollout import Limits
from suzuri.envs.task_env import TaskProblems
from suzuri.rl.algorithms.grpo import dapo
from suzuri.rl.config import EvaluationConfig, RlConfig
from suzuri.training.config import OptimizerConfig

WEIGHTS = {"pictures/where": 1.0, "pictures/count_of": 1.0, "pictures/at": 1.0}

config = RlConfig(
    problems=functools.partial(TaskProblems, Mixture(weights=WEIGHTS)),
    eval_problems=functools.partial(TaskProblems, Mixture(weights=WEIGHTS, split="held_out")),
    algorithm=dapo(),
    steps=24,
    groups=16,
    group_size=8,
    limits=Limits(max_tokens=128),
    evaluation=EvaluationConfig(every=8, size=64, samples=2, temperature=1.0),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup=3, schedule="cosine"),
    run_dir="runs/pictures",
)
