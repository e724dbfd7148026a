"""What every served token is held against: one forward over its whole sequence, without a cache.

Rows are compared as digests: 64 bits per row of a function that any change of a single value
changes, so that neither hidden rows nor logits of a large model have to be kept.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from suzuri.kernels import dispatch
from suzuri.kernels.log_softmax import log_softmax
from suzuri.kernels.sample_tokens import sample_tokens
from suzuri.model.batch import Batch, pack
from suzuri.model.decoder import Decoder
from suzuri.model.inkling import Inkling

INTEGERS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
}
SLICE = 64
"""Rows whose logits exist at the same time."""
KEPT_BYTES = 2**28
"""Hidden rows that are kept for later checks of the same tokens."""

Media = tuple[int, Tensor]
"""(index of the first placeholder, features [M, D])."""


def listed(x: Tensor) -> list[Any]:
    """The values as Python numbers."""
    return x.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class Digester:
    """64-bit digests of rows by their bits: -0.0 and 0.0 differ, a NaN equals itself."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, x_NX: Tensor) -> Tensor:
        """[N] int64 of the rows of x [N, ...]. Sums of integers: no order can change them."""
        bits_NX = x_NX.contiguous().view(INTEGERS[x_NX.dtype]).flatten(1).to(torch.int64)
        key = (bits_NX.shape[1], x_NX.device)
        if key not in self._weights:
            generator = torch.Generator().manual_seed(bits_NX.shape[1])
            odd_X = torch.randint(-(2**62), 2**62, (key[0],), generator=generator) * 2 + 1
            self._weights[key] = odd_X.to(x_NX.device)
        return (bits_NX * self._weights[key]).sum(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """One sequence as the plain forward sees it: hidden rows [T, D], and digests [T] on the CPU."""

    tokens: tuple[int, ...]
    hidden_TD: Tensor
    hidden_T: Tensor
    logits_T: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """What sampling must give for one token: id, raw log-prob, and that under the temperature."""

    token: int
    raw: float
    sampled: float


class Reference:
    """Plain forwards of a model, kept by their tokens as far as KEPT_BYTES go."""

    def __init__(self, model: Inkling) -> None:
        self.model, self.decoder = model, model.decoder
        self.digest = Digester()
        self._kept: dict[tuple[tuple[int, ...], int], Expected] = {}

    @property
    def device(self) -> torch.device:
        return self.decoder.norm.weight.device

    def batch(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> Batch:
        """One sequence without a cache."""
        items = [(0, index, features_MD) for index, features_MD in media]
        return pack([list(tokens)], media=items, device=self.device)

    @torch.no_grad()
    def of(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> Expected:
        """The rows of a sequence. Raises ValueError when the model gives no finite numbers."""
        name = hash(tuple(int(self.digest(f_MD).sum()) for _, f_MD in media)) if media else 0
        key = (tuple(tokens), name)
        if (found := self._kept.get(key)) is not None:
            return found
        hidden_TD = self.decoder(self.batch(tokens, media))
        if not bool(torch.isfinite(hidden_TD).all()):
            raise ValueError("the plain forward gives values that are not finite: suzuri trace")
        found = Expected(
            tokens=key[0],
            hidden_TD=hidden_TD,
            hidden_T=self.digest(hidden_TD).cpu(),
            logits_T=self.logits_digest(hidden_TD),
        )
        size = hidden_TD.numel() * hidden_TD.element_size()
        while self._kept and size * (len(self._kept) + 1) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = found
        return found

    @torch.no_grad()
    def logits_digest(self, hidden_ND: Tensor) -> Tensor:
        """Digests [N] of the logits of hidden rows, on the CPU."""
        parts = [
            self.digest(self.decoder.logits(hidden_ND[i : i + SLICE]))
            for i in range(0, hidden_ND.shape[0], SLICE)
        ]
        return torch.cat(parts).cpu()

    @torch.no_grad()
    def draws(
        self, expected: Expected, first: int, *, temperature: float, seed: int, sample: int
    ) -> list[Draw]:
        """What sampling gives for each of the tokens first, first + 1, ... of the sequence."""
        found: list[Draw] = []
        for start in range(first, len(expected.tokens), SLICE):
            tokens = expected.tokens[start : start + SLICE]
            hidden_ND = expected.hidden_TD[start - 1 : start - 1 + len(tokens)]
            found += self._draws(hidden_ND, tokens, start, temperature, seed, sample)
        return found

    def _draws(
        self,
        hidden_ND: Tensor,
        tokens: Sequence[int],
        start: int,
        temperature: float,
        seed: int,
        sample: int,
    ) -> list[Draw]:
        count, device = len(tokens), self.device
        logits_NV = self.decoder.logits(hidden_ND)
        is_greedy = temperature == 0

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        divisor_N = column(1.0 if is_greedy else temperature, torch.float32)
        scaled_NV = logits_NV / divisor_N[:, None]
        ids_N = sample_tokens(
            scaled_NV,
            column(0.0 if is_greedy else 1.0, torch.float32),
            torch.full((count,), seed, dtype=torch.int64, device=device),
            torch.arange(start, start + count, device=device),
            torch.full((count,), sample, dtype=torch.int64, device=device),
        )
        # The log-probs are those of the token that came: a wrong token is told by its id.
        chosen_N1 = torch.tensor(list(tokens), device=device)[:, None]
        raw_NV = log_softmax(logits_NV)
        raw_N1 = torch.gather(raw_NV, 1, chosen_N1)
        if is_greedy:
            sampled_N = column(0.0, raw_N1.dtype)
        else:
            sampled_N = torch.gather(log_softmax(scaled_NV), 1, chosen_N1)[:, 0]
        columns = (ids_N, raw_N1[:, 0], sampled_N)
        rows = zip(*map(listed, columns), strict=True)
        return [Draw(token=id, raw=raw, sampled=sampled) for id, raw, sampled in rows]

    def prompt_logprobs(self, expected: Expected, stop: int) -> list[float]:
        """Raw log-probs of the tokens 1 .. stop - 1."""
        draws = self.draws(expected, 1, temperature=0.0, seed=0, sample=0)
        return [draw.raw for draw in draws[: stop - 1]]

    @torch.no_grad()
    def layers(self, tokens: Sequence[int], media: Sequence[Media], row: int) -> dict[str, int]:
        """Digests of one row behind every part of every layer, in order of execution."""
        with watched(self.decoder, self.digest) as found:
            self.decoder(self.batch(tokens, media))
        return {name: int(digests_T[row]) for name, digests_T in found.items()}


@contextmanager
def watched(
    decoder: Decoder, digest: Digester, wanted: bool = True
) -> Generator[dict[str, Tensor]]:
    """Collects digests [N] of what leaves each part of the decoder during the block, by name.

    Nothing is done unless `wanted`.
    """
    found: dict[str, Tensor] = {}
    if not wanted:
        yield found
        return
    parts: dict[str, nn.Module] = {"embedding": decoder.embed_norm}
    for i, layer in enumerate(decoder.blocks):
        parts |= {
            f"layer {i} attn.qkvr": layer.attn.qkvr,
            f"layer {i} attn": layer.attn,
            f"layer {i} attn_conv": layer.attn_conv,
            f"layer {i} mlp": layer.mlp,
            f"layer {i} mlp_conv": layer.mlp_conv,
        }
    parts["final norm"] = decoder.norm

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            found[name] = digest(output).cpu()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in parts.items()]
    try:
        with dispatch.apart():
            yield found
    finally:
        for handle in handles:
            handle.remove()
