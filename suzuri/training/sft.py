"""`suzuri sft`: learning from conversations and texts. Read `run_sft`, then `_Run`.

What a step does follows from its number and the state before it alone, so a run that was killed
goes on with the bits that it would have had.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import sys
import time
from concurrent.futures import BrokenExecutor
from typing import Any

from rich.console import Console

import suzuri
from suzuri.interrupts import STOPPED, asked_to_stop
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import vocabulary_of
from suzuri.training.batches import LOSS, Batches, Holdout
from suzuri.training.config import SftConfig
from suzuri.training.data import Checked, SampleMaker, check_data
from suzuri.training.data_workers import DataWorkers
from suzuri.training.initial import find_model
from suzuri.training.jsonl import JsonlData
from suzuri.training.keeping import Keeper, start_trainer
from suzuri.training.run_dir import RunDir
from suzuri.training.trainer import LocalTrainer
from suzuri.training.viewers import Display, Viewers, check_viewers
from suzuri.types import Dataset

STOPPING = "finishing the step and saving"


def run_sft(config: SftConfig) -> int:
    """Trains to the end or an interrupt, from the start or the newest state. Returns the exit code.

    Raises ValueError or OSError, before a weight is read, for what cannot be used.
    """
    check_viewers(config)
    display = Display(Console(stderr=True))
    shape, checkpoint = find_model(config.model, random_weights=config.random_weights)
    tokenizer = Tokenizer()
    vocabulary = vocabulary_of(shape.kept_vocabulary, tokenizer.token_bytes)
    most = shape.text.model_max_length
    longest = min(config.trainer.max_tokens or most, most)
    maker = SampleMaker(tokenizer, shape, vocabulary, longest)
    train = config.dataset or JsonlData(config.train)
    evaluation = config.eval_dataset or (JsonlData(config.eval) if config.eval else None)
    document = {
        "suzuri": suzuri.__version__,
        "config": config.document(),
        "data": {"train": _identity(train), "eval": _identity(evaluation)},
    }
    with RunDir(config.run_dir) as folder:
        folder.compare(document)
        checked = _check(config, train, maker, display, "training data")
        held = None
        if evaluation is not None:
            held = _check(config, evaluation, maker, display, "evaluation data", config.eval_size)
        step = folder.start(document)
        trainer = start_trainer(
            shape,
            checkpoint,
            vocabulary,
            config.trainer,
            folder,
            step,
            dtype=config.dtype,
            device=config.device,
            seed=config.seed,
        )
        if step:
            display.say(f"going on after step {step} of {folder.path}")
        workers = None
        if config.data_workers:
            workers = DataWorkers(
                config.data_workers, train, shape, longest, skip_bad=config.skip_bad
            )
        batches = Batches(config, train, maker, checked, workers)
        holdout = None if evaluation is None else Holdout(evaluation, maker, held)
        viewers = Viewers(config, folder.path, step)
        try:
            return _Run(config, trainer, folder, batches, holdout, viewers, display).run(step)
        finally:
            viewers.close()


def _identity(dataset: Dataset | None) -> str | None:
    """What must be the same for a run to go on; other data sets are named by the config."""
    return dataset.digest if isinstance(dataset, JsonlData) else None


def _check(
    config: SftConfig,
    dataset: Dataset,
    maker: SampleMaker,
    display: Display,
    what: str,
    most: int | None = None,
) -> Checked | None:
    """None for a data set without end of which all is meant."""
    total = dataset.size if most is None else min(most, dataset.size or most)
    if total is None:
        return None
    with display.bar(f"reading the {what}", total):
        checked = check_data(dataset, maker, most=most, progress=lambda done, _: display.show(done))
    if not config.skip_bad:
        checked.refuse_bad()
    if checked.num_bad:
        display.say(f"{what}: {checked.num_bad} of {total} left out, {checked.faults[0]}, ...")
    return checked


class _Run:
    def __init__(
        self,
        config: SftConfig,
        trainer: LocalTrainer,
        folder: RunDir,
        batches: Batches,
        holdout: Holdout | None,
        viewers: Viewers,
        display: Display,
    ) -> None:
        self._config, self._trainer, self._folder = config, trainer, folder
        self._batches, self._holdout = batches, holdout
        self._viewers, self._display = viewers, display
        self._keeper = Keeper(trainer, folder, config.keep)
        self._losses: list[float] = []

    def run(self, first: int) -> int:
        """Steps after `first` up to the last. Returns the exit code."""
        steps, step = self._batches.steps, first
        if first > steps:
            raise ValueError(
                f"steps = {steps}: {self._folder.path} has come to step {first} already; give more "
                "steps, or another run_dir"
            )
        try:
            with asked_to_stop(STOPPING) as interrupt, self._display.bar("training", steps, first):
                while step < steps and not interrupt.asked:
                    try:
                        self._one(step + 1, steps)
                    except BrokenExecutor:
                        if not interrupt.asked:
                            raise
                        break  # whoever asked has ended the workers too
                    step += 1
                self._keeper.save(step)
                self._keeper.finish()
        except BrokenExecutor:
            return self._failed(
                step,
                "a data worker died, perhaps for want of memory; give fewer data_workers",
            )
        except (FloatingPointError, OSError) as error:
            return self._failed(step, str(error))
        except ValueError:
            self._trainer.finish()
            raise
        finally:
            self._batches.close()
        if step < steps:
            print(
                f"stopped after step {step} of {steps}; the same command again "
                f"{self._keeper.next()}"
            )
            return STOPPED
        try:
            return self._end(step)
        except OSError as error:
            return self._failed(step, f"the weights could not be written ({error})")

    def _failed(self, step: int, reason: str) -> int:
        """Says why it stops after `step` steps."""
        last = min(step + 1, self._batches.steps)
        print(f"suzuri sft: step {last}: {self._keeper.after(reason)}", file=sys.stderr)
        return 1

    def _one(self, step: int, steps: int) -> None:
        line = self._step(step, steps)
        self._write(line)
        is_last = step == steps
        loss = line["train/loss"]
        self._losses.append(loss)
        self._display.show(
            step,
            f"loss {loss:.4f} lr {line['optim/learning_rate']:.2e} "
            f"{line['time/tokens_per_s']:,.0f} tokens/s",
            always=is_last or len(self._losses) == 1,
        )
        if self._holdout is not None and (is_last or step % self._config.eval_every == 0):
            self._evaluate(step, self._holdout)
        if step % self._config.save_every == 0:
            self._keeper.save(step)

    def _step(self, step: int, steps: int) -> dict[str, Any]:
        start = time.perf_counter()
        batch = self._batches.batch(step)
        waited = time.perf_counter() - start
        output = self._trainer.forward_backward(batch.samples, LOSS)
        params = self._config.optimizer.params(step, steps)
        optim = self._trainer.optim_step(params)
        seconds = time.perf_counter() - start
        num_tokens = sum(sample.num_tokens for sample in batch.samples)
        line: dict[str, Any] = {
            "step": step,
            "train/loss": output.loss_sum / output.weight_sum,
            "optim/learning_rate": params.learning_rate,
            **{f"optim/{name}": value for name, value in optim.items()},
            "data/tokens": num_tokens,
            "data/weight": output.weight_sum,
            "data/samples": len(batch.samples),
        }
        if (draft := output.metrics.get("draft_loss:sum")) is not None:
            weight = self._config.trainer.draft_loss_weight * output.weight_sum
            line["train/draft_loss"] = draft / weight
        if (epoch := self._batches.epoch(step)) is not None:
            line["data/epoch"] = epoch
        if self._config.skip_bad:
            line["data/skipped"] = self._batches.num_bad + batch.num_skipped
        for name, value in output.metrics.items():
            if name.startswith("e_"):
                line[f"experts/{name}"] = value
        line["time/seconds"] = seconds
        line["time/data_seconds"] = waited
        line["time/tokens_per_s"] = num_tokens / seconds
        return line

    def _evaluate(self, step: int, holdout: Holdout) -> None:
        start = time.perf_counter()
        loss, weight = holdout.loss(self._trainer, self._config.batch_size)
        seconds = time.perf_counter() - start
        self._write(
            {"step": step, "eval/loss": loss, "eval/weight": weight, "time/eval_seconds": seconds}
        )
        self._display.say(f"step {step}: evaluation loss {loss:.4f}")

    def _write(self, line: dict[str, Any]) -> None:
        self._folder.write(line)
        self._viewers.write(line)

    def _end(self, step: int) -> int:
        self._keeper.end(step)
        change = f", loss {self._losses[0]:.4f} to {self._losses[-1]:.4f}" if self._losses else ""
        print(f"{step} steps done{change}; weights in {self._folder.weights}")
        return 0
