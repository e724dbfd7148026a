"""inkling-nano, second stage: the draft depths learn to guess what the finished model says.

suzuri sft recipes/nano_drafts.py --run_dir=runs/nano-drafts   # after nano.py; again to go on
suzuri eval runs/nano-drafts/weights --drafts
"""

from suzuri.envs.mixture import Mixture
from suzuri.training.config import OptimizerConfig, SftConfig, TrainingConfig

config = SftConfig(
    model="runs/nano/weights",
    device="cuda",
    dataset=Mixture(seed=1),
    eval_dataset=Mixture(split="held_out"),
    eval_size=512,
    run_dir="runs/nano-drafts",
    steps=250,
    batch_size=512,
    data_workers=10,
    eval_every=125,
    save_every=250,
    trainer=TrainingConfig(
        token_budget=131_072,
        draft_loss_weight=1.0,
        skip_unweighted=True,
        frozen=("decoder.*", "vision.*", "audio.*"),
    ),
    optimizer=OptimizerConfig(
        learning_rate=3e-3,
        warmup=30,
        final_fraction=0.02,
        weight_decay=0.05,
        eps=1e-10,
    ),
)
