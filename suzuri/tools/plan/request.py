"""A request with nothing left open: what `suzuri plan` computes from, and varies on a no."""

import dataclasses

from suzuri.model.config import ModelConfig
from suzuri.model.sizes import Layout
from suzuri.model.sizes_state import KV_DTYPES
from suzuri.model.tensor_table import released_nvfp4_layers
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.families import Family, family_of, kv_dtypes
from suzuri.tools.plan.hardware import Gpu

DEFAULT_CONTEXT = 32_768


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """`num_gpus` cards in copies of `tp`; `concurrency` sequences of `context` tokens over all."""

    gpu: Gpu
    num_gpus: int
    tp: int
    ep: int
    any_experts: bool
    """--ep was left open: floors may lay the experts out either way."""
    nvfp4: bool
    context: int
    concurrency: int
    kv_dtype: str
    drafts: int
    resume_points: int
    token_budget: int

    @property
    def family(self) -> Family:
        return family_of(self.gpu.capability)

    @property
    def copies(self) -> int:
        """Data-parallel copies of the model."""
        return self.num_gpus // self.tp

    @property
    def per_copy(self) -> int:
        """Sequences on the fullest copy."""
        return -(-self.concurrency // self.copies)

    @property
    def spread(self) -> dict[int, int]:
        """Sequences of a copy to how many copies have so many, as even as it goes."""
        fewer, over = divmod(self.concurrency, self.copies)
        spread = {fewer + 1: over, fewer: self.copies - over}
        return {number: copies for number, copies in spread.items() if number and copies}


def request_of(config: ModelConfig, asked: PlanConfig, gpu: Gpu) -> Request:
    """Fills in the defaults. Raises ValueError for what the hardware or the model does not have,
    and for copies that do not come out even."""
    check_kv_dtype(asked.kv_dtype, gpu)
    if family_of(gpu.capability).platform == "cpu" and asked.num_gpus > 1:
        raise ValueError(
            f"--num-gpus {asked.num_gpus}: a machine's CPU, with all its cores and memory, is one "
            "device; leave --num-gpus away"
        )
    limit = config.text.model_max_length
    context = min(DEFAULT_CONTEXT, limit) if asked.context is None else asked.context
    if context > limit:
        raise ValueError(f"--context {context}: the model's limit is {limit} tokens")
    tp = asked.num_gpus if asked.tp is None else asked.tp
    if tp > asked.num_gpus:
        raise ValueError(f"--tp {tp}: needs at least --num-gpus {tp}, not {asked.num_gpus}")
    if asked.num_gpus % tp:
        raise ValueError(
            f"--tp {tp}: does not divide --num-gpus {asked.num_gpus}; copies of the model need the "
            "same number of GPUs each"
        )
    drafts = config.mtp_depths if asked.mtp is None else asked.mtp
    if drafts > config.mtp_depths:
        raise ValueError(f"--mtp {drafts}: the model has {config.mtp_depths} draft depths")
    nvfp4 = asked.experts == "nvfp4" or (asked.experts is None and config.quantization is not None)
    if nvfp4 and not nvfp4_layers(config):
        raise ValueError(
            "--experts nvfp4: the model has no routed experts that the releases quantise (sparse "
            "layers from layer 3 on)"
        )
    return Request(
        gpu=gpu,
        num_gpus=asked.num_gpus,
        tp=tp,
        ep=asked.ep or 1,
        any_experts=asked.ep is None,
        nvfp4=nvfp4,
        context=context,
        concurrency=asked.concurrency,
        kv_dtype=asked.kv_dtype,
        drafts=drafts,
        resume_points=asked.resume_points,
        token_budget=asked.token_budget,
    )


def check_kv_dtype(kv_dtype: str, gpu: Gpu) -> None:
    """Refuses a KV dtype that the card cannot do, listing what works there."""
    family = family_of(gpu.capability)
    works = kv_dtypes(family)
    if kv_dtype in works:
        return
    why = "is no KV dtype" if kv_dtype not in KV_DTYPES else f"needs hardware that {gpu.name} lacks"
    raise ValueError(
        f"--kv-dtype {kv_dtype}: {why}; what works on {gpu.name}, {family.name}: {', '.join(works)}"
    )


def nvfp4_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers that are NVFP4 if any are: the config's own, else those of the releases."""
    if config.quantization is not None:
        return config.quantization.layers
    return released_nvfp4_layers(config)


def layout_of(config: ModelConfig, request: Request) -> Layout:
    """The request as the sizes understand it."""
    return Layout(
        tp=request.tp,
        ep=request.ep,
        nvfp4_layers=nvfp4_layers(config) if request.nvfp4 else (),
        kv_dtype=request.kv_dtype,
        drafts=request.drafts,
        resume_points=request.resume_points,
        token_budget=request.token_budget,
        platform=request.family.platform,
    )
