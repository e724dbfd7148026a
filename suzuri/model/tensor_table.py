"""The one table between checkpoint tensors and our parameters, for loading, saving and sizing.

`table(config)` lists every tensor of the released layout with its place in our parameters.
weights.py copies along it in both directions; sums over it need no tensors and no torch.
"""

# pyright: strict

import dataclasses
import math
from collections.abc import Iterator

from suzuri.model.config import AttentionConfig, ModelConfig

OPTIONAL_PARTS = ("vision", "audio", "mtp")
PART_PREFIXES = {"vision": "model.visual.", "audio": "model.audio.", "mtp": "model.mtp."}
"""How the released names of an optional part begin; all others belong to "text"."""
BYTES_PER_VALUE = {"BF16": 2, "F32": 4}
STORED_AS = {"bfloat16": "BF16", "float32": "F32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint tensor and the slice of our parameter that holds the same values.

    The tensor is `parameter[start:stop]` along dim 0, reshaped to `shape`; both are row-major, so
    the values come in the same order and any run of them can be copied as it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parameter: str
    parameter_shape: tuple[int, ...]
    start: int
    stop: int
    part: str
    depth: int | None = None

    @property
    def num_values(self) -> int:
        """How many numbers the tensor holds."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its size in a file."""
        return self.num_values * BYTES_PER_VALUE[self.dtype]


def table(config: ModelConfig) -> tuple[Entry, ...]:
    """Every tensor of the released layout, part by part and layer by layer.

    dtype is that of config.text.torch_dtype, but "F32" for the router's bias and scale. Entries
    of one parameter cover it exactly once.
    """
    return tuple(_Rows(config).all())


def parameter_shapes(entries: tuple[Entry, ...]) -> dict[str, tuple[int, ...]]:
    """Our parameters and their shapes, in table order."""
    return {entry.parameter: entry.parameter_shape for entry in entries}


def part_of(name: str) -> str:
    """The part that a released tensor name belongs to: text, vision, audio or mtp."""
    for part, prefix in PART_PREFIXES.items():
        if name.startswith(prefix):
            return part
    return "text"


def depth_of(name: str) -> int | None:
    """The draft depth in a released tensor name; None for a tensor of no depth."""
    head, _, rest = name.partition("model.mtp.layers.")
    number = rest.split(".", 1)[0]
    return int(number) if not head and number.isascii() and number.isdigit() else None


class _Rows:
    """Walks a config and yields its entries."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._text = config.text
        self._width = config.text.hidden_size
        self._weights = STORED_AS[config.text.torch_dtype]

    def all(self) -> Iterator[Entry]:
        yield from self._decoder()
        yield from self._vision()
        yield from self._audio()
        yield from self._drafts()

    def _one(self, name: str, parameter: str, *shape: int, dtype: str = "") -> Entry:
        """A tensor that is a whole parameter of the same shape."""
        return Entry(
            name=name,
            shape=shape,
            dtype=dtype or self._weights,
            parameter=parameter,
            parameter_shape=shape,
            start=0,
            stop=shape[0],
            part=part_of(name),
            depth=depth_of(name),
        )

    def _stack(self, parameter: str, tail: tuple[int, ...], *parts: tuple[str, int]) -> list[Entry]:
        """Tensors (name, rows) stacked along dim 0 of one parameter; rows of 0 are left out."""
        total = sum(rows for _, rows in parts)
        entries: list[Entry] = []
        start = 0
        for name, rows in parts:
            if rows:
                whole = self._one(name, parameter, rows, *tail)
                entries.append(
                    dataclasses.replace(
                        whole, parameter_shape=(total, *tail), start=start, stop=start + rows
                    )
                )
            start += rows
        return entries

    def _conv(self, parameter: str, *parts: tuple[str, int]) -> Iterator[Entry]:
        """Depthwise filters: released as [channels, 1, taps], held as [channels, taps]."""
        taps = self._text.sconv_kernel_size
        for entry in self._stack(parameter, (taps,), *parts):
            yield dataclasses.replace(entry, shape=(entry.shape[0], 1, taps))

    def _decoder(self) -> Iterator[Entry]:
        rows, width = self._text.vocab_size, self._width
        yield self._one("model.llm.embed.weight", "decoder.embed.weight", rows, width)
        yield self._one("model.llm.embed_norm.weight", "decoder.embed_norm.weight", width)
        for i in range(self._text.num_hidden_layers):
            yield from self._block(
                f"model.llm.layers.{i}",
                f"decoder.layers.{i}",
                self._text.attention(i),
                is_dense=self._text.is_dense(i),
            )
        yield self._one("model.llm.norm.weight", "decoder.norm.weight", width)
        yield self._one("model.llm.unembed.weight", "decoder.unembed.weight", rows, width)

    def _block(
        self, name: str, ours: str, attention: AttentionConfig, *, is_dense: bool
    ) -> Iterator[Entry]:
        width = self._width
        yield self._one(f"{name}.attn_norm.weight", f"{ours}.attn_norm.weight", width)
        yield from self._attention(f"{name}.attn", f"{ours}.attn", attention)
        yield from self._conv(f"{ours}.attn_conv.weight", (f"{name}.attn_sconv.weight", width))
        yield self._one(f"{name}.mlp_norm.weight", f"{ours}.mlp_norm.weight", width)
        mlp = self._dense if is_dense else self._experts
        yield from mlp(f"{name}.mlp", f"{ours}.mlp")
        yield from self._conv(f"{ours}.mlp_conv.weight", (f"{name}.mlp_sconv.weight", width))

    def _attention(self, name: str, ours: str, attention: AttentionConfig) -> Iterator[Entry]:
        head = attention.head_dim
        q_rows, kv_rows = attention.num_heads * head, attention.num_kv_heads * head
        yield from self._stack(
            f"{ours}.qkvr.weight",
            (self._width,),
            (f"{name}.wq_du.weight", q_rows),
            (f"{name}.wk_dv.weight", kv_rows),
            (f"{name}.wv_dv.weight", kv_rows),
            (f"{name}.wr_du.weight", attention.num_heads * attention.d_rel),
        )
        yield self._one(f"{name}.q_norm.weight", f"{ours}.q_norm.weight", head)
        yield self._one(f"{name}.k_norm.weight", f"{ours}.k_norm.weight", head)
        yield self._one(
            f"{name}.rel_logits_proj.proj",
            f"{ours}.rel_proj",
            attention.d_rel,
            attention.rel_extent,
        )
        yield from self._conv(
            f"{ours}.kv_conv.weight",
            (f"{name}.k_sconv.weight", kv_rows),
            (f"{name}.v_sconv.weight", kv_rows),
        )
        yield self._one(f"{name}.wo_ud.weight", f"{ours}.out.weight", self._width, q_rows)

    def _dense(self, name: str, ours: str) -> Iterator[Entry]:
        inner, width = self._text.dense_intermediate_size, self._width
        yield self._one(f"{name}.w13_dn.weight", f"{ours}.gate_up.weight", 2 * inner, width)
        yield self._one(f"{name}.w2_md.weight", f"{ours}.down.weight", width, inner)
        yield self._one(f"{name}.global_scale", f"{ours}.global_scale", 1)

    def _experts(self, name: str, ours: str) -> Iterator[Entry]:
        text, width = self._text, self._width
        routed, shared = text.n_routed_experts, text.n_shared_experts
        inner = text.intermediate_size
        yield self._one(f"{name}.gate.weight", f"{ours}.router.weight", routed + shared, width)
        yield self._one(f"{name}.gate.bias", f"{ours}.router.bias", routed, dtype="F32")
        yield self._one(f"{name}.gate.global_scale", f"{ours}.router.global_scale", 1, dtype="F32")
        yield from self._stack(
            f"{ours}.gate_up",
            (2 * inner, width),
            (f"{name}.experts.w13_weight", routed),
            (f"{name}.shared_experts.shared_w13_weight", shared),
        )
        yield from self._stack(
            f"{ours}.down",
            (width, inner),
            (f"{name}.experts.w2_weight", routed),
            (f"{name}.shared_experts.shared_w2_weight", shared),
        )

    def _vision(self) -> Iterator[Entry]:
        if self._config.vision is None:
            return
        shapes = self._config.vision.linear_shapes()
        name = PART_PREFIXES["vision"]
        for i, (out, inner) in enumerate(shapes):
            yield self._one(
                f"{name}layers.linear_{i}.weight", f"vision.linears.{i}.weight", out, inner
            )
        for i, (out, _) in enumerate(shapes[:-1]):
            yield self._one(f"{name}layers.norm_{i}.weight", f"vision.norms.{i}.weight", out)
        yield self._one(f"{name}final_norm.weight", "vision.final_norm.weight", self._width)

    def _audio(self) -> Iterator[Entry]:
        audio = self._config.audio
        if audio is None:
            return
        name = PART_PREFIXES["audio"]
        rows = audio.n_mel_bins * audio.mel_vocab_size
        yield self._one(f"{name}encoder.weight", "audio.encoder.weight", rows, self._width)
        yield self._one(f"{name}final_norm.weight", "audio.final_norm.weight", self._width)

    def _drafts(self) -> Iterator[Entry]:
        width = self._width
        for d in range(self._config.mtp_depths):
            name, ours = f"model.mtp.layers.{d}", f"draft.depths.{d}"
            yield self._one(f"{name}.hidden_norm.weight", f"{ours}.hidden_norm.weight", width)
            yield self._one(f"{name}.embed_norm.weight", f"{ours}.embed_norm.weight", width)
            yield self._one(
                f"{name}.input_proj.weight", f"{ours}.input_proj.weight", width, 2 * width
            )
            yield from self._block(
                f"{name}.transformer_block",
                f"{ours}.block",
                self._config.depth_attention(d),
                is_dense=True,
            )
        if self._config.mtp_depths and self._config.mtp.chain_hidden_post_norm:
            yield self._one("model.mtp.chain_norm.weight", "draft.chain_norm.weight", width)
