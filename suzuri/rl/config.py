"""What a run of reinforcement learning can be asked. No torch here."""

# pyright: strict

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

from tyro.conf import Suppress

from suzuri.config import document_of
from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Problems
from suzuri.envs.rollout import Limits
from suzuri.rl.algorithms.group import Algorithm
from suzuri.rl.algorithms.grpo import Grpo
from suzuri.rl.correction import Correction
from suzuri.rl.loop import Schedule
from suzuri.training.config import OptimizerConfig, TrainingConfig

MAX_SEED = 2**62

MakeProblems = Callable[[ChatPrompts], Problems]
"""Makes problems for one model, whose ids the prompts are in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Raises ValueError naming the field."""

    every: int = 10
    """Steps between evaluations; there is one before the first step and after the last, too."""

    size: int = 64
    """Problems, the first of the held-out ones."""

    samples: int = 1
    """Attempts at each: the score is their mean (avg@k)."""

    temperature: float = 0.0
    """0: the most likely answer."""

    def __post_init__(self) -> None:
        for name in ("every", "size", "samples"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a positive integer")
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature = {self.temperature!r}: must be from 0 to 100")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} at temperature 0 gives the same answer each time"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlConfig:
    """Let a model learn from what its answers are worth: `suzuri rl RECIPE`, a Python file that
    defines `config`. Fields on the command line replace those of the recipe.

    Exit code 0 at the end; 1 when the loss was no number, or weights did not arrive; 2 when the
    input cannot be used; 130 after Ctrl-C. The same command again goes on with the last saved
    state.
    """

    problems: Annotated[MakeProblems, Suppress]
    """In a recipe: what is practised."""

    eval_problems: Annotated[MakeProblems | None, Suppress] = None
    """In a recipe: what it is measured on."""

    algorithm: Annotated[Algorithm, Suppress] = dataclasses.field(default_factory=Grpo)
    """In a recipe: one of suzuri/rl/algorithms."""

    model: str = "inkling-nano"
    """A model folder or a hub id; a preset or config.json with --random-weights."""

    random_weights: bool = False
    """Take only the shape of the model and draw its weights."""

    seed: int = 0
    """Of what is drawn, the order of problems, and random weights."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights that sample and learn. Masters and moments are float32 in any case."""

    device: str = "cpu"
    """cpu, cuda or cuda:N."""

    steps: int = 100
    """Times that a batch is drawn, learned and published."""

    groups: int = 16
    """Problems of a step."""

    group_size: int = 8
    """Attempts at each."""

    minibatches: int = 1
    """Optimizer steps on a batch."""

    lag: int = 0
    """Steps by which the weights that draw may be behind those that learn. 0: a batch is drawn,
    learned and published before the next one begins."""

    skip_flat: bool = False
    """Draw more problems until `groups` of them say something (Yu et al., "DAPO", 2025: dynamic
    sampling), at most `most_rounds` times as many."""

    most_rounds: int = 4

    run_dir: str = "runs/rl"
    """Folder for config.json, metrics.jsonl, transcripts, states and weights."""

    limits: Limits = dataclasses.field(default_factory=Limits)
    """Of an attempt."""

    on_publish: Literal["finish", "continue", "restart"] = "finish"
    """With a lag: what becomes of answers that are under way when new weights come. finish: the
    weights wait. continue: answers go on, on new weights; every token keeps its version. restart:
    they begin anew."""

    correction: Correction = dataclasses.field(default_factory=Correction)
    """With a lag: what is done about tokens of older weights."""

    trainer: TrainingConfig = dataclasses.field(
        default_factory=lambda: TrainingConfig(skip_unweighted=True)
    )

    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-4, schedule="constant")
    )

    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)

    save_every: int = 10
    """Steps between saved states; there is one after the last step, too."""

    keep: int = 2
    """Saved states that are kept, the newest."""

    transcripts: int = 2
    """Problems of every step whose attempts are written out in full."""

    max_running: int = 64
    """Answers that are drawn at once."""

    memory_gb: float | None = None
    """Memory of the sampler, in GB (default: what is free)."""

    tensorboard: bool = False
    """Write RUN_DIR/tensorboard as well (needs the package tensorboard)."""

    wandb: str | None = None
    """Send the metrics to this project of Weights & Biases as well (needs the package wandb)."""

    def resolve(self) -> "RlConfig":
        """Checks fields against each other. Raises ValueError naming the field and the fix."""
        for name in ("save_every", "keep", "max_running"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a positive integer")
        _ = self.schedule
        if type(self.transcripts) is not int or self.transcripts < 0:
            raise ValueError(f"transcripts = {self.transcripts!r}: must be 0 or more")
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed = {self.seed!r}: must be from 0 to {MAX_SEED}")
        if not self.run_dir.strip():
            raise ValueError("run_dir is empty; give a folder")
        if self.limits.temperature == 0:
            raise ValueError(
                "limits.temperature = 0: attempts at a problem would all be the same; give 1, or "
                "what else is above 0"
            )
        return self

    @property
    def schedule(self) -> Schedule:
        """Raises ValueError naming the field."""
        return Schedule(
            steps=self.steps,
            groups=self.groups,
            group_size=self.group_size,
            minibatches=self.minibatches,
            lag=self.lag,
            skip_flat=self.skip_flat,
            most_rounds=self.most_rounds,
            seed=self.seed,
        )

    def document(self) -> dict[str, Any]:
        """All fields as JSON values; what a recipe made by what it calls itself."""
        return document_of(self, ("problems", "eval_problems", "algorithm"))
