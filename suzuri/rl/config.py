"""What a run of reinforcement learning can be asked. No torch here."""

# pyright: strict

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

from tyro.conf import Suppress

from suzuri.config import document_of
from suzuri.engine.messages import OnPublish
from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Problems
from suzuri.envs.rollout import Limits
from suzuri.model.presets import DEFAULT_MODEL
from suzuri.rl.algorithms.group import Algorithm
from suzuri.rl.algorithms.grpo import Grpo
from suzuri.rl.correction import Correction
from suzuri.training.config import OptimizerConfig, TrainingConfig

MAX_SEED = 2**62
COUNTS = (
    *("steps", "groups", "group_size", "minibatches", "most_rounds"),
    *("save_every", "keep", "max_running"),
)
SCORES = {
    "teacher": "it is for Distillation()",
    "reference": "it is for a kl_coefficient above 0",
}
"""Other models that can say something of every token, and what for."""

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
class DebugConfig:
    """One half of a run without the other, to find out which is at fault. Raises ValueError naming
    the field."""

    only: Literal["all", "rollouts", "training"] = "all"
    """rollouts: every batch is drawn and saved, nothing is learned. training: batches are those
    that `rollouts` has, nothing is drawn."""

    rollouts: str | None = None
    """A run's folder whose saved batches are learned from (default, with replay: RUN_DIR)."""

    replay: int | None = None
    """Learn once more what step so-and-so of RUN_DIR learned, from the last state before it and
    the saved batches since, and compare the metrics. Nothing is written. Exit code 0 where all are
    the same to the bit, else 1."""

    def __post_init__(self) -> None:
        if self.only not in ("all", "rollouts", "training"):
            raise ValueError(f"debug.only = {self.only!r}: must be all, rollouts or training")
        if self.replay is not None and (type(self.replay) is not int or self.replay < 1):
            raise ValueError(f"debug.replay = {self.replay!r}: must be a step, 1 or more")
        if self.replay is not None and self.only != "all":
            raise ValueError(f"debug.replay goes without debug.only = {self.only}; leave one out")
        if self.only == "training" and self.rollouts is None:
            raise ValueError("debug.only = training needs debug.rollouts, the folder of a run")
        if self.rollouts is not None and self.only != "training" and self.replay is None:
            raise ValueError("debug.rollouts is for debug.only = training and debug.replay")


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

    teacher: str | None = None
    """For `Distillation`, who says how likely every drawn token is: a model folder, a hub id, or
    the URL of a running server."""

    reference: str | None = None
    """For a `kl_coefficient`, from whom the model is not to go far away; as `teacher`."""

    model: str = DEFAULT_MODEL
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

    sampler: str = "local"
    """Who draws: an engine in this process, or the URL of a `suzuri serve` that was started with
    --allow-weight-updates."""

    sampler_key_file: str | None = None
    """File with the API key of that server."""

    sampler_folder: str | None = None
    """Folder in which weights are handed to that server, which must see it under the same name
    (default: memory where there is room, else below RUN_DIR)."""

    on_publish: OnPublish = "finish"
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

    save_rollouts: int = 0
    """Steps between batches that are saved in RUN_DIR/rollouts, with all that was drawn and judged;
    0: none."""

    transcripts: int = 2
    """Problems of every step whose attempts are written out in full."""

    max_running: int = 64
    """Answers that are drawn at once."""

    memory_gb: float | None = None
    """Memory of the sampler, in GB (default: what is free)."""

    debug: DebugConfig = dataclasses.field(default_factory=DebugConfig)

    tensorboard: bool = False
    """Write RUN_DIR/tensorboard as well (needs the package tensorboard)."""

    wandb: str | None = None
    """Send the metrics to this project of Weights & Biases as well (needs the package wandb)."""

    def resolve(self) -> "RlConfig":
        """Checks fields against each other. Raises ValueError naming the field and the fix."""
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a positive integer")
        for name in ("lag", "transcripts", "save_rollouts"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} = {value!r}: must be 0 or more")
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed = {self.seed!r}: must be from 0 to {MAX_SEED}")
        if self.sampler != "local" and not self.sampler.startswith(("http://", "https://")):
            raise ValueError(
                f"sampler = {self.sampler!r}: must be local, or the URL of a server (http://...)"
            )
        if not self.run_dir.strip():
            raise ValueError("run_dir is empty; give a folder")
        if self.limits.temperature == 0:
            raise ValueError(
                "limits.temperature = 0: attempts at a problem would all be the same; give 1, or "
                "what else is above 0"
            )
        self._check_scores()
        return self

    def _check_scores(self) -> None:
        needs = set(self.algorithm.needs)
        if unknown := sorted(needs - set(SCORES)):
            raise ValueError(
                f"algorithm: it needs scores of a {unknown[0]}, which this command has none of; "
                "write a loop of your own"
            )
        for who, why in SCORES.items():
            given = getattr(self, who)
            if who in needs and not given:
                raise ValueError(f"{who}: the algorithm needs one; give a model folder or a URL")
            if given and who not in needs:
                raise ValueError(f"{who} = {given!r}: the algorithm asks for none; {why}")
        if needs and self.limits.temperature != 1:
            raise ValueError(
                f"limits.temperature = {self.limits.temperature}: a {min(needs)} says how likely "
                "tokens are at temperature 1; give 1"
            )

    def document(self) -> dict[str, Any]:
        """All fields as JSON values; what a recipe made by what it calls itself."""
        return document_of(self, ("problems", "eval_problems", "algorithm"))
