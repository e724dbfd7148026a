"""`LocalTrainer`: the five verbs on one device. Read `forward_backward` and `optim_step` first.

The model is the one that the engine runs, op for op; a gradient is recorded beside it. So the
log-probs that come back are, bit for bit, those with which the engine would sample.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from suzuri.kernels.exact import at_least_fp32
from suzuri.kernels.token_logprobs import token_logprobs, token_logprobs_and_entropy
from suzuri.model.inkling import Inkling
from suzuri.processing.vocabulary import Vocabulary
from suzuri.training import checkpoint, losses
from suzuri.training.config import TrainingConfig
from suzuri.training.draft_loss import draft_loss
from suzuri.training.expert_loads import ExpertLoads
from suzuri.training.losses import Loss, LossConfig, Rows
from suzuri.training.optimizer import Optimizer, freeze
from suzuri.training.packing import MicroBatch, Prepared, Rules, build, groups_of, prepare
from suzuri.training.parallelize import recompute_layers
from suzuri.types import AdamParams, Array, ForwardOutput, Sample

Settings = Mapping[str, float | str]


class LocalTrainer:
    """A `Trainer` (types.py) over a model on one device.

    Gradients add up from call to call until `optim_step`, whatever the packing; sums over samples
    are in their order within a micro-batch. Not safe for several threads.
    """

    def __init__(self, model: Inkling, config: TrainingConfig, vocabulary: Vocabulary) -> None:
        self.model, self.config, self.vocabulary = model, config, vocabulary
        self.device = model.decoder.norm.weight.device
        self.dtype = at_least_fp32(model.decoder.norm.weight.dtype)
        if config.draft_loss_weight and model.draft is None:
            raise ValueError(
                f"draft_loss_weight = {config.draft_loss_weight}: this model has no draft depths"
            )
        self.trained = freeze(model, config.frozen)
        self.optimizer = Optimizer(model.named_parameters())
        self.loads = ExpertLoads(model, config.frozen)
        towers = {"image": model.vision, "audio": model.audio}
        self._towers = {kind: tower for kind, tower in towers.items() if tower is not None}
        self._saver = checkpoint.Saver()
        self.num_steps = 0
        self.weight_sum = 0.0
        """Of the samples whose gradients are pending."""
        if config.recompute:
            recompute_layers(model)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sample."""
        most = self.model.config.text.model_max_length
        return min(self.config.max_tokens or most, most)

    def forward(
        self, samples: Sequence[Sample], loss: str, config: Settings | None = None
    ) -> ForwardOutput:
        """Loss and log-probs; nothing is changed."""
        with torch.no_grad():
            return self._run(samples, loss, config, backward=False)

    def forward_backward(
        self, samples: Sequence[Sample], loss: str, config: Settings | None = None
    ) -> ForwardOutput:
        """As `forward`, and adds the gradient of the loss sum to what is pending.

        Raises SampleError (a ValueError), naming the sample, before anything is computed.
        FloatingPointError when the loss is no number; after that, or any other error while it
        computes, nothing is pending any more.
        """
        return self._run(samples, loss, config, backward=True)

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Applies what is pending, moves the selection biases, and clears both.

        ValueError, with everything as it was, when it shall divide by a weight sum that is not
        above 0. FloatingPointError when the gradient's norm is no number: nothing has changed then,
        and nothing is pending any more.
        """
        if params.normalise and self.weight_sum <= 0 and self._has_gradient():
            raise ValueError(
                f"the weights of what is pending sum to {self.weight_sum}, which cannot be divided "
                "by: give AdamParams(normalise=False)"
            )
        with self._all_or_nothing():
            metrics = self.optimizer.step(params, self.weight_sum)
        self.weight_sum = 0.0
        self.loads.move_biases(self.config.bias_rate)
        self.num_steps += 1
        return metrics

    def save_state(self, path: str | Path, *, wait: bool = True) -> None:
        """Everything that a later run needs to go on as if it had not stopped; the folder `path`
        appears whole or not at all. Without `wait` it is copied now and written while training
        goes on; `finish` or the next save waits for it and raises what went wrong."""
        self._saver.save(Path(path), self._state(), self._numbers())
        if wait:
            self._saver.wait()

    def finish(self) -> None:
        """Returns when every state is written."""
        self._saver.wait()

    def load_state(self, path: str | Path) -> None:
        """Goes on where `save_state` left. Raises ValueError where it is of another model or trains
        other parameters: then nothing has changed."""
        tensors, numbers = checkpoint.load(Path(path))
        checkpoint.check(self.model, tensors)
        self.optimizer.load(tensors)  # which looks first whether it can
        checkpoint.fill(self.model, tensors)
        self.loads.load(tensors)
        self.num_steps = int(numbers["num_steps"])
        self.weight_sum = float(numbers["weight_sum"])

    def publish_weights(self, path: str | Path) -> str:
        """Writes the weights that a sampler serves as a checkpoint folder (released layout), and
        returns the hash of what they hold."""
        return checkpoint.publish(self.model, Path(path))

    def _has_gradient(self) -> bool:
        gradients = (parameter.grad for parameter in self.optimizer.parameters.values())
        return any(bool(gradient.any()) for gradient in gradients if gradient is not None)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Generator[None]:
        """After an error in the block nothing is pending: of what was half done nobody could say
        which part is."""
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                self.optimizer.clear()
                self.loads.clear()
                self.weight_sum = 0.0

    def _state(self) -> dict[str, Tensor]:
        frozen = {
            f"parameter.{name}": weight.detach()
            for name, weight in checkpoint.weights_of(self.model)
            if name not in self.optimizer.parameters
        }
        return {**frozen, **self.optimizer.state(), **self.loads.state()}

    def _numbers(self) -> dict[str, float]:
        return {"num_steps": self.num_steps, "weight_sum": self.weight_sum}

    def _run(
        self, samples: Sequence[Sample], loss: str, settings: Settings | None, *, backward: bool
    ) -> ForwardOutput:
        config = LossConfig.of(loss, settings or {})
        rules = Rules(
            loss=loss,
            config=config,
            model=self.model.config,
            vocabulary=self.vocabulary,
            max_tokens=self.max_tokens,
            towers=self._towers.keys(),
        )
        prepared = prepare(samples, rules)
        if self._drafts and any(one.fields["target_tokens"].ndim != 1 for one in prepared):
            raise ValueError("draft_loss_weight: draft depths need one target per token")
        with self._all_or_nothing() if backward else contextlib.nullcontext():
            return self._compute(prepared, loss, config, backward=backward)

    def _compute(
        self, prepared: Sequence[Prepared], loss: str, config: LossConfig, *, backward: bool
    ) -> ForwardOutput:
        found: list[Array | None] = [None] * len(prepared)
        total = _Totals()
        for group in groups_of(prepared, self.config.token_budget):
            micro = build(prepared, group, self._features, self.dtype, self.device)
            with self.loads.counting(backward):
                one, logprobs_N, extra = self._losses(micro, loss, config)
            if backward:
                self._backward(one.loss + extra if extra is not None else one.loss)
            total.add(one, extra)
            parts = logprobs_N.detach().cpu().split(micro.lengths)
            for index, part in zip(group, parts, strict=True):
                found[index] = part.numpy()
        if backward:
            self.weight_sum += total.weight
        return ForwardOutput(
            loss_sum=total.loss,
            weight_sum=total.weight,
            logprobs=[one for one in found if one is not None],
            metrics=total.metrics() | (self.loads.metrics() if backward else {}),
        )

    def _backward(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(
                f"the loss is {float(loss.detach())}: no gradient is pending any more; look at the "
                "last samples, or lower the learning rate"
            )
        if loss.requires_grad:
            loss.backward()

    def _features(self, kind: str, inputs: Array) -> Tensor:
        return self._towers[kind](torch.as_tensor(inputs).to(self.device))

    def _losses(
        self, micro: MicroBatch, name: str, config: LossConfig
    ) -> tuple[Loss, Tensor, Tensor | None]:
        """The loss, log-probs of the targets [N] or [N, K], and the draft depths' loss."""
        decoder, fields = self.model.decoder, micro.fields
        hidden_ND = decoder(micro.batch)
        kept_M = self._kept(fields) if self.config.skip_unweighted else None
        rows_ND, targets = hidden_ND, fields["target_tokens"]
        if kept_M is not None:
            rows_ND, targets = hidden_ND.index_select(0, kept_M), targets.index_select(0, kept_M)
        logprobs_N, entropy_N = self._logprobs(rows_ND, targets, config)
        shown_N = logprobs_N
        if kept_M is not None:
            everywhere = fields["target_tokens"].shape
            zeros = logprobs_N.new_zeros(everywhere)
            shown_N = torch.full_like(zeros, torch.nan).index_copy(0, kept_M, logprobs_N.detach())
            logprobs_N = zeros.index_copy(0, kept_M, logprobs_N)
            if entropy_N is not None:
                entropy_N = zeros.index_copy(0, kept_M, entropy_N)
        rows = Rows(logprobs_N, fields, micro.lengths, entropy_N)
        found = losses.compute(name, rows, config)
        extra = None
        if self._drafts:
            extra = self.config.draft_loss_weight * draft_loss(
                self.model, micro, hidden_ND, detached=self.config.draft_detached
            )
        return found, shown_N, extra

    @property
    def _drafts(self) -> bool:
        return self.config.draft_loss_weight > 0

    def _kept(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Rows whose log-probs count: in the loss, or in a sample's ratio."""
        weights = fields["weights"]
        is_kept_N = (weights.reshape(weights.shape[0], -1) != 0).any(-1)
        if (mask_N := fields.get("sequence_ratio_mask")) is not None:
            is_kept_N = is_kept_N | (mask_N != 0)
        return is_kept_N.nonzero()[:, 0]

    def _logprobs(
        self, rows_MD: Tensor, targets: Tensor, config: LossConfig
    ) -> tuple[Tensor, Tensor | None]:
        decoder, temperature_M = self.model.decoder, None
        if config.temperature != 1:
            rows = rows_MD.shape[0]
            temperature_M = torch.full((rows,), config.temperature, device=rows_MD.device)
        given = (rows_MD, decoder.unembed.weight, targets)
        scale, real = decoder.logit_scale, decoder.text.unpadded_vocab_size
        if config.entropy_coefficient:
            return token_logprobs_and_entropy(
                *given, scale=scale, num_rows=real, temperature_N=temperature_M
            )
        logprobs = token_logprobs(*given, scale=scale, num_rows=real, temperature_N=temperature_M)
        return logprobs, None


class _Totals:
    """Losses of several micro-batches together."""

    def __init__(self) -> None:
        self.loss, self.weight, self.draft = 0.0, 0.0, None
        self._means: dict[str, tuple[float, float]] = {}
        self._peaks: dict[str, float] = {}

    def add(self, one: Loss, draft: Tensor | None) -> None:
        self.loss += float(one.loss.detach())
        self.weight += float(one.weight)
        if draft is not None:
            self.draft = (self.draft or 0.0) + float(draft.detach())
        for name, (value, weight) in one.means.items():
            old = self._means.get(name, (0.0, 0.0))
            self._means[name] = (old[0] + float(value), old[1] + float(weight))
        for name, value in one.peaks.items():
            self._peaks[name] = max(self._peaks.get(name, float("-inf")), float(value))

    def metrics(self) -> dict[str, float]:
        found = {"loss:sum": self.loss, "weight:sum": self.weight}
        if self.draft is not None:
            found["draft_loss:sum"] = self.draft
        found |= {
            f"{name}:mean": value / weight
            for name, (value, weight) in self._means.items()
            if weight
        }
        return found | {f"{name}:max": value for name, value in self._peaks.items()}
