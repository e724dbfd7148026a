"""What a hardware family can do, by exact listed compute capability.

A number that is not listed gets the fallback, never the features of the next lower one: a higher
number does not mean that an instruction exists there.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """`fp8_kv`: converts OCP e4m3 in hardware, so an 8-bit KV cache may be planned. `fp4`: has
    units for 4-bit floats. `platform`: which driver, as in suzuri/model/sizes.py."""

    name: str
    platform: str = "cuda"
    fp8_kv: bool = False
    fp4: bool = False


FAMILIES: dict[str, Family] = {
    "8.0": Family(name="Ampere (8.0)"),
    "8.6": Family(name="Ampere (8.6)"),
    "8.9": Family(name="Ada (8.9)", fp8_kv=True),
    "9.0": Family(name="Hopper (9.0)", fp8_kv=True),
    "10.0": Family(name="Blackwell (10.0)", fp8_kv=True, fp4=True),
    "10.3": Family(name="Blackwell Ultra (10.3)", fp8_kv=True, fp4=True),
    "12.0": Family(name="Blackwell RTX (12.0)", fp8_kv=True, fp4=True),
    "12.1": Family(name="Blackwell GB10 (12.1)", fp8_kv=True, fp4=True),
    # Its 8-bit float is the fnuz variant: other values for the same bits.
    "gfx942": Family(name="CDNA 3 (gfx942)", platform="rocm"),
    "gfx950": Family(name="CDNA 4 (gfx950)", platform="rocm", fp8_kv=True, fp4=True),
    "gfx1151": Family(name="RDNA 3.5 (gfx1151)", platform="rocm"),
    "apple": Family(name="Apple", platform="metal"),
    "cpu": Family(name="CPU", platform="cpu"),
}
FALLBACK = Family(name="no listed family")


def family_of(capability: str) -> Family:
    """The family of a compute capability ("9.0", "gfx942", "cpu"), or the fallback with no
    feature at all."""
    return FAMILIES.get(capability, FALLBACK)


def kv_dtypes(family: Family) -> tuple[str, ...]:
    """The KV dtypes that can be planned there; bf16 everywhere."""
    return ("bf16", "fp8") if family.fp8_kv else ("bf16",)
