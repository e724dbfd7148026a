"""Training on one device: five verbs over packed samples.

Reading order: trainer.py (the verbs), packing.py, replay.py, losses.py, optimizer.py,
checkpoint.py; sft.py runs them over a data set. Public: `LocalTrainer`, `TrainingConfig`, the names
of losses.LOSSES.
"""
