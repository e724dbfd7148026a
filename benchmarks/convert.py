"""How long `suzuri convert` takes, against copying the same files and having them on disk.

Draws a checkpoint of some hundred MB into a folder, converts it, writes JSON; a ratio of 1 is as
fast as a copy. Caches of the system are warm, so that this is what the program itself costs.

    python benchmarks/convert.py FOLDER "2-core x86-64 CPU" benchmarks/results/convert.json [DEVICE]
"""

import contextlib
import dataclasses
import datetime
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from suzuri.config import parse
from suzuri.model.checkpoint_files import scan
from suzuri.model.config import PRESETS, ModelConfig
from suzuri.tools.convert import run_convert
from suzuri.tools.convert_config import ConvertConfig

WIDTH = 1024
REPEATS = 5


def shape() -> ModelConfig:
    """`tiny` made wide: three of its layers hold most of 0.3 GB in routed experts."""
    tiny = PRESETS["tiny"]
    assert tiny.vision is not None and tiny.audio is not None
    text = dataclasses.replace(
        tiny.text,
        hidden_size=WIDTH,
        intermediate_size=WIDTH // 2,
        dense_intermediate_size=2 * WIDTH,
        n_routed_experts=16,
    )
    return dataclasses.replace(
        tiny,
        text=text,
        vision=dataclasses.replace(tiny.vision, decoder_dmodel=WIDTH),
        audio=dataclasses.replace(tiny.audio, decoder_dmodel=WIDTH),
    )


def convert(*words: str) -> None:
    config = parse(ConvertConfig, prog="convert", args=words).resolve()
    with contextlib.redirect_stdout(io.StringIO()):
        run_convert(config)


def copy(source: Path, target: Path) -> None:
    """Plain copies, on disk before the next one begins, as conversions are."""
    target.mkdir()
    for file in source.iterdir():
        with file.open("rb") as read, (target / file.name).open("wb") as written:
            shutil.copyfileobj(read, written, 1 << 25)
            written.flush()
            os.fsync(written.fileno())


def seconds(action: Callable[[], None], target: Path, repeats: int) -> float:
    """The median."""
    found: list[float] = []
    for _ in range(repeats):
        shutil.rmtree(target, ignore_errors=True)
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(folder: Path, machine: str, result: Path, device: str = "cpu") -> None:
    source, out, other = folder / "source", folder / "out", folder / "transformers"
    document = folder / "config.json"
    folder.mkdir(parents=True)
    document.write_text(json.dumps(shape().to_dict()))
    convert(str(document), str(source), "--random-weights")
    size = sum(file.stat().st_size for file in source.iterdir())
    to_other = (str(source), str(other), "--layout", "transformers")
    to_nvfp4 = (str(source), str(out), "--experts", "nvfp4", "--device", device)
    times = {
        "copy": seconds(lambda: copy(source, out), out, REPEATS),
        "released to transformers": seconds(lambda: convert(*to_other), other, REPEATS),
        "transformers to released": seconds(
            lambda: convert(str(other), str(out), "--layout", "released"), out, REPEATS
        ),
        "released to released": seconds(lambda: convert(str(source), str(out)), out, REPEATS),
        "bf16 to NVFP4": seconds(lambda: convert(*to_nvfp4), out, 2),
    }
    tensors = scan(source).tensors
    nvfp4 = [name for name, tensor in scan(out).tensors.items() if tensor.dtype == "U8"]
    quantised = sum(tensors[name].nbytes // 2 for name in nvfp4)
    document_out = {
        "what": "seconds to convert a checkpoint, over those of copying it",
        "bytes": size,
        "quantised_values": quantised,
        "ratio_to_copy": {name: round(one / times["copy"], 2) for name, one in times.items()},
        "quantised_values_per_second": round(quantised / times["bf16 to NVFP4"], -4),
        "machine": machine,
        "device": device,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": "python benchmarks/convert.py FOLDER MACHINE OUT [DEVICE]",
        "torch": torch.__version__,
    }
    result.write_text(json.dumps(document_out, indent=1) + "\n")
    print(json.dumps(document_out, indent=1))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
