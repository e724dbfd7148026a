"""inkling-nano, third stage: what the first two had too little of, beside everything else.

Shapes that fill a picture, wherever they are (there were so few such scenes that some colours were
taken to exclude some shapes), and answers with and without thoughts where no effort is given, from
which RL starts. A quarter of an hour on two CPU cores; the draft depths learn on.

    suzuri sft recipes/nano_last.py --run_dir=runs/nano-last    # after nano_drafts.py
    suzuri eval runs/nano-last/weights --drafts
"""

from suzuri.envs.mixture import NANO_WEIGHTS, Mixture
from suzuri.training.config import OptimizerConfig, SftConfig, TrainingConfig

WEIGHTS = NANO_WEIGHTS | {"pictures/shape": 24.0, "pictures/colour": 6.0}

config = SftConfig(
    model="runs/nano-drafts/weights",
    device="cpu",
    dataset=Mixture(weights=WEIGHTS, seed=2, start=(0.2, 1.0), end=(0.2, 1.0)),
    eval_dataset=Mixture(split="held_out"),
    eval_size=256,
    run_dir="runs/nano-last",
    steps=400,
    batch_size=48,
    data_workers=1,
    eval_every=200,
    save_every=100,
    trainer=TrainingConfig(
        token_budget=4096,
        draft_loss_weight=1.0,
        skip_unweighted=True,
    ),
    optimizer=OptimizerConfig(
        learning_rate=4e-4,
        warmup=20,
        final_fraction=0.02,
        weight_decay=0.05,
        eps=1e-10,
    ),
)
