"""RL on two CPU cores: the small model learns to name all it sees, however it is asked.

Asked in words that it was not taught, nano says the shape alone, the colour alone, or a number, as
often as all of it. What is rewarded is each shape with its colour.

    suzuri rl recipes/nano_pictures.py --run_dir=runs/pictures --steps=20   # again to go on
    suzuri plot runs/pictures --out pictures.png
"""

import functools

from suzuri.envs.picture_names import PictureNames
from suzuri.envs.rollout import Limits
from suzuri.envs.task_env import TaskProblems
from suzuri.rl.algorithms.grpo import dapo
from suzuri.rl.config import EvaluationConfig, RlConfig
from suzuri.training.config import OptimizerConfig

config = RlConfig(
    problems=functools.partial(TaskProblems, PictureNames()),
    eval_problems=functools.partial(TaskProblems, PictureNames(split="held_out")),
    algorithm=dapo(),
    steps=24,
    groups=16,
    group_size=8,
    limits=Limits(max_tokens=48),
    evaluation=EvaluationConfig(every=8, size=64, samples=2, temperature=1.0),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup=3, schedule="cosine"),
    run_dir="runs/pictures",
)
