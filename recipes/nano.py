"""inkling-nano from nothing, first stage: text, tools, pictures and sounds, on one H200.

    suzuri sft recipes/nano.py --run_dir=runs/nano   # again to go on
    suzuri sft recipes/nano.py --run_dir=runs/nano-cpu --device=cpu --data_workers=0 \\
        --steps=300 --batch_size=48 \\
        --optimizer.warmup=20 --trainer.token_budget=4096     # in small, on a CPU
    suzuri eval runs/nano/weights

The weights are complete and usable; nano_drafts.py then teaches the draft depths.
"""

from suzuri.envs.mixture import Mixture
from suzuri.training.config import OptimizerConfig, SftConfig, TrainingConfig

config = SftConfig(
    model="inkling-nano",
    random_weights=True,
    device="cuda",
    dataset=Mixture(start=(0.0, 0.4), end=(0.0, 1.0), ramp=600_000),
    eval_dataset=Mixture(split="held_out"),
    eval_size=512,
    run_dir="runs/nano",
    steps=2000,
    batch_size=1024,
    data_workers=10,
    eval_every=500,
    save_every=250,
    trainer=TrainingConfig(
        token_budget=131_072,
        bias_rate=0.001,
        skip_unweighted=True,
    ),
    optimizer=OptimizerConfig(
        learning_rate=3e-3,
        warmup=200,
        final_fraction=0.02,
        weight_decay=0.05,
        eps=1e-10,
    ),
)
