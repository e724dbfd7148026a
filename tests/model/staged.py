"""A scalar loss over every part of a model, evaluated from the stage that a tensor enters.

The loss reaches every trainable tensor: text log-probs, logits, both towers and all draft depths.
Re-running only the later stages makes thousands of finite differences affordable.
"""

import torch
from torch import Tensor

from suzuri.kernels.token_logprobs import token_logprobs
from suzuri.model.batch import Batch, pack
from suzuri.model.inkling import Inkling
from suzuri.model.moe import MoE
from suzuri.tools.golden import recorded


class StagedLoss:
    """Stages: embedding and towers, each layer, final norm and head, each draft depth.

    The batch holds a text sequence, and one with a picture of two patches and three audio frames.
    """

    def __init__(self, model: Inkling, seed: int) -> None:
        assert model.vision is not None and model.audio is not None and model.draft is not None
        self.model = model
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        config = model.config
        assert config.vision is not None and config.audio is not None
        side = config.vision.patch_size
        vocabulary = config.text.unpadded_vocab_size
        self.patches = normal(2, config.vision.temporal_patch_size, side, side, 3)
        self.levels = torch.randint(
            config.audio.mel_vocab_size, (3, config.audio.n_mel_bins), generator=generator
        )
        # Few different tokens, so that embedding rows repeat and their gradients are real sums.
        draw = torch.randint(12, (32,), generator=generator) * (vocabulary // 12)
        self.sequences = [[int(t) for t in draw[:20]], [int(t) for t in draw[20:]]]
        self.targets_N = torch.randint(vocabulary, (32,), generator=generator)
        self.targets_N[0] = vocabulary - 1
        self.logit_weight_NV = normal(32, vocabulary) / (32 * vocabulary) ** 0.5
        self.draft_weight_DV = normal(len(model.draft.depths), vocabulary) / vocabulary**0.5
        self.states: list[tuple[Tensor, ...]] = []
        self.sums: list[Tensor] = []

    def batch(self) -> Batch:
        """The packed input; its media features carry gradients to the towers."""
        model = self.model
        assert model.vision is not None and model.audio is not None
        media = [(1, 2, model.vision(self.patches)), (1, 6, model.audio(self.levels))]
        return pack(self.sequences, media=media)

    @property
    def num_stages(self) -> int:
        assert self.model.draft is not None
        return 2 + len(self.model.decoder.blocks) + len(self.model.draft.depths)

    def stage_of(self, parameter: str) -> int:
        """The first stage that reads a parameter."""
        parts = parameter.split(".")
        num_layers = len(self.model.decoder.blocks)
        if parts[:2] == ["decoder", "layers"]:
            return 1 + int(parts[2])
        if parts[0] == "draft":
            return 2 + num_layers + (int(parts[2]) if parts[1] == "depths" else 0)
        return 1 + num_layers if parts[1] in ("norm", "unembed") else 0

    def run(self, first: int = 0, keep: bool = False) -> Tensor:
        """The loss, from the states kept before stage `first` on."""
        state: tuple[Tensor, ...] = self.states[first] if first else ()
        total = self.sums[first] if first else torch.zeros((), dtype=torch.float64)
        if keep:
            self.states, self.sums = [], []
        for stage in range(first, self.num_stages):
            if keep:
                self.states.append(tuple(x.detach() for x in state))
                self.sums.append(total.detach())
            state, term = self._stage(stage, state)
            total = total + term
        return total

    def _stage(self, stage: int, state: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        decoder, none = self.model.decoder, torch.zeros((), dtype=torch.float64)
        num_layers = len(decoder.blocks)
        if stage == 0:
            self._batch = self.batch()
            embedded_ND = decoder.embedded(self._batch)
            return (embedded_ND, embedded_ND), none
        h_ND, embedded_ND = state
        if stage <= num_layers:
            return (decoder.blocks[stage - 1](h_ND, self._batch), embedded_ND), none
        if stage == num_layers + 1:
            h_ND = decoder.norm(h_ND)
            return (h_ND, embedded_ND), self._head_loss(h_ND)
        return self._depth(stage - num_layers - 2, h_ND, embedded_ND)

    def _head_loss(self, h_ND: Tensor) -> Tensor:
        decoder = self.model.decoder
        real_VD = decoder.unembed.weight[: decoder.text.unpadded_vocab_size]
        logprobs_N = token_logprobs(h_ND, real_VD, self.targets_N, scale=decoder.logit_scale)
        return logprobs_N.mean() + (decoder.logits(h_ND) * self.logit_weight_NV).sum()

    def _depth(
        self, depth: int, h_ND: Tensor, embedded_ND: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Depth d over both sequences: row j consumes the embedding of token j + d + 1 (the last
        rows consume the sequence's last token: any token serves a gradient check)."""
        assert self.model.draft is not None
        starts = [0, len(self.sequences[0])]
        ends = [starts[1], starts[1] + len(self.sequences[1])]
        row_N = torch.cat(
            [
                (torch.arange(start, end) + depth + 1).clamp(max=end - 1)
                for start, end in zip(starts, ends, strict=True)
            ]
        )
        h_ND = self.model.draft(depth, h_ND, embedded_ND[row_N], self._batch)
        last_SD = h_ND[[end - 1 for end in ends]]
        logits_SV = self.model.decoder.logits(last_SD)
        return (h_ND, embedded_ND), (logits_SV * self.draft_weight_DV[depth]).sum()

    def router_margin(self) -> float:
        """Smallest gap between the k-th and the next score of any token in any layer."""
        smallest = float("inf")
        with recorded(self.model) as records, torch.no_grad():
            self.run()
        for layer in self.model.decoder.blocks:
            if isinstance(layer.mlp, MoE):
                router = layer.mlp.router
                score_NR = torch.sigmoid(records[router][2][:, : len(router.bias)]) + router.bias
                top_NR = score_NR.sort(-1, descending=True).values
                k = router.num_experts_per_token
                smallest = min(smallest, float((top_NR[:, k - 1] - top_NR[:, k]).min()))
        return smallest
