"""Sixty-four short chats by heart: the smallest run that shows every part of `suzuri sft`.

    suzuri sft recipes/sft_chat.py --run_dir=runs/chat
    suzuri plot runs/chat --out chat.png

A tiny model starts from random weights, on a CPU, in about a minute. For data of your own, replace
`train`; for a model that can already speak, `model` and `random_weights`.
"""

from pathlib import Path

from suzuri.training.config import OptimizerConfig, SftConfig, TrainingConfig

CHATS = str(Path(__file__).parent / "data" / "chats.jsonl")

config = SftConfig(
    model="tiny",
    random_weights=True,
    dtype="float32",
    train=(CHATS,),
    eval=(CHATS,),
    run_dir="runs/sft_chat",
    steps=150,
    batch_size=16,
    eval_every=50,
    save_every=50,
    trainer=TrainingConfig(token_budget=4096, bias_rate=0.01),
    optimizer=OptimizerConfig(learning_rate=2e-2, schedule="cosine", warmup=5),
)
