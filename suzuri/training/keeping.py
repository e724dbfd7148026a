"""How a run starts, and what it leaves: its trainer, states on the way, weights at the end."""

import torch

from suzuri.model.checkpoint_files import Checkpoint
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import PARTS, Inkling
from suzuri.processing.vocabulary import Vocabulary
from suzuri.training.checkpoint import sampler_hash
from suzuri.training.config import TrainingConfig
from suzuri.training.initial import fill_model
from suzuri.training.run_dir import RunDir
from suzuri.training.trainer import LocalTrainer


def start_trainer(
    shape: ModelConfig,
    checkpoint: Checkpoint | None,
    vocabulary: Vocabulary,
    config: TrainingConfig,
    folder: RunDir,
    first: int,
    *,
    dtype: str,
    device: str,
    seed: int,
) -> LocalTrainer:
    """A trainer after step `first` of a run: from its state there, or at 0 with the checkpoint's
    weights, or weights drawn from `seed` where there is none."""
    model = Inkling(
        shape, dtype=getattr(torch, dtype), device=device, parts=PARTS, dequantized=True
    )
    if not first:
        fill_model(model, checkpoint, seed)
    trainer = LocalTrainer(model, config, vocabulary)
    if first:
        trainer.load_state(folder.state(first))
    return trainer


class Keeper:
    """Saves a trainer's states into a run's folder, the newest `keep` of them."""

    def __init__(self, trainer: LocalTrainer, folder: RunDir, keep: int) -> None:
        self._trainer, self._folder, self._keep = trainer, folder, keep
        self._saved = max(folder.states(), default=0)

    def save(self, step: int) -> None:
        """Begins to write the state, when the one before is there and older ones are gone."""
        if step == self._saved:
            return
        self._trainer.finish()
        self._folder.prune(self._keep)
        self._trainer.save_state(self._folder.state(step), wait=False)
        self._saved = step

    def finish(self) -> None:
        """Returns when all is written that shall be there. OSError where it could not be."""
        self._trainer.finish()
        self._folder.prune(self._keep)

    def end(self, step: int) -> None:
        """Publishes the weights of the last step."""
        self._folder.prune(self._keep)
        if not self._folder.has_weights_of(step):
            digest = self._trainer.publish_weights(self._folder.new_weights)
            self._folder.publish(step, digest, sampler_hash(self._trainer.model))

    def after(self, reason: str) -> str:
        """`reason`, with what went wrong with states that were being written meanwhile, and what
        there is to go on from."""
        try:
            self._trainer.finish()
        except OSError as error:
            reason = f"{reason}; {error}"
        states = self._folder.states()
        if not states:
            return f"{reason}. No state was saved in {self._folder.path}"
        return f"{reason}. The last state is {self._folder.state(states[-1])}"

    def next(self) -> str:
        """What the same command will do."""
        states = self._folder.states()
        return f"goes on from {self._folder.state(states[-1])}" if states else "starts anew"
