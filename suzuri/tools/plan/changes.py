"""On a no: what would turn it into a yes. Every change named here was planned again and fits.

Nearest first: the same GPUs cut in another way, which gives nothing up, settings that keep at least
half of what was asked, the format of state and experts, hardware, settings that give up more. If no
single change is enough, several together.
"""

import dataclasses
from collections.abc import Callable, Iterator

from suzuri.model.config import ModelConfig
from suzuri.model.sizes_shard import Sharding, is_possible, possible_tp
from suzuri.tools.plan.families import family_of, kv_dtypes
from suzuri.tools.plan.hardware import CATALOG, Gpu
from suzuri.tools.plan.request import Request, nvfp4_layers
from suzuri.tools.plan.verdict import fits, sizes_of

MAX_GPUS = 256
LEAST_BUDGET = 1024
LEAST_CONTEXT = 1024
FIELDS = {
    "resume_points": "--resume-points",
    "concurrency": "--concurrency",
    "context": "--context",
    "drafts": "--mtp",
    "token_budget": "--token-budget",
    "kv_dtype": "--kv-dtype",
    "nvfp4": "--experts",
    "gpu": "--gpu",
    "num_gpus": "--num-gpus",
    "tp": "--tp",
    "ep": "--ep",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """`flags`: the words to add to the command line; `request`: what they make of it, which
    fits."""

    words: str
    flags: str
    request: Request


def find_changes(config: ModelConfig, request: Request) -> list[Change]:
    """Changes that make an impossible request possible, nearest first; empty if nothing does."""
    settings = list(_settings(config, request))
    near = [r for r in settings if _keeps_half(request, r)]
    far = [r for r in settings if not _keeps_half(request, r)]
    same_gpus = list(_recut(config, request))
    # Nobody has to buy what only another cut of the same GPUs is needed for.
    hardware = [] if same_gpus else list(_hardware(config, request))
    single = [*same_gpus, *near, *_formats(config, request), *hardware, *far]
    return [_change(request, changed) for changed in single or _together(config, request)]


def _recut(config: ModelConfig, request: Request) -> Iterator[Request]:
    """The GPUs already asked for, in copies of another size: larger ones first, which lessen the
    weights on each GPU, then smaller ones, which lessen the sequences of each; without GPUs left
    over first. And with the routed experts over fewer groups."""
    sizes = possible_tp(config)
    order = [tp for tp in sizes if tp > request.tp] + [tp for tp in sizes[::-1] if tp < request.tp]
    order.sort(key=lambda tp: request.num_gpus % tp > 0)
    for tp in order:
        used = request.num_gpus // tp * tp
        changed = dataclasses.replace(request, tp=tp, num_gpus=used)
        if used and _possible(config, changed) and fits(config, changed):
            yield changed
            break
    for ep in range(request.ep - 1, 0, -1):
        changed = dataclasses.replace(request, ep=ep)
        if _possible(config, changed) and fits(config, changed):
            yield changed
            break


def _settings(config: ModelConfig, request: Request) -> Iterator[Request]:
    """The largest value of each setting below the asked one that fits, if there is one."""
    yield from _lower(config, request, "resume_points", least=0)
    yield from _lower(config, request, "concurrency", least=1)
    longest = sizes_of(config, request).largest_context(request.per_copy)
    if longest:
        yield dataclasses.replace(request, context=longest)
    yield from _lower(config, request, "drafts", least=0)
    budget = request.token_budget // 2
    while budget >= LEAST_BUDGET:
        changed = dataclasses.replace(request, token_budget=budget)
        if fits(config, changed):
            yield changed
            return
        budget //= 2


def _lower(config: ModelConfig, request: Request, field: str, least: int) -> Iterator[Request]:
    def with_value(value: int) -> Request:
        return dataclasses.replace(request, **{field: value})

    low, high = least - 1, getattr(request, field) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(config, with_value(middle)):
            low = middle
        else:
            high = middle - 1
    if low >= least:
        yield with_value(low)


def _keeps_half(asked: Request, changed: Request) -> bool:
    return all(
        2 * getattr(changed, field) >= getattr(asked, field)
        for field in ("context", "concurrency", "token_budget", "drafts")
    )


def _formats(config: ModelConfig, request: Request) -> Iterator[Request]:
    for changed in (_with_fp8(request), _with_nvfp4(config, request)):
        if changed is not None and _possible(config, changed) and fits(config, changed):
            yield changed


def _with_fp8(request: Request) -> Request | None:
    if request.kv_dtype == "fp8" or "fp8" not in kv_dtypes(request.family):
        return None
    return dataclasses.replace(request, kv_dtype="fp8")


def _with_nvfp4(config: ModelConfig, request: Request) -> Request | None:
    if request.nvfp4 or not nvfp4_layers(config):
        return None
    return dataclasses.replace(request, nvfp4=True)


def _hardware(config: ModelConfig, request: Request) -> Iterator[Request]:
    if (more := _with_more_gpus(config, request)) is not None:
        yield more
    if (bigger := _with_bigger_card(config, request)) is not None:
        yield bigger


def _with_more_gpus(config: ModelConfig, request: Request) -> Request | None:
    """The fewest GPUs of the same card above those asked for: copies as they are or of another
    size, and as many of them as hold all sequences."""
    if request.family.platform == "cpu":
        return None
    candidates: list[Request] = []
    for tp in possible_tp(config):
        one = dataclasses.replace(request, tp=tp, num_gpus=tp)
        if not _possible(config, one):
            continue
        if not (per_copy := sizes_of(config, one).largest_concurrency(request.context)):
            continue
        copies = max(-(-request.concurrency // per_copy), request.num_gpus // tp + 1)
        candidates.append(dataclasses.replace(one, num_gpus=copies * tp))
    candidates = [changed for changed in candidates if changed.num_gpus <= MAX_GPUS]
    # Of as many GPUs the size of a copy that is nearest to the asked one.
    return min(
        candidates,
        key=lambda r: (r.num_gpus, r.tp != request.tp, abs(r.tp - request.tp)),
        default=None,
    )


def _with_bigger_card(config: ModelConfig, request: Request) -> Request | None:
    """The smallest card with more memory that fits, of the same platform first."""
    bigger = (dataclasses.replace(request, gpu=gpu) for gpu in _bigger(request))
    return next((changed for changed in bigger if fits(config, changed)), None)


def _together(config: ModelConfig, request: Request) -> list[Request]:
    """Several changes: as few settings given up as the hardware of the catalog allows."""
    steps: list[Callable[[Request], Request | None]] = [
        lambda r: r,
        lambda r: _with_nvfp4(config, r),
        lambda r: dataclasses.replace(r, resume_points=0),
        lambda r: dataclasses.replace(r, drafts=0),
        _with_fp8,
        lambda r: dataclasses.replace(r, concurrency=min(r.concurrency, r.copies)),
        lambda r: dataclasses.replace(r, context=min(r.context, LEAST_CONTEXT)),
    ]
    current = request
    for step in steps:
        changed = step(current)
        if changed is None or not _possible(config, changed):
            continue
        current = changed
        if fits(config, current):
            return [current]
        found = [*_hardware(config, current), *_bigger_and_more(config, current)]
        if found:
            return found
    return []


def _bigger_and_more(config: ModelConfig, request: Request) -> Iterator[Request]:
    """More GPUs of a bigger card: the fewest GPUs, of the first such card."""
    bigger = (dataclasses.replace(request, gpu=gpu) for gpu in _bigger(request))
    found = [more for r in bigger if (more := _with_more_gpus(config, r)) is not None]
    if found:
        yield min(found, key=lambda more: more.num_gpus)


def _bigger(request: Request) -> list[Gpu]:
    """Cards with more memory and the same KV dtype, those of the same platform first, then by
    memory. A machine that shares one memory with its system is no card that one can add."""
    platform = request.family.platform
    cards = [
        gpu
        for gpu in CATALOG
        if gpu.memory_bytes > request.gpu.memory_bytes
        and not gpu.system_bytes
        and gpu.link.joined > 1
        and request.kv_dtype in kv_dtypes(family_of(gpu.capability))
    ]
    return sorted(
        cards, key=lambda gpu: (family_of(gpu.capability).platform != platform, gpu.memory_bytes)
    )


def _possible(config: ModelConfig, request: Request) -> bool:
    """Whether the model can be cut so; a change must not run into a refusal."""
    return is_possible(config, Sharding(tp=request.tp, ep=request.ep))


def _change(before: Request, after: Request) -> Change:
    words: list[str] = []
    flags: list[str] = []
    for field, flag in FIELDS.items():
        old, new = getattr(before, field), getattr(after, field)
        # Left unsaid, --tp would follow --num-gpus.
        is_kept = field == "tp" and old == new and before.num_gpus != after.num_gpus
        if old == new and not is_kept:
            continue
        value = _value(field, new)
        flags.append(f"{flag} {value}")
        words.append(
            f"{flag} {value}" if is_kept else f"{flag} {value} instead of {_value(field, old)}"
        )
        if field == "gpu" and before.gpu not in CATALOG:
            words[-1] += " (and without --memory, --bandwidth, --tflops and --link)"
    if after.copies != before.copies:
        copies = "copy" if after.copies == 1 else "copies"
        words[-1] += f" ({after.copies} {copies} of the model)"
    return Change(words=", ".join(words), flags=" ".join(flags), request=after)


def _value(field: str, value: object) -> str:
    if isinstance(value, Gpu):
        return value.name.lower().replace(" ", "-")
    if field == "nvfp4":
        return "nvfp4" if value else "bf16"
    return str(value)
