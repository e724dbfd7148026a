"""Where the vendor library's products have the bits of our kernel (docs/exactness.md rule 1).

The library picks its kernel, and with it a split of K, by M. So it is only ever called with a
number of rows from BUCKETS, and only where a self-test of that (N, K, bucket) found every bit equal
to our kernel's on hostile inputs. Results live in the user's cache folder, one file per
fingerprint. Read `equal_buckets`, then `check`.
"""

import contextlib
import ctypes
import hashlib
import importlib
import os
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from suzuri.kernels.cache_folder import kept_file, of_fingerprint, read_kept, write_kept
from suzuri.log import get_logger

RUNS = (8192, 4096, 2048, 1024)
"""More rows than the last are cut into runs of these, largest first; what is left over is ours, so
nothing is ever padded or copied."""
BUCKETS = (*RUNS, 896, 768, 640, 512, 448, 384, 320, 256, 224, 192, 160, 128, 112, 96, 80, 64)
"""Rows of a call of the library. Below RUNS for exactly so many rows alone (the sizes of captured
graphs): cut in two, or padded by a copy, they would be slower than ours. Fewer are not worth it."""
SEEDS = (1, 2, 3)
PART = RUNS[-1]
"""Rows that the self-test draws and compares at a time."""
ALIGNMENT = 256
"""Bytes. The library also looks at the alignment of its operands; the test has all of them
aligned to this."""

FOLDER = "matmul"
"""Of results, in the cache folder."""

_log = get_logger(__name__)

Shape = tuple[int, int, torch.dtype, torch.dtype]
"""N (rows of the weight), K, dtype of the operands, dtype of the result."""

_found: dict[tuple[object, ...], tuple[int, ...]] = {}
"""What was read or tested in this process."""

_noted: list[list[Shape]] = []
"""Of the block of `untested` that is entered, if one is: what it was asked for."""


def vendor(x_NK: Tensor, weight_MK: Tensor, out_NM: Tensor) -> None:
    """The library's product into `out_NM`, a contiguous run of rows."""
    if out_NM.dtype == x_NK.dtype:
        torch.mm(x_NK, weight_MK.t(), out=out_NM)
    else:
        torch.mm(x_NK, weight_MK.t(), out_dtype=out_NM.dtype, out=out_NM)


def may_serve(x_NK: Tensor, weight_MK: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the library may be asked at all: bf16, laid out as in the self-test."""
    return (
        x_NK.dtype == torch.bfloat16
        and x_NK.device.type == "cuda"
        and out_dtype in (torch.bfloat16, torch.float32)
        and x_NK.is_contiguous()
        and weight_MK.is_contiguous()
        and x_NK.numel() > 0
        and weight_MK.numel() > 0
        and x_NK.shape[1] % 64 == 0
        and weight_MK.shape[0] % 64 == 0
        and x_NK.data_ptr() % ALIGNMENT == 0
        and weight_MK.data_ptr() % ALIGNMENT == 0
    )


def is_worth_asking(m: int) -> bool:
    """Whether `runs` could find anything for so many rows."""
    return m >= RUNS[-1] or m in BUCKETS


def runs(m: int, equal: tuple[int, ...]) -> list[int]:
    """`m` rows as runs of tested buckets; rows that remain are ours."""
    found: list[int] = []
    for bucket in RUNS:
        if bucket in equal:
            count, m = divmod(m, bucket)
            found += [bucket] * count
    return [*found, m] if m in equal else found


def equal_buckets(
    n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """The buckets at which the library's bits are ours. The first call for a shape reads the cache
    or runs the self-test, and waits for the GPU; while a CUDA graph is captured nothing is tested
    and the answer is none, so call `prepare` before."""
    if _noted:
        if (shape := (n, k, dtype, out_dtype)) not in _noted[-1]:
            _noted[-1].append(shape)
        return ()
    key = (device.index, n, k, dtype, out_dtype, *_settings())
    if key in _found:
        return _found[key]
    stored = _read(device)
    name = f"{n} x {k}, {dtype} to {out_dtype}"
    if name not in stored:
        if torch.cuda.is_current_stream_capturing():
            return ()
        try:
            found = check((n, k, dtype, out_dtype), device)
        except torch.OutOfMemoryError:
            _log.warning("no memory to test the product %s: it runs without the library", name)
            _found[key] = ()  # of this process only
            return ()
        stored = _read(device) | {name: found}
        _write(device, stored)
    _found[key] = tuple(stored[name])
    return _found[key]


def prepare(shapes: Iterable[Shape], device: torch.device) -> None:
    """Reads or tests all of these shapes now. Before a graph is captured, and at start-up."""
    for n, k, dtype, out_dtype in shapes:
        if n % 64 == 0 and k % 64 == 0 and dtype == torch.bfloat16:
            equal_buckets(n, k, dtype, out_dtype, device)


@contextlib.contextmanager
def untested(asked: list[Shape]) -> Generator[None]:
    """Inside the block nothing is tested or looked up: every product is ours, and `asked` is told
    which ones the library might have served. For code whose kernels are not launched, of which a
    test would conclude nonsense."""
    _noted.append(asked)
    try:
        yield
    finally:
        _noted.pop()


def rehearse(shape: Shape, device: torch.device) -> None:
    """Launches the kernels of `check`, on operands without content."""
    n, k, dtype, out_dtype = shape
    kernel = importlib.import_module("suzuri.kernels.matmul.kernel")
    x_MK = torch.empty(PART, k, dtype=dtype, device=device)
    kernel.ours(x_MK, torch.empty(n, k, dtype=dtype, device=device), 1.0, out_dtype)


def check(shape: Shape, device: torch.device) -> list[int]:
    """The self-test: buckets at which library and kernel agree in every bit for every seed. Beside
    operands and one result it takes the memory of PART rows: it runs when caches may fill the
    rest."""
    n, k, dtype, out_dtype = shape
    kernel = importlib.import_module("suzuri.kernels.matmul.kernel")
    x_MK = torch.empty(BUCKETS[0], k, dtype=dtype, device=device)
    w_NK = torch.empty(n, k, dtype=dtype, device=device)
    actual = torch.empty(BUCKETS[0], n, dtype=out_dtype, device=device)
    equal: list[int] = [*BUCKETS]

    def agrees(bucket: int) -> bool:
        for first in range(0, bucket, PART):
            expected = kernel.ours(x_MK[first : first + PART], w_NK, 1.0, out_dtype)
            end = min(first + PART, bucket)
            if not torch.equal(actual[first:end], expected[: end - first]):
                return False
        return True

    for seed in SEEDS:
        generator = torch.Generator(device).manual_seed(seed)
        for part in w_NK.split(PART):
            part.copy_(hostile_weight(len(part), k, generator))
        for part in x_MK.split(PART):
            part.copy_(hostile_rows(len(part), k, generator))
        for bucket in tuple(equal):
            run = slice(0, bucket)
            actual.fill_(float("nan"))
            try:
                vendor(x_MK[run], w_NK, actual[run])
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError):
                return []  # this build of torch has no such product
            if not agrees(bucket):
                equal.remove(bucket)
    return equal


def hostile_weight(n: int, k: int, generator: torch.Generator) -> Tensor:
    """Weights [n, k] near 1/sqrt(k) with the second half of K repeating the first, so that rows of
    `hostile_rows` cancel against it; every fourth row has exponents all over the place."""
    device, half = generator.device, k // 2
    w = torch.randn(n, k, generator=generator, device=device) / k**0.5
    w[:, half : 2 * half] = w[:, :half]
    exponents = torch.randint(-10, 11, (1, k), generator=generator, device=device)
    w[::4] *= torch.exp2(exponents.to(w.dtype))
    return w


def hostile_rows(m: int, k: int, generator: torch.Generator) -> Tensor:
    """Rows [m, k], by turns: plain, cancelling almost to nothing, wide in exponent, and one large
    value that wipes out what was added before it and is taken away at the end."""
    device, half = generator.device, k // 2
    x = torch.randn(m, k, generator=generator, device=device)
    x[1::4, half : 2 * half] = -x[1::4, :half] + x[1::4, half : 2 * half] * 2.0**-7
    exponents = torch.randint(-12, 13, (1, k), generator=generator, device=device)
    x[2::4] *= torch.exp2(exponents.to(x.dtype))
    x[3::4, half // 2] += 4096.0
    x[3::4, half // 2 + half] -= 4096.0
    return x


def _settings() -> tuple[object, ...]:
    """What this process may change and the library's choice depends on."""
    matmul = torch.backends.cuda.matmul
    return (
        str(matmul.allow_bf16_reduced_precision_reduction),
        str(torch.backends.cuda.preferred_blas_library()),
        torch.are_deterministic_algorithms_enabled(),
    )


@cache
def _cublas() -> str:
    """The version of the loaded library, by its own word."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except OSError:
        return "unknown"
    parts: list[str] = []
    for part in range(3):
        value = ctypes.c_int(-1)
        library.cublasGetProperty(part, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)


@cache
def _sources() -> str:
    """Hash of the code whose bits and whose test the results speak of."""
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in ("kernel.py", "buckets.py"))
    return hashlib.sha256(text).hexdigest()[:16]


def fingerprint(device: torch.device) -> dict[str, object]:
    """Everything the results are valid for."""
    properties = torch.cuda.get_device_properties(device)
    prefixes = ("CUBLAS", "TORCH_BLAS", "TORCH_CUBLAS", "NVIDIA_TF32", "DISABLE_ADDMM_CUDA_LT")
    return {
        "gpu": properties.name,
        "architecture": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "cuda": str(torch.version.cuda),
        "cublas": _cublas(),
        "settings": list(_settings()),
        # They steer the library's choice of a kernel, nothing of ours.
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)},
        "sources": _sources(),
    }


def _read(device: torch.device) -> dict[str, list[int]]:
    """What is stored for this fingerprint; a file that is absent, torn or foreign holds nothing."""
    print_ = fingerprint(device)
    return parsed(read_kept(kept_file(FOLDER, print_)), print_)


def parsed(content: object, print_: dict[str, object]) -> dict[str, list[int]]:
    """The entries of a file's content that are of this fingerprint and of the right form."""
    entries = (of_fingerprint(content, print_) or {}).get("equal")
    if not isinstance(entries, dict):
        return {}
    return {
        name: found
        for name, found in entries.items()
        if isinstance(found, list) and all(type(b) is int and b in BUCKETS for b in found)
    }


def _write(device: torch.device, stored: dict[str, list[int]]) -> None:
    """Where it cannot be written the next process tests again."""
    print_ = fingerprint(device)
    write_kept(kept_file(FOLDER, print_), print_, equal=stored)
