"""The family as data: what a checkpoint's config.json says, checked.

`ModelConfig` is what the rest of the package reads. config_file.py takes a file in either spelling
apart and writes the released one, config_transformers.py the other, quantization_blocks.py knows
what files say about quantisation, presets.py the known models, json_fields.py the strict field
checks. No torch here.
"""

# pyright: strict

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from suzuri.model import config_file, config_transformers, presets
from suzuri.model.json_fields import Above, Between, Block, check_fields
from suzuri.model.quantization_blocks import GROUP_SIZE, Stored, read_block, write_block
from suzuri.model.vision_plan import Scale, fold_scales, fold_shapes

NUM_BYTE_TOKENS, FIRST_SPECIAL, NUM_IDS = 256, 199998, 200058
"""The tokenizer's ids: single bytes first, specials last, NUM_IDS in all."""
WEIGHT_DTYPES = ("bfloat16", "float32")
QUANTIZATION_NAMES = ("modelopt", "compressed-tensors")
Spelling = Literal["released", "transformers"]


def lacking_ids(kept: Sequence[int]) -> list[int]:
    """The ids that every kept vocabulary must hold and this one does not, ascending."""
    held = frozenset(kept)
    needed = (*range(NUM_BYTE_TOKENS), *range(FIRST_SPECIAL, NUM_IDS))
    return [token for token in needed if token not in held]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer or draft depth. Local ones have `rel_extent` == `window`, no floor."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_rel: int
    rel_extent: Annotated[int, "distances that have a learned bias"]
    window: Annotated[int | None, "keys in reach, the token itself included; None: all"]
    log_scaling_n_floor: float | None
    log_scaling_alpha: float

    @property
    def is_local(self) -> bool:
        return self.window is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The decoder. Field names are those of the released `text_config`.

    Raises ValueError naming the field when a value is impossible. `intermediate_size` is the
    width of one expert, `dense_intermediate_size` that of the dense MLPs.
    """

    model_max_length: int
    torch_dtype: Annotated[str, "bfloat16 or float32: how the weights are stored"]
    hidden_size: int
    num_hidden_layers: Annotated[int, Between(1, 4096)]
    vocab_size: Annotated[int, "rows of embed and unembed, padding included"]
    unpadded_vocab_size: Annotated[int, "logits that are kept"]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    swa_num_attention_heads: int
    swa_num_key_value_heads: int
    swa_head_dim: int
    sliding_window_size: Annotated[int | None, "None only when nothing is local"]
    local_layer_ids: tuple[int, ...]
    d_rel: int
    rel_extent: Annotated[int, "of the global layers"]
    log_scaling_n_floor: Annotated[float | None, Above(0)]
    log_scaling_alpha: Annotated[float, Between(0)]
    rms_norm_eps: Annotated[float, Above(0)]
    sconv_kernel_size: int
    dense_mlp_idx: Annotated[int, Between(0), "number of leading dense layers"]
    dense_intermediate_size: int
    intermediate_size: Annotated[int, Between(0)]
    n_routed_experts: Annotated[int, Between(0)]
    num_experts_per_tok: Annotated[int, Between(0)]
    n_shared_experts: Annotated[int, Between(0)]
    route_scale: Annotated[float, Above(0)]
    logits_mup_width_multiplier: Annotated[
        float | None, Above(0), "logits are divided by it; 1 is None"
    ]

    def __post_init__(self) -> None:
        check_fields(self, "text_config")
        object.__setattr__(self, "local_layer_ids", tuple(sorted(self.local_layer_ids)))
        if self.logits_mup_width_multiplier == 1.0:
            object.__setattr__(self, "logits_mup_width_multiplier", None)
        if self.torch_dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"text_config.torch_dtype = {self.torch_dtype!r}: must be one of "
                f"{', '.join(WEIGHT_DTYPES)}"
            )
        if self.unpadded_vocab_size > self.vocab_size:
            raise ValueError(
                f"text_config.unpadded_vocab_size = {self.unpadded_vocab_size}: must not exceed "
                f"vocab_size = {self.vocab_size}, the padded row count"
            )
        for kind in ("", "swa_"):
            heads = getattr(self, f"{kind}num_attention_heads")
            kv_heads = getattr(self, f"{kind}num_key_value_heads")
            if heads % kv_heads:
                raise ValueError(
                    f"text_config.{kind}num_attention_heads = {heads}: must be a multiple of "
                    f"{kind}num_key_value_heads = {kv_heads}"
                )
        if self.local_layer_ids and self.local_layer_ids[-1] >= self.num_hidden_layers:
            raise ValueError(
                f"text_config.local_layer_ids: {self.local_layer_ids[-1]} is not a layer; "
                f"num_hidden_layers = {self.num_hidden_layers}"
            )
        if self.local_layer_ids and self.sliding_window_size is None:
            raise ValueError(
                "text_config.sliding_window_size is missing, but layer "
                f"{self.local_layer_ids[0]} is local; give the window or let no layer be local"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        if self.dense_mlp_idx >= self.num_hidden_layers:
            return
        for name in ("intermediate_size", "n_routed_experts", "num_experts_per_tok"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"text_config.{name} = 0: must be at least 1, because layers from "
                    f"dense_mlp_idx = {self.dense_mlp_idx} on hold experts"
                )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"text_config.num_experts_per_tok = {self.num_experts_per_tok}: must not exceed "
                f"n_routed_experts = {self.n_routed_experts}"
            )

    def is_local(self, layer: int) -> bool:
        """Whether the layer attends within the sliding window only."""
        assert 0 <= layer < self.num_hidden_layers, f"no layer {layer}"
        return layer in self.local_layer_ids

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has one dense MLP instead of experts."""
        assert 0 <= layer < self.num_hidden_layers, f"no layer {layer}"
        return layer < self.dense_mlp_idx

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts: the last ones."""
        return max(0, self.num_hidden_layers - self.dense_mlp_idx)

    def attention(self, layer: int) -> AttentionConfig:
        """Attention of one layer."""
        if self.is_local(layer):
            return self.local_attention(self.sliding_window_size)
        return self.global_attention()

    def local_attention(self, window: int | None) -> AttentionConfig:
        """Sliding attention: the bias covers the window exactly and nothing grows with length."""
        assert window is not None
        return AttentionConfig(
            num_heads=self.swa_num_attention_heads,
            num_kv_heads=self.swa_num_key_value_heads,
            head_dim=self.swa_head_dim,
            d_rel=self.d_rel,
            rel_extent=window,
            window=window,
            log_scaling_n_floor=None,
            log_scaling_alpha=self.log_scaling_alpha,
        )

    def global_attention(self) -> AttentionConfig:
        """Attention over everything before; scores grow with the log of the position."""
        return AttentionConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            d_rel=self.d_rel,
            rel_extent=self.rel_extent,
            window=None,
            log_scaling_n_floor=self.log_scaling_n_floor,
            log_scaling_alpha=self.log_scaling_alpha,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """The audio front end: mel bands, each cut into bins, one embedding row per (band, bin)."""

    decoder_dmodel: int
    n_mel_bins: Annotated[int, "mel bands"]
    mel_vocab_size: Annotated[int, Between(2), "bins per band"]
    dmel_min_value: float
    dmel_max_value: float

    def __post_init__(self) -> None:
        check_fields(self, "audio_config")
        if self.dmel_min_value >= self.dmel_max_value:
            raise ValueError(
                f"audio_config.dmel_min_value = {self.dmel_min_value}: must be below "
                f"dmel_max_value = {self.dmel_max_value}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The image front end: a small MLP that folds a patch into one vector."""

    decoder_dmodel: int
    patch_size: Annotated[int, Between(1, 1024)]
    temporal_patch_size: Annotated[int, Between(1, 16)]
    n_channels: Annotated[int, Between(1, 64)]
    n_layers: Annotated[int, Between(1, 256)]

    def __post_init__(self) -> None:
        check_fields(self, "vision_config")

    def scales(self) -> tuple[Scale, ...]:
        """The `n_layers` + 1 scales (frames, side, channels), from one pixel to the patch."""
        return fold_scales(
            self.patch_size, self.temporal_patch_size, self.n_channels, self.n_layers
        )

    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """The [out, in] shape of each layer's weight."""
        return fold_shapes(self.scales(), self.decoder_dmodel)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """The chained draft depths (multi-token prediction). The default has none."""

    num_nextn_predict_layers: Annotated[int, Between(0, 256)] = 0
    chain_hidden_post_norm: bool = False
    local_layer_ids: Annotated[tuple[int, ...], "depths that attend within a window"] = ()
    local_extent: Annotated[int | None, "their window; None: sliding_window_size"] = None

    def __post_init__(self) -> None:
        check_fields(self, "mtp_config")
        object.__setattr__(self, "local_layer_ids", tuple(sorted(self.local_layer_ids)))
        if self.local_layer_ids and self.local_layer_ids[-1] >= self.num_nextn_predict_layers:
            raise ValueError(
                f"mtp_config.local_layer_ids: {self.local_layer_ids[-1]} is not a depth; "
                f"num_nextn_predict_layers = {self.num_nextn_predict_layers}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """Which routed experts a checkpoint stores as NVFP4, and how the tensors are called."""

    names: Annotated[str, "modelopt or compressed-tensors"]
    layers: Annotated[tuple[int, ...], "decoder layers, ascending, sparse ones only"]

    def __post_init__(self) -> None:
        check_fields(self, "quantization")
        object.__setattr__(self, "layers", tuple(sorted(self.layers)))
        if self.names not in QUANTIZATION_NAMES:
            raise ValueError(
                f"quantization.names = {self.names!r}: must be one of "
                f"{', '.join(QUANTIZATION_NAMES)}"
            )
        if not self.layers:
            raise ValueError(
                "quantization.layers is empty; a model without any has no quantization"
            )

    def check_against(self, text: TextConfig) -> None:
        """Refuse layers without routed experts and widths that do not fill the blocks of scales.

        Raises ValueError naming the field.
        """
        for layer in self.layers:
            if layer >= text.num_hidden_layers:
                raise ValueError(
                    f"quantization.layers: {layer} is not a layer; "
                    f"num_hidden_layers = {text.num_hidden_layers}"
                )
            if text.is_dense(layer):
                raise ValueError(
                    f"quantization.layers: layer {layer} is dense (dense_mlp_idx = "
                    f"{text.dense_mlp_idx}); only routed experts can be NVFP4"
                )
        for name in ("hidden_size", "intermediate_size"):
            if getattr(text, name) % GROUP_SIZE:
                raise ValueError(
                    f"text_config.{name} = {getattr(text, name)}: must be a multiple of "
                    f"{GROUP_SIZE}, the columns that share one NVFP4 scale; store the experts "
                    "as bf16"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. Two configs are equal when they describe the same model.

    `kept_vocabulary` lists the tokenizer ids of the rows of a model with a cut vocabulary, in row
    order; every id elsewhere, here too, is a tokenizer id. Raises ValueError naming the field.
    """

    text: TextConfig
    audio: Annotated[AudioConfig | None, "None: no audio tower"] = None
    vision: Annotated[VisionConfig | None, "None: no vision tower"] = None
    mtp: MtpConfig = MtpConfig()
    eos_token_id: Annotated[int | None, Between(0)] = None
    image_token_id: Annotated[int, Between(0)] = 200054
    audio_token_id: Annotated[int, Between(0)] = 200053
    image_bos_token_id: Annotated[int, Between(0)] = 200005
    audio_bos_token_id: Annotated[int, Between(0)] = 200020
    kept_vocabulary: tuple[int, ...] | None = None
    quantization: Annotated[Quantization | None, "None: every weight as torch_dtype"] = None
    unknown_keys: Annotated[tuple[str, ...], "names in the file that were ignored"] = (
        dataclasses.field(default=(), compare=False)
    )

    def __post_init__(self) -> None:
        check_fields(self, "")
        for name, tower in (("audio_config", self.audio), ("vision_config", self.vision)):
            if tower is not None and tower.decoder_dmodel != self.text.hidden_size:
                raise ValueError(
                    f"{name}.decoder_dmodel = {tower.decoder_dmodel}: must equal "
                    f"text_config.hidden_size = {self.text.hidden_size}"
                )
        if self.mtp.local_layer_ids and self._depth_window is None:
            raise ValueError(
                "mtp_config.local_extent and text_config.sliding_window_size are both missing, but "
                f"depth {self.mtp.local_layer_ids[0]} is local; give a window"
            )
        if self.quantization is not None:
            self.quantization.check_against(self.text)
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        kept = self.kept_vocabulary
        rows = self.text.unpadded_vocab_size
        if kept is not None and len(kept) != rows:
            raise ValueError(
                f"kept_vocabulary has {len(kept)} ids: must have one per kept row, "
                f"text_config.unpadded_vocab_size = {rows}"
            )
        if kept is not None and list(kept) != sorted(kept):
            raise ValueError("kept_vocabulary: the ids must be in ascending order")
        if kept is not None:
            lacking = lacking_ids(kept)
            if lacking:
                raise ValueError(
                    f"kept_vocabulary lacks {lacking[:5]}: it must hold every single-byte token "
                    f"(0..{NUM_BYTE_TOKENS - 1}) and every special token "
                    f"({FIRST_SPECIAL}..{NUM_IDS - 1})"
                )
            if kept[-1] >= NUM_IDS:
                raise ValueError(f"kept_vocabulary: {kept[-1]} is not a token id")
        used: dict[str, int | None] = {"eos_token_id": self.eos_token_id}
        if self.vision is not None:
            used["image_token_id"] = self.image_token_id
            used["image_bos_token_id"] = self.image_bos_token_id
        if self.audio is not None:
            used["audio_token_id"] = self.audio_token_id
            used["audio_bos_token_id"] = self.audio_bos_token_id
        allowed = range(rows) if kept is None else frozenset(kept)
        where = f"below unpadded_vocab_size = {rows}" if kept is None else "in kept_vocabulary"
        for name, token in used.items():
            if token is not None and token not in allowed:
                raise ValueError(f"{name} = {token}: must be {where}")
        if self.vision and self.audio and self.image_token_id == self.audio_token_id:
            raise ValueError(
                f"image_token_id = {self.image_token_id}: must differ from audio_token_id"
            )

    @property
    def _depth_window(self) -> int | None:
        return self.mtp.local_extent or self.text.sliding_window_size

    @property
    def mtp_depths(self) -> int:
        """Number of draft depths."""
        return self.mtp.num_nextn_predict_layers

    def depth_attention(self, depth: int) -> AttentionConfig:
        """Attention of one draft depth; global depths scale with length like global layers."""
        assert 0 <= depth < self.mtp_depths, f"no draft depth {depth}"
        if depth in self.mtp.local_layer_ids:
            return self.text.local_attention(self._depth_window)
        return self.text.global_attention()

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "ModelConfig":
        """Read a config in either spelling. ValueError names the dotted field and the fix."""
        return cls._read(document)

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read a config.json, or the one in a model folder, and the hf_quant_config.json beside it.

        ValueError names the file and field.
        """
        file = config_file.locate(path)
        return cls._read(config_file.parse(file), file, config_file.parse_side_file(file))

    @classmethod
    def _read(
        cls,
        document: Mapping[str, Any],
        file: Path | None = None,
        side: tuple[Path, Mapping[str, Any]] | None = None,
    ) -> "ModelConfig":
        with config_file.faults_in(file):
            fields = config_file.read(document)
            with fields.spelled.faults():
                text = TextConfig(**fields.text)
            sparse = range(text.dense_mlp_idx, text.num_hidden_layers)
            stored = [read_block(block, sparse) for block in fields.quantization]
        names = [block.name("").rstrip(".") for block in fields.quantization]
        unknown = [*fields.unknown_keys, *(key for one in stored for key in one.unknown_keys)]
        if side is not None:
            with config_file.faults_in(side[0]):
                stored.append(read_block(Block(side[1]), sparse))
            names = [*(f"{name} in {file}" for name in names), str(side[0])]
            unknown += [f"{side[0].name}: {key}" for key in stored[-1].unknown_keys]
        _check_agreement(names, stored)
        with config_file.faults_in(file), fields.spelled.faults():
            return cls(
                text=text,
                audio=None if fields.audio is None else AudioConfig(**fields.audio),
                vision=None if fields.vision is None else VisionConfig(**fields.vision),
                mtp=MtpConfig(**fields.mtp),
                quantization=_quantization(stored),
                unknown_keys=tuple(unknown),
                **fields.top,
            )

    def to_dict(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The config.json of that spelling, with the fixed recipe flags; `from_dict` gives it back.

        ValueError names what the transformers spelling cannot say: one tower without the other, a
        fractional log_scaling_n_floor.
        """
        fields = dataclasses.asdict(self)
        document = config_file.write(fields)
        if spelling == "transformers":
            document = config_transformers.from_released(document)
        block = write_block(fields, spelling)
        return document if block is None else {**document, "quantization_config": block}


def _check_agreement(sources: Sequence[str], stored: Sequence[Stored]) -> None:
    """Refuse places that tell different things about what is quantised."""
    said = [
        (f"layers {list(one.layers)} with the names of {one.names}" if one.layers else "no layer")
        for one in stored
    ]
    for source, what in zip(sources, said, strict=True):
        if what != said[0]:
            raise ValueError(
                f"{sources[0]} and {source} contradict each other about which experts are NVFP4: "
                f"{said[0]}, and {what}; keep the one that is true of the tensors"
            )


def _quantization(stored: Sequence[Stored]) -> Quantization | None:
    if not stored or not stored[0].layers:
        return None
    return Quantization(names=stored[0].names, layers=stored[0].layers)


PRESETS: dict[str, ModelConfig] = {
    name: ModelConfig.from_dict(document) for name, document in presets.DOCUMENTS.items()
}


def preset(name: str) -> ModelConfig:
    """The preset of that name; ValueError suggests the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}{hint}")
