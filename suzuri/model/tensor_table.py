"""The one table between checkpoint tensors and our parameters, for loading, saving and sizing.

`table(config, storage)` lists every tensor of a checkpoint with its place in our parameters.
transfer.py copies along it in every direction; sums over it need no tensors and no torch.
"""

# pyright: strict

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Literal

from suzuri.model.config import AttentionConfig, ModelConfig
from suzuri.model.tensor_names import Layout, depth_of, in_transformers, part_of

BYTES_PER_VALUE = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "I64": 8}
STORED_AS = {"bfloat16": "BF16", "float32": "F32"}
BLOCK = 16
"""Columns that share one NVFP4 block scale."""
FIRST_NVFP4_LAYER = 3
"""The releases keep the experts of earlier layers in bf16."""

_ROUTED = re.compile(r"model\.(?:llm|language_model)\.layers\.(\d+)\.mlp\.experts\.")

Rows = Literal["all", "even", "odd", "gate_then_up"]
Field = Literal[
    "values",
    "codes",
    "block_scales",
    "global_scales",
    "global_divisors",
    "input_amax",
    "input_divisor",
    "original_shape",
]
OPTIONAL_FIELDS = ("input_amax", "original_shape", "input_divisor")
"""What only describes a quantised tensor or its activations; weights do not need it."""
FIELD_SUFFIXES: dict[str, dict[str, Field]] = {
    "modelopt": {
        "": "codes",
        ".scale": "block_scales",
        ".scale2": "global_scales",
        ".input_amax": "input_amax",
        ".original_shape": "original_shape",
    },
    "compressed-tensors": {
        ".weight_packed": "codes",
        ".weight_scale": "block_scales",
        ".weight_global_scale": "global_divisors",
        ".input_global_scale": "input_divisor",
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """How a checkpoint keeps a model: which names, and which layers' routed experts as NVFP4.

    `names` are those of quantised tensors: ModelOpt's (as released) or compressed-tensors'.
    `activations`: with the activation scales that a calibration found.
    """

    layout: Layout = "released"
    nvfp4_layers: tuple[int, ...] = ()
    names: str = "modelopt"
    activations: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """`count` rows of a tensor from `row` on are rows `first`, `first` + `step`, ... of ours."""

    row: int
    first: int
    step: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint tensor and what it holds of one of our parameters.

    A parameter counts as [leads, rows, columns]: one lead per expert, 1 for the others. `start` and
    `stop` are along its first dim; `rows` tells which rows of each lead the tensor has, in which
    order (`even` are gate rows, `odd` up rows). `field` says what it holds of them: the values, or
    one of the tensors that make up NVFP4 values (docs/checkpoints.md).
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
    rows: Rows = "all"
    field: Field = "values"

    @property
    def num_values(self) -> int:
        """How many numbers the tensor holds; a byte of codes counts as one."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its size in a file."""
        return self.num_values * BYTES_PER_VALUE[self.dtype]

    @property
    def leads(self) -> range:
        """The leads of the parameter that the tensor has a part of."""
        return range(self.start, self.stop) if len(self.parameter_shape) == 3 else range(1)

    def segments(self) -> tuple[Segment, ...]:
        """Where the tensor's rows, within one lead, lie among the parameter's."""
        if len(self.parameter_shape) == 3:
            first, count = 0, self.parameter_shape[1]
        else:
            first, count = self.start, self.stop - self.start
        if self.rows == "all":
            return (Segment(row=0, first=first, step=1, count=count),)
        half = count // 2
        even = Segment(row=0, first=first, step=2, count=half)
        odd = Segment(row=0, first=first + 1, step=2, count=half)
        if self.rows == "even":
            return (even,)
        if self.rows == "odd":
            return (odd,)
        return (even, dataclasses.replace(odd, row=half))


def table(config: ModelConfig, storage: Storage | None = None) -> tuple[Entry, ...]:
    """Every tensor of a checkpoint, part by part and layer by layer.

    Without `storage`: the released layout, quantised as config.quantization says. Weights have the
    dtype of config.text.torch_dtype, but "F32" for the router's bias and scale and what NVFP4
    needs. Entries that hold values or codes cover each parameter exactly once. The draft depths
    keep their released names in the transformers layout, which has none for them.
    """
    entries = _Rows(config).all()
    storage = storage or storage_of(config)
    if storage.nvfp4_layers:
        entries = _quantised(entries, storage)
    if storage.layout == "transformers":
        entries = _renamed(entries)
    return tuple(entries)


def storage_of(config: ModelConfig, layout: Layout = "released") -> Storage:
    """The storage that a config itself describes."""
    quantization = config.quantization
    if quantization is None:
        return Storage(layout=layout)
    return Storage(layout=layout, nvfp4_layers=quantization.layers, names=quantization.names)


def released_nvfp4_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers whose routed experts the NVFP4 releases quantise."""
    text = config.text
    return tuple(
        layer
        for layer in range(FIRST_NVFP4_LAYER, text.num_hidden_layers)
        if not text.is_dense(layer)
    )


def parameter_shapes(entries: tuple[Entry, ...]) -> dict[str, tuple[int, ...]]:
    """Our parameters and their shapes, in table order."""
    return {entry.parameter: entry.parameter_shape for entry in entries}


def layer_of(name: str) -> int | None:
    """The layer whose routed experts a canonical name belongs to; None for any other tensor."""
    match = _ROUTED.match(name)
    return int(match[1]) if match else None


def _quantised(entries: Iterator[Entry], storage: Storage) -> Iterator[Entry]:
    """Replaces the routed experts of the chosen layers by what NVFP4 keeps of them."""
    for entry in entries:
        if layer_of(entry.name) not in storage.nvfp4_layers:
            yield entry
            continue
        experts, rows, columns = entry.shape
        shapes: dict[Field, tuple[str, tuple[int, ...]]] = {
            "codes": ("U8", (experts, rows, columns // 2)),
            "block_scales": ("F8_E4M3", (experts, rows, columns // BLOCK)),
            "global_scales": ("F32", (experts,)),
            "global_divisors": ("F32", (experts,)),
            "input_amax": ("BF16", (1,)),
            "input_divisor": ("F32", (1,)),
            "original_shape": ("I64", (3,)),
        }
        for suffix, field in FIELD_SUFFIXES[storage.names].items():
            if field.startswith("input_") and not storage.activations:
                continue
            dtype, shape = shapes[field]
            name = entry.name + suffix
            yield dataclasses.replace(entry, name=name, field=field, dtype=dtype, shape=shape)


def _renamed(entries: Iterator[Entry]) -> Iterator[Entry]:
    """The transformers layout: other names, gate and up rows apart."""
    for entry in entries:
        base, suffix = _split_suffix(entry)
        names = in_transformers(base)
        if len(names) == 2:
            shape = list(entry.shape)
            shape[-2] //= 2
            for name, rows in zip(names, ("even", "odd"), strict=True):
                yield dataclasses.replace(entry, name=name, shape=tuple(shape), rows=rows)
            continue
        is_mixed = base.endswith(".experts.w13_weight")
        rows: Rows = "gate_then_up" if is_mixed else "all"
        yield dataclasses.replace(entry, name=names[0] + suffix, rows=rows)


def _split_suffix(entry: Entry) -> tuple[str, str]:
    for suffixes in FIELD_SUFFIXES.values():
        for suffix, field in suffixes.items():
            if suffix and field == entry.field and entry.name.endswith(suffix):
                return entry.name.removesuffix(suffix), suffix
    return entry.name, ""


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
        name = "model.visual."
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
        name = "model.audio."
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
