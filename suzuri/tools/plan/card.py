"""Which card is meant: a name in any spelling, three numbers, or a name with a number changed."""

import dataclasses
import difflib
import re

from suzuri.tools.doctor.host import Host, this_machine
from suzuri.tools.doctor.resources import memory_bytes
from suzuri.tools.plan.hardware import CATALOG, GB, GIB, PCIE4, TB, TFLOPS, Gpu

_FILLING = frozenset(
    (
        *("nvidia", "geforce", "tensor", "core", "gpu", "generation"),
        *("ampere", "hopper", "blackwell", "workstation", "server", "edition"),
        *("amd", "instinct", "ryzen", "radeon", "apple"),
    )
)
"""Words of official names that tell no two cards of the catalog apart."""
OTHER_CARDS = "another card: --memory 96 --bandwidth 1.8 --tflops 400 (GB, TB/s, bf16 TFLOP/s)"
CUSTOM = "card by numbers"
REPORTED = 0.995 * GIB
"""Bytes that a driver reports per GB that a card is sold with: nearly a GiB."""


def find_card(
    name: str | None,
    *,
    memory: float | None = None,
    bandwidth: float | None = None,
    tflops: float | None = None,
    link: float | None = None,
) -> Gpu:
    """The card of a name, with what the numbers (GB, TB/s, TFLOP/s, GB/s) change of it; without a
    name, all of `memory`, `bandwidth` and `tflops` make one. Raises ValueError in words."""
    if name is None:
        if memory is None or bandwidth is None or tflops is None:
            raise ValueError(
                f"say which card: --gpu NAME ({', '.join(gpu.name for gpu in CATALOG)}), or "
                f"{OTHER_CARDS}"
            )
        return Gpu(
            name=CUSTOM,
            memory_bytes=int(memory * REPORTED),
            bandwidth=bandwidth * TB,
            bf16=tflops * TFLOPS,
            link=PCIE4 if link is None else dataclasses.replace(PCIE4, bandwidth=link * GB),
            capability="not given",
            source="numbers of the command line",
        )
    gpu = match(name)
    replace = dataclasses.replace
    if memory is not None:
        # Memory that was named is memory to use: what a system takes of it is the asker's account.
        gpu = replace(gpu, memory_bytes=int(memory * REPORTED), system_bytes=0, needs_memory=False)
    elif gpu.needs_memory:
        gpu = replace(gpu, memory_bytes=machine_memory(this_machine()), needs_memory=False)
    if bandwidth is not None:
        gpu = replace(gpu, bandwidth=bandwidth * TB, measured_bandwidth=None)
    if tflops is not None:
        gpu = replace(gpu, bf16=tflops * TFLOPS, measured_bf16=None)
    if link is not None:
        gpu = replace(gpu, link=replace(gpu.link, bandwidth=link * GB))
    return gpu


def match(name: str) -> Gpu:
    """The card of the catalog that a name means, whatever its case, spaces and hyphens.

    An exact name or alias wins, then the only card whose name begins with it or holds its words,
    then the only one that it spells in another order. Raises ValueError listing the nearest cards
    when there are several or none.
    """
    words = _words(name)
    asked = "".join(words)
    if not asked:
        raise ValueError(f"--gpu {name!r} names no card; there are {_names(CATALOG)}")
    for gpu in CATALOG:
        if asked in map(_squashed, (gpu.name, *gpu.aliases)):
            return gpu
    found = [gpu for gpu in CATALOG if any(_holds(key, words) for key in (gpu.name, *gpu.aliases))]
    if not found:
        found = [gpu for gpu in CATALOG if any(_spells(k, asked) for k in (gpu.name, *gpu.aliases))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"--gpu {name!r} can be {' or '.join(gpu.name for gpu in found)}; name one of them, or "
            f"{OTHER_CARDS}"
        )
    keys = {_squashed(key): gpu for gpu in CATALOG for key in (gpu.name, *gpu.aliases)}
    near = difflib.get_close_matches(asked, keys, n=5, cutoff=0.5)
    nearest = list(dict.fromkeys(keys[key].name for key in near))
    known = f"nearest: {', '.join(nearest)}" if nearest else f"there are {_names(CATALOG)}"
    raise ValueError(f"--gpu {name!r} is no card that I know; {known}; or {OTHER_CARDS}")


def _words(name: str) -> list[str]:
    joined = re.sub(r"(\d)[ _-]+gb\b", r"\1gb", name.lower())
    return [word for word in re.findall(r"[a-z0-9]+", joined) if word not in _FILLING]


def _squashed(name: str) -> str:
    return "".join(_words(name))


def _holds(key: str, words: list[str]) -> bool:
    """Whether a name begins with the words run together, or each is within a word of it."""
    own = _words(key)
    return "".join(own).startswith("".join(words)) or all(
        any(asked in word for word in own) for asked in words
    )


def _spells(key: str, asked: str) -> bool:
    """Whether `asked` is made of runs of letters and digits of a name, each used once at most."""
    return _is_made_of(re.findall(r"[a-z]+|[0-9]+", " ".join(_words(key))), asked)


def _is_made_of(runs: list[str], asked: str) -> bool:
    return not asked or any(
        asked.startswith(run) and _is_made_of([*runs[:i], *runs[i + 1 :]], asked[len(run) :])
        for i, run in enumerate(runs)
    )


def _names(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(gpu.name for gpu in gpus)


def machine_memory(host: Host) -> int:
    """Bytes of RAM that a process of this machine may use: what there is, or less if its control
    group grants less. Raises ValueError where it cannot be asked."""
    total, _ = memory_bytes(host)
    if not total:
        raise ValueError("--gpu cpu: give --memory (GB); this system does not tell")
    return total
