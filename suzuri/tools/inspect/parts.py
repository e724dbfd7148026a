"""Sorts the tensors of a checkpoint, by name alone, into what a reader knows: attention, experts.

Works on canonical names of both layouts, quantised or not, with or without a config.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from suzuri.model.checkpoint_files import TensorEntry
from suzuri.model.tensor_names import depth_of, part_of
from suzuri.model.tensor_table import FIELD_SUFFIXES, layer_of

TEXT_GROUPS = (
    *("embed", "attention", "dense MLP", "router", "routed experts", "shared experts"),
    *("norms and convs", "unembed"),
)
UNKNOWN = "not of this model"
_DECODER = re.compile(r"model\.(?:llm|language_model)\.(?:layers\.\d+\.)?(.+)")
# The first that fits counts.
_GROUPS = (
    (re.compile(r"(embed|embed_tokens)\.weight"), "embed"),
    (re.compile(r"unembed\.weight"), "unembed"),
    (re.compile(r"(.*[._])?(layer)?norm\.weight|.*sconv\.(conv1d\.)?weight"), "norms and convs"),
    (re.compile(r"(self_)?attn\..+"), "attention"),
    (re.compile(r"mlp\.gate\..+"), "router"),
    (re.compile(r"mlp\.experts\..+"), "routed experts"),
    (re.compile(r"mlp\.shared_experts\..+"), "shared experts"),
    (re.compile(r"mlp\.[^.]+(\.weight)?"), "dense MLP"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """One line of the summary. `num_values` counts weights, not their scales."""

    part: str
    name: str
    num_tensors: int
    num_values: int
    num_bytes: int
    dtypes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """How the routed experts are stored.

    `nvfp4` has the quantised layers by the names in use (modelopt, compressed-tensors), `plain`
    the others by dtype. `num_activation_scales` of `num_quantised` tensors have one.
    """

    nvfp4: Mapping[str, tuple[int, ...]]
    plain: Mapping[str, tuple[int, ...]]
    num_quantised: int
    num_activation_scales: int


def group_of(name: str) -> tuple[str, str]:
    """(part, group) of a canonical tensor name; the groups of "mtp" are its depths."""
    part = part_of(name)
    if part == "mtp":
        depth = depth_of(name)
        return part, "all depths" if depth is None else f"depth {depth}"
    if part != "text":
        return part, part
    if name == "lm_head.weight":
        return part, "unembed"
    inside = _DECODER.fullmatch(name)
    for pattern, group in _GROUPS if inside else ():
        if inside and pattern.fullmatch(inside[1]):
            return part, group
    return "other", UNKNOWN


def field_of(name: str, dtype: str) -> tuple[str, str]:
    """(names in use, field) of a tensor of routed experts; ("", "values") for any other one."""
    if layer_of(name) is None:
        return "", "values"
    for names, suffixes in FIELD_SUFFIXES.items():
        for suffix, field in suffixes.items():
            if suffix and name.endswith(suffix):
                return names, field
    return ("modelopt", "codes") if dtype == "U8" else ("", "values")


def num_values(name: str, entry: TensorEntry) -> int:
    """How many weights a tensor holds: two per byte of NVFP4 codes, none in a scale."""
    _, field = field_of(name, entry.dtype)
    count = math.prod(entry.shape)
    return {"values": count, "codes": 2 * count}.get(field, 0)


def groups(tensors: Mapping[str, TensorEntry]) -> tuple[Group, ...]:
    """The summary in the order in which a model computes; empty groups are left out."""
    members: dict[tuple[str, str], list[tuple[str, TensorEntry]]] = {}
    for name, entry in tensors.items():
        members.setdefault(group_of(name), []).append((name, entry))
    return tuple(
        Group(
            part=part,
            name=name,
            num_tensors=len(items),
            num_values=sum(num_values(one, entry) for one, entry in items),
            num_bytes=sum(entry.nbytes for _, entry in items),
            dtypes=_bytes_by_dtype(entry for _, entry in items),
        )
        for (part, name), items in sorted(members.items(), key=lambda item: _order(*item[0]))
    )


def experts(tensors: Mapping[str, TensorEntry]) -> Experts:
    """How the routed experts of each layer are stored."""
    nvfp4: dict[str, set[int]] = {}
    plain: dict[str, set[int]] = {}
    num_quantised = num_scales = 0
    for name, entry in tensors.items():
        layer = layer_of(name)
        if layer is None:
            continue
        names, field = field_of(name, entry.dtype)
        if field == "values":
            plain.setdefault(entry.dtype, set()).add(layer)
            continue
        nvfp4.setdefault(names, set()).add(layer)
        num_quantised += field == "codes"
        num_scales += field in ("input_amax", "input_divisor")
    return Experts(
        nvfp4={names: tuple(sorted(layers)) for names, layers in nvfp4.items()},
        plain={dtype: tuple(sorted(layers)) for dtype, layers in plain.items()},
        num_quantised=num_quantised,
        num_activation_scales=num_scales,
    )


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as a reader writes them: "2, 5-9"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in runs)


def _bytes_by_dtype(entries: Iterable[TensorEntry]) -> dict[str, int]:
    """Bytes of each dtype, the largest first."""
    found: collections.Counter[str] = collections.Counter()
    for entry in entries:
        found[entry.dtype] += entry.nbytes
    return dict(found.most_common())


def _order(part: str, name: str) -> tuple[int, int]:
    first = ("text", "vision", "audio", "mtp", "other").index(part)
    if part == "text":
        return first, TEXT_GROUPS.index(name)
    digits = name.removeprefix("depth ")
    return first, int(digits) if digits.isdigit() else 1 << 30
