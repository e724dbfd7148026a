"""State of one rank: KV pages by layer kind, conv rows, draft state, resume points.

All numbers follow from the config and the layout; docs/plan.md and the design of the state tell
why. Read next: sizes.py. No torch here.
"""

# pyright: strict

import dataclasses
import functools

from suzuri.model.config import AttentionConfig, ModelConfig
from suzuri.model.sizes_shard import kv_heads_per_rank

PAGE_SIZE = 128
"""Tokens per KV page."""
KV_DTYPES = ("bf16", "fp8")
ACTIVATION_BYTES = 2
"""Conv rows and hidden rows are kept in bf16."""
SCALE_BYTES = 4
"""Of an fp32 scale per token and KV head. One per page would make a token's bits depend on its
neighbours."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceState:
    """Bytes that one sequence of a given length keeps on one rank."""

    global_kv: int
    local_kv: int
    conv: int
    draft_kv: int
    draft_conv: int
    draft_rows: int
    resume_points: int

    @property
    def total(self) -> int:
        # Not through dataclasses.astuple: searches ask thousands of times.
        drafts = self.draft_kv + self.draft_conv + self.draft_rows
        return self.global_kv + self.local_kv + self.conv + drafts + self.resume_points


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSizes:
    """Sizes on one rank, in bytes. `drafts` depths are in use, so a verify step has drafts + 1
    rows."""

    drafts: int
    resume_points: int
    window: int
    """Tokens in reach of a local layer; 0 when there is none."""
    draft_window: int
    global_per_token: int
    local_per_token: int
    draft_global_per_token: int
    draft_local_per_token: int
    conv_row: int
    """One input row of every conv of the decoder."""
    draft_conv_row: int
    hidden_row: int
    taps: int

    @property
    def per_token(self) -> int:
        """What each further token of a long sequence costs: global layers and global depths."""
        return self.global_per_token + self.draft_global_per_token

    @property
    def conv_rows(self) -> int:
        """Rows of a conv slot: the taps before a token, and room to undo every draft."""
        return self.taps - 1 + self.drafts

    def local_pages(self, context: int, window: int) -> int:
        """Pages of one local layer's ring: what can be seen, undone and redone, at the worst
        place of the page borders. A shorter sequence has no more than it needs."""
        if not window:
            return 0
        kept = window + self.drafts
        return min(_pages(context), (kept - 2) // PAGE_SIZE + 2 if kept > 1 else 1)

    def _local(self, context: int) -> int:
        return self.local_pages(context, self.window) * PAGE_SIZE * self.local_per_token

    def _draft_local(self, context: int) -> int:
        pages = self.local_pages(context, self.draft_window)
        return pages * PAGE_SIZE * self.draft_local_per_token

    def resume_point(self, context: int) -> int:
        """What one resume point pins beside the sequence's own state.

        The window's local pages once the sequence has moved on, a copy of the last partial global
        page, conv rows for resuming at the token and one before it, and the same of the drafts.
        """
        pages = self._local(context) + self._draft_local(context)
        partial = PAGE_SIZE * self.per_token
        convs = self.taps * (self.conv_row + self.draft_conv_row)
        return pages + partial + convs + self.drafts * self.hidden_row

    def sequence(self, context: int) -> SequenceState:
        """The state of a sequence of `context` tokens, prompt and answer together."""
        tokens = _pages(context) * PAGE_SIZE
        return SequenceState(
            global_kv=tokens * self.global_per_token,
            local_kv=self._local(context),
            conv=self.conv_rows * self.conv_row,
            draft_kv=tokens * self.draft_global_per_token + self._draft_local(context),
            draft_conv=self.conv_rows * self.draft_conv_row,
            draft_rows=self.drafts * self.hidden_row,
            resume_points=self.resume_points * self.resume_point(context),
        )

    def in_flight(self, token_budget: int) -> int:
        """Local KV of the tokens of one step: pages out of the window are freed after it, not
        within it. Bounded by the budget, not by the context."""
        per_token = self.local_per_token + self.draft_local_per_token
        return _pages(token_budget) * PAGE_SIZE * per_token


@functools.lru_cache(maxsize=256)
def state_sizes(
    config: ModelConfig, *, tp: int, kv_dtype: str, drafts: int, resume_points: int
) -> StateSizes:
    """The state of `config` cut over `tp` ranks, with the first `drafts` draft depths in use."""
    assert 0 <= drafts <= config.mtp_depths, f"{drafts} of {config.mtp_depths} depths"
    text = config.text
    layers = [text.attention(layer) for layer in range(text.num_hidden_layers)]
    depths = [config.depth_attention(depth) for depth in range(drafts)]

    def per_token(attentions: list[AttentionConfig], *, local: bool) -> int:
        return sum(kv_bytes(a, tp, kv_dtype) for a in attentions if a.is_local == local)

    def conv_row(attentions: list[AttentionConfig]) -> int:
        # K and V by head, the two output convs by channel: their rows are cut like their weights.
        channels = sum(
            2 * kv_heads_per_rank(a, tp) * a.head_dim + 2 * (text.hidden_size // tp)
            for a in attentions
        )
        return channels * ACTIVATION_BYTES

    return StateSizes(
        drafts=drafts,
        resume_points=resume_points,
        window=max((a.window or 0 for a in layers), default=0),
        draft_window=max((a.window or 0 for a in depths), default=0),
        global_per_token=per_token(layers, local=False),
        local_per_token=per_token(layers, local=True),
        draft_global_per_token=per_token(depths, local=False),
        draft_local_per_token=per_token(depths, local=True),
        conv_row=conv_row(layers),
        draft_conv_row=conv_row(depths),
        hidden_row=text.hidden_size * ACTIVATION_BYTES,
        taps=text.sconv_kernel_size,
    )


def kv_bytes(attention: AttentionConfig, tp: int, kv_dtype: str) -> int:
    """Bytes of one token's keys and values of one layer on one rank."""
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"KV dtype {kv_dtype!r}: must be one of {', '.join(KV_DTYPES)}")
    head = attention.head_dim * 2 if kv_dtype == "bf16" else attention.head_dim + SCALE_BYTES
    return 2 * kv_heads_per_rank(attention, tp) * head


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
