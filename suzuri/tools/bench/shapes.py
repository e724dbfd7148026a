"""The shapes of benchmarks/shapes, and figures recorded on them. No torch here."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import suzuri
from suzuri.model.config import ModelConfig, MtpConfig
from suzuri.tools.bench.cells import Cell

ROOT = Path(suzuri.__file__).parents[1]
"""The checkout, if this is one: an installed wheel has neither benchmarks nor tests."""
SHAPES = ROOT / "benchmarks" / "shapes"
NAMES = ("L6E64", "L4E256")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """A figure that another system once took: on what, how long, from which file."""

    system: str
    hardware: str
    date: str
    ms: float
    source: str


def default_models(device: str) -> tuple[str, ...]:
    """What is measured without a MODEL. Raises ValueError where the shapes are not there."""
    if device == "cpu":
        return ("tiny",)
    folders = [SHAPES / name for name in NAMES]
    if not all((folder / "config.json").is_file() for folder in folders):
        raise ValueError(
            f"{SHAPES} holds no shapes (they come with the source, not with a wheel); give a "
            "MODEL: a preset, a config.json or a folder"
        )
    return tuple(str(folder) for folder in folders)


def decoder_only(config: ModelConfig) -> ModelConfig:
    """What is measured of a model: no towers, no draft depths."""
    return dataclasses.replace(config, vision=None, audio=None, mtp=MtpConfig())


def recorded(config: ModelConfig, cell: Cell, folder: Path = SHAPES) -> list[Recorded]:
    """Figures of other systems for this cell, of every peers-*.json beside the shapes. A model is
    recognised by its numbers, not by its name."""
    if cell.kind not in ("decode", "prefill") or cell.skewed:
        return []
    found: list[Recorded] = []
    for path in sorted(folder.glob("peers-*.json")):
        document = cast(dict[str, Any], json.loads(path.read_text("utf-8")))
        for row in cast(list[dict[str, Any]], document["rows"]):
            figure = row.get("tpot_ms" if cell.kind == "decode" else "prefill_ms")
            is_cell = (row.get("B"), row.get("prompt")) == (cell.batch, cell.length)
            if figure is None or not is_cell or not _is_model(config, str(row["model"]), folder):
                continue
            # Rows of several GPUs say so in the system's name; this benchmark runs on one.
            if " TP" in str(row["peer"]):
                continue
            found.append(
                Recorded(
                    system=row["peer"],
                    hardware=document["gpu"],
                    date=document["date"],
                    ms=figure,
                    source=path.name,
                )
            )
    return found


def _is_model(config: ModelConfig, name: str, folder: Path) -> bool:
    """`name`: a folder's, with -NVFP4 behind it where the routed experts are quantised."""
    base, _, rest = name.partition("-")
    path = folder / base / "config.json"
    if rest.startswith("NVFP4") != (config.quantization is not None) or not path.is_file():
        return False
    return ModelConfig.from_file(path).text == config.text
