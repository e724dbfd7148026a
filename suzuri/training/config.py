"""How a trainer is set up. No torch here."""

# pyright: strict

import dataclasses
import math
from typing import Annotated, Any, Literal

from tyro.conf import Suppress

from suzuri.config import document_of
from suzuri.model.presets import DEFAULT_MODEL
from suzuri.types import AdamParams, Dataset, is_number

MAX_SEED = 2**62
MAX_COUNT = 2**31
FREE_FIELDS = frozenset(
    {"run_dir", "train", "eval", "steps", "eval_every", "save_every", "keep"}
    | {"tensorboard", "wandb", "data_workers", "save_rollouts"}
    | {"sampler", "sampler_key_file", "sampler_folder"}
)
"""Fields that may change when a run goes on. Of files their content is compared; what draws for RL
has the same bits wherever it runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Packing, memory, and what is trained."""

    token_budget: int = 8192
    """Tokens of a micro-batch; a longer sample is one of its own."""

    max_tokens: int | None = None
    """Longest sample (default: the model's context)."""

    recompute: bool = False
    """Keep a layer's input only, and run the layer again in the backward pass: the same bits, less
    memory, a third more time."""

    frozen: tuple[str, ...] = ()
    """Patterns (as of file names: *.attn.*) of parameters that stay as they are."""

    draft_loss_weight: float = 0.0
    """Weight of the draft depths' own cross-entropy (the mean over depths) beside that of the
    trunk; 0 leaves them alone."""

    draft_detached: bool = True
    """Draft depths learn from the trunk's hidden rows and do not change the trunk."""

    bias_rate: float = 0.0
    """Step of the router's selection bias after an optimizer step: up for experts with less than
    the mean load, down for those with more (Wang et al., "Auxiliary-loss-free load balancing",
    2024); 0 leaves it."""

    skip_unweighted: bool = False
    """Rows whose weight is 0 pass no head: their log-probs come back as NaN."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field."""
        for name in ("token_budget", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} = {value!r}: must be a positive integer")
        for name in ("draft_loss_weight", "bias_rate"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise ValueError(f"{name} = {value!r}: must be a number, not negative")
        if isinstance(self.frozen, str):
            raise ValueError(f"frozen = {self.frozen!r}: give a list of patterns")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) and its learning rate over
    time."""

    learning_rate: float = 1e-4
    """The greatest, after the warmup."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How it falls from the end of the warmup to the last step."""

    warmup: int = 0
    """Steps in which it rises from 0 in a line."""

    final_fraction: float = 0.1
    """What linear and cosine leave of it at the last step."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0

    grad_clip_norm: float = 1.0
    """Largest norm of all gradients together; 0: any."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field."""
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule = {self.schedule!r}: must be constant, linear or cosine")
        if type(self.warmup) is not int or not 0 <= self.warmup <= MAX_COUNT:
            raise ValueError(f"warmup = {self.warmup!r}: must be a number of steps, 0 or more")
        self._adam(self.learning_rate)  # which checks the rest
        if not is_number(self.final_fraction) or not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction = {self.final_fraction!r}: must be from 0 to 1")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step `step`, from 1 to `steps`."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        peak = max(self.warmup, 1)  # so that a run of one step takes all of it
        way = min((step - peak) / max(steps - peak, 1), 1.0)
        left = 1 - way if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * way))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * left)

    def params(self, step: int, steps: int) -> AdamParams:
        """What `optim_step` is given at step `step` of `steps`."""
        return self._adam(self.rate(step, steps))

    def _adam(self, learning_rate: float) -> AdamParams:
        return AdamParams(
            learning_rate=learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Train a model on conversations or plain text: `suzuri sft RECIPE`, a Python file that defines
    `config`, or without a recipe. Fields on the command line replace those of the recipe.

    Exit code 0 at the end; 1 when it stopped half-way (a loss that is no number, a full disk, a
    data worker that died); 2 when the input cannot be used; 130 after Ctrl-C. The same command
    again goes on with the last saved state.
    """

    model: str = DEFAULT_MODEL
    """A model folder or a hub id; a preset or config.json with --random-weights."""

    random_weights: bool = False
    """Take only the shape of the model and draw its weights."""

    seed: int = 0
    """Of the order of the data, and of random weights."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the model copy. Masters and moments are float32 in any case."""

    device: str = "cpu"
    """cpu, cuda or cuda:N."""

    train: tuple[str, ...] = ()
    """JSONL files to learn from (docs/training.md)."""

    eval: tuple[str, ...] = ()
    """JSONL files to evaluate on during the run."""

    dataset: Annotated[Dataset | None, Suppress] = None
    """In a recipe, in place of `train`: any `Dataset` (types.py)."""

    eval_dataset: Annotated[Dataset | None, Suppress] = None
    """In a recipe, in place of `eval`."""

    run_dir: str = "runs/sft"
    """Folder for config.json, metrics.jsonl, states and weights."""

    steps: int | None = None
    """Optimizer steps (default: what `epochs` takes)."""

    epochs: int = 1
    """Times that the data are gone through, without `steps`."""

    batch_size: int = 16
    """Conversations per step."""

    batch_tokens: int | None = None
    """In place of batch_size: as many conversations per step as fit into so many tokens."""

    data_workers: int = 0
    """Processes that render ahead (0: a thread). Worth it where a step takes less time than
    rendering its conversations, as on a GPU."""

    trainer: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)

    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    eval_every: int = 100
    """Steps between evaluations; there is one after the last step, too."""

    eval_size: int | None = None
    """Conversations of an evaluation, from the front (default: all)."""

    save_every: int = 500
    """Steps between saved states; there is one after the last step, too."""

    keep: int = 2
    """Saved states that are kept, the newest."""

    skip_bad: bool = False
    """Leave out what cannot be learned from and count it, in place of refusing it."""

    tensorboard: bool = False
    """Write RUN_DIR/tensorboard as well (needs the package tensorboard)."""

    wandb: str | None = None
    """Send the metrics to this project of Weights & Biases as well (needs the package wandb)."""

    def resolve(self) -> "SftConfig":
        """Checks fields against each other. Raises ValueError naming the field and the fix."""
        for name in ("steps", "epochs", "batch_size", "batch_tokens", "eval_every", "eval_size"):
            _check_count(name, getattr(self, name))
        for name in ("save_every", "keep"):
            _check_count(name, getattr(self, name))
        if type(self.data_workers) is not int or not 0 <= self.data_workers <= 256:
            raise ValueError(f"data_workers = {self.data_workers!r}: must be from 0 to 256")
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed = {self.seed!r}: must be from 0 to {MAX_SEED}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype = {self.dtype!r}: must be bfloat16 or float32")
        if not self.run_dir.strip():
            raise ValueError("run_dir is empty; give a folder")
        if self.wandb is not None and not self.wandb.strip():
            raise ValueError("wandb is empty; give the name of a project")
        for name, other in (("train", "dataset"), ("eval", "eval_dataset")):
            files = getattr(self, name)
            if isinstance(files, str) or not all(isinstance(file, str) for file in files):
                raise ValueError(f"{name} = {files!r}: give a list of files")
            if files and getattr(self, other) is not None:
                raise ValueError(f"both {name} and {other} are given; give one")
        if not self.train and self.dataset is None:
            raise ValueError("nothing to learn from: give --train FILE.jsonl or a recipe")
        if self.dataset is not None and self.dataset.size is None:
            if self.steps is None:
                raise ValueError("the data set has no end: give steps")
            if self.batch_tokens is not None:
                raise ValueError("batch_tokens needs a data set with an end; give batch_size")
        endless = self.eval_dataset is not None and self.eval_dataset.size is None
        if endless and self.eval_size is None:
            raise ValueError("the data set of the evaluation has no end: give eval_size")
        return self

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.eval) or self.eval_dataset is not None

    def document(self) -> dict[str, Any]:
        """All fields as JSON values; data sets by what they call themselves."""
        return document_of(self, ("dataset", "eval_dataset"))


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= MAX_COUNT):
        raise ValueError(f"{name} = {value!r}: must be from 1 to {MAX_COUNT}")
