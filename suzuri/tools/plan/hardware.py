"""The catalog of cards, as data. docs/plan.md says which numbers were measured.

`memory_bytes` is what the driver reports as total (nvidia-smi and its like), not the number on the
box. Rates are dense, bandwidths peak, per GPU; a link counts one direction.
"""

import dataclasses

MIB, GIB = 2**20, 2**30
GB, TB, TFLOPS = 1e9, 1e12, 1e12
DATASHEET = "memory: driver total as commonly reported; rates: vendor datasheet, dense"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How a GPU reaches its nearest peers. `joined`: how many GPUs the link joins; beyond them it
    is the network. `latency` is the least seconds that an exchange of any size costs: an
    assumption on the low side."""

    form: str
    bandwidth: float
    latency: float
    joined: int = 8


NVLINK3 = Link(form="nvlink", bandwidth=300 * GB, latency=4e-6)
NVLINK4 = Link(form="nvlink", bandwidth=450 * GB, latency=4e-6)
NVLINK5 = Link(form="nvlink", bandwidth=900 * GB, latency=4e-6)
FABRIC = Link(form="infinity fabric", bandwidth=448 * GB, latency=4e-6)
PCIE4 = Link(form="pcie", bandwidth=32 * GB, latency=1e-5)
PCIE5 = Link(form="pcie", bandwidth=64 * GB, latency=1e-5)
NETWORK = Link(form="network", bandwidth=50 * GB, latency=2e-5, joined=1_000_000)
"""Between machines: one 400 Gb/s port per GPU."""


def only(link: Link, joined: int) -> Link:
    """The same link between fewer or more GPUs."""
    return dataclasses.replace(link, joined=joined)


def port(bandwidth: float, joined: int = 1) -> Link:
    """A machine's own network port, bytes per second."""
    return dataclasses.replace(NETWORK, bandwidth=bandwidth, joined=joined)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card (or a machine with one memory). Bytes, bytes per second and FLOP/s."""

    name: str
    memory_bytes: int
    bandwidth: float
    bf16: float
    fp8: float | None = None
    fp4: float | None = None
    link: Link
    capability: str
    """Compute capability, or the name of the family elsewhere; see families.py."""
    system_bytes: int = 0
    """What the operating system takes of the same memory."""
    source: str = DATASHEET
    aliases: tuple[str, ...] = ()
    measured_bandwidth: float | None = None
    measured_bf16: float | None = None
    needs_memory: bool = False
    """The size differs from machine to machine: --memory, or this machine's."""

    @property
    def floor_bandwidth(self) -> float:
        """What floors divide bytes by: measured where there is a measurement, else the peak."""
        return self.measured_bandwidth or self.bandwidth

    @property
    def floor_bf16(self) -> float:
        """What floors divide FLOPs by, likewise."""
        return self.measured_bf16 or self.bf16


CATALOG: tuple[Gpu, ...] = (
    Gpu(
        name="A100 40 GB",
        memory_bytes=40960 * MIB,
        bandwidth=1.555 * TB,
        bf16=312 * TFLOPS,
        link=NVLINK3,
        capability="8.0",
        aliases=("A100 SXM4 40GB",),
    ),
    Gpu(
        name="A100 80 GB",
        memory_bytes=81920 * MIB,
        bandwidth=2.039 * TB,
        bf16=312 * TFLOPS,
        link=NVLINK3,
        capability="8.0",
        aliases=("A100 SXM4 80GB",),
    ),
    Gpu(
        name="H100 SXM",
        memory_bytes=81559 * MIB,
        bandwidth=3.35 * TB,
        bf16=989 * TFLOPS,
        fp8=1979 * TFLOPS,
        link=NVLINK4,
        capability="9.0",
        aliases=("H100 SXM 80 GB", "H100 SXM5", "H100 80GB HBM3"),
    ),
    Gpu(
        name="H100 NVL",
        memory_bytes=95830 * MIB,
        bandwidth=3.9 * TB,
        bf16=835 * TFLOPS,
        fp8=1671 * TFLOPS,
        link=only(NVLINK3, 2),
        capability="9.0",
        aliases=("H100 NVL 94 GB",),
    ),
    Gpu(
        name="H100 PCIe",
        memory_bytes=81559 * MIB,
        bandwidth=2 * TB,
        bf16=756 * TFLOPS,
        fp8=1513 * TFLOPS,
        link=PCIE5,
        capability="9.0",
        aliases=("H100 PCIe 80 GB",),
    ),
    Gpu(
        name="H200",
        memory_bytes=143771 * MIB,
        bandwidth=4.8 * TB,
        bf16=989 * TFLOPS,
        fp8=1979 * TFLOPS,
        link=NVLINK4,
        capability="9.0",
        measured_bandwidth=4.2 * TB,
        measured_bf16=700 * TFLOPS,
        aliases=("H200 SXM", "H200 141 GB"),
        source="memory, 4.2 TB/s read and 700 TFLOP/s bf16: measured; others: vendor datasheet",
    ),
    Gpu(
        name="H20",
        memory_bytes=97871 * MIB,
        bandwidth=4 * TB,
        bf16=148 * TFLOPS,
        fp8=296 * TFLOPS,
        link=NVLINK4,
        capability="9.0",
        aliases=("H20 96 GB",),
    ),
    Gpu(
        name="GH200",
        memory_bytes=97871 * MIB,
        bandwidth=4 * TB,
        bf16=989 * TFLOPS,
        fp8=1979 * TFLOPS,
        link=only(NVLINK4, 2),
        capability="9.0",
        aliases=("GH200 480GB", "GH200 96 GB"),
        source=f"{DATASHEET}; the HBM3 version, for that with 144 GB give --memory 144",
    ),
    Gpu(
        name="B200",
        memory_bytes=183359 * MIB,
        bandwidth=7.7 * TB,
        bf16=2250 * TFLOPS,
        fp8=4500 * TFLOPS,
        fp4=9000 * TFLOPS,
        link=NVLINK5,
        capability="10.0",
        aliases=("B200 180 GB", "B200 SXM"),
        source=f"{DATASHEET}; bandwidth from the bus width that the driver reports (7.67 TB/s)",
    ),
    Gpu(
        name="B300",
        memory_bytes=275040 * MIB,
        bandwidth=8 * TB,
        bf16=2250 * TFLOPS,
        fp8=4500 * TFLOPS,
        fp4=13125 * TFLOPS,
        link=NVLINK5,
        capability="10.3",
    ),
    Gpu(
        name="GB200",
        memory_bytes=189471 * MIB,
        bandwidth=8 * TB,
        bf16=2500 * TFLOPS,
        fp8=5000 * TFLOPS,
        fp4=10000 * TFLOPS,
        link=only(NVLINK5, 72),
        capability="10.0",
    ),
    Gpu(
        name="L40S",
        memory_bytes=46068 * MIB,
        bandwidth=0.864 * TB,
        bf16=362 * TFLOPS,
        fp8=733 * TFLOPS,
        link=PCIE4,
        capability="8.9",
    ),
    Gpu(
        name="RTX A6000",
        memory_bytes=49140 * MIB,
        bandwidth=0.768 * TB,
        bf16=155 * TFLOPS,
        link=PCIE4,
        capability="8.6",
        aliases=("A6000",),
    ),
    Gpu(
        name="RTX PRO 6000",
        memory_bytes=97887 * MIB,
        bandwidth=1.792 * TB,
        bf16=504 * TFLOPS,
        fp8=1008 * TFLOPS,
        fp4=2015 * TFLOPS,
        link=PCIE5,
        capability="12.0",
        aliases=("RTX PRO 6000 96 GB",),
    ),
    Gpu(
        name="RTX 4090",
        memory_bytes=24564 * MIB,
        bandwidth=1.008 * TB,
        bf16=165 * TFLOPS,
        fp8=330 * TFLOPS,
        link=PCIE4,
        capability="8.9",
        aliases=("4090",),
    ),
    Gpu(
        name="RTX 5090",
        memory_bytes=32607 * MIB,
        bandwidth=1.792 * TB,
        bf16=210 * TFLOPS,
        fp8=419 * TFLOPS,
        fp4=1676 * TFLOPS,
        link=PCIE5,
        capability="12.0",
        aliases=("5090",),
    ),
    Gpu(
        name="MI300X",
        memory_bytes=196592 * MIB,
        bandwidth=5.3 * TB,
        bf16=1307 * TFLOPS,
        fp8=2615 * TFLOPS,
        link=FABRIC,
        capability="gfx942",
    ),
    Gpu(
        name="MI325X",
        memory_bytes=262128 * MIB,
        bandwidth=6 * TB,
        bf16=1307 * TFLOPS,
        fp8=2615 * TFLOPS,
        link=FABRIC,
        capability="gfx942",
    ),
    Gpu(
        name="MI355X",
        memory_bytes=294896 * MIB,
        bandwidth=8 * TB,
        bf16=2516 * TFLOPS,
        fp8=5033 * TFLOPS,
        fp4=10066 * TFLOPS,
        link=dataclasses.replace(FABRIC, bandwidth=537 * GB),
        capability="gfx950",
    ),
    Gpu(
        name="DGX Spark",
        memory_bytes=int(121.69 * GIB),
        bandwidth=0.273 * TB,
        bf16=125 * TFLOPS,
        fp8=250 * TFLOPS,
        fp4=500 * TFLOPS,
        link=port(25 * GB, joined=2),
        capability="12.1",
        system_bytes=16 * GIB,
        aliases=("GB10", "Spark"),
        source=f"{DATASHEET}; the driver reports 121.69 GiB, users see 102 to 110 GiB free",
    ),
    Gpu(
        name="Strix Halo",
        memory_bytes=96 * GIB,
        bandwidth=0.256 * TB,
        bf16=59 * TFLOPS,
        link=port(1.25 * GB),
        capability="gfx1151",
        aliases=("Ryzen AI Max 395", "AI Max+ 395", "Radeon 8060S"),
        source="128 GB machine with 96 GiB given to the GPU; rates: vendor datasheet",
    ),
    Gpu(
        name="Mac Ultra",
        memory_bytes=384 * GIB,
        bandwidth=0.819 * TB,
        bf16=28 * TFLOPS,
        link=port(10 * GB),
        capability="apple",
        aliases=("M3 Ultra", "Mac Studio Ultra", "Mac Studio M3 Ultra", "M2 Ultra"),
        source="M3 Ultra with 512 GB, of which the GPU may have three quarters by default; "
        "another size: --memory with three quarters of it; rates: vendor datasheet",
    ),
    Gpu(
        name="CPU",
        memory_bytes=0,
        bandwidth=0.1 * TB,
        bf16=1 * TFLOPS,
        link=port(1.25 * GB),
        capability="cpu",
        system_bytes=2 * GIB,
        needs_memory=True,
        source="memory: this machine's, or --memory; 0.1 TB/s and 1 TFLOP/s are assumed",
    ),
)
