"""`suzuri inspect` beside loading: the same values checked, the same words; pipes; hints."""

import dataclasses
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from suzuri.cli import main
from suzuri.model.checkpoint_files import CheckpointError, scan
from suzuri.model.config import PRESETS, Quantization
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.tensor_table import Storage, released_nvfp4_layers, table
from suzuri.model.weights import load_weights
from suzuri.tools.inspect.config import InspectConfig
from suzuri.tools.inspect.run import run_inspect
from tests.tools.test_inspect import BASE, CONFIG, INDEX, MAIN, copied, shown, written
from tests.waiting import PATIENCE


def test_a_word_that_no_tensor_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = "nothing matched --tensors"
    for words, is_said in ((("nosuch",), True), (("gate.bias",), False), (None, False)):
        assert run_inspect(InspectConfig(model=str(BASE), tensors=words)) == 0
        assert (said in capsys.readouterr().out) == is_said
        assert run_inspect(InspectConfig(model=str(BASE), tensors=words, json=True)) == 0
        document = json.loads(capsys.readouterr().out)
        assert len(document.get("tensors", "-")) == {"nosuch": 0, "gate.bias": 6}.get(
            words[0] if words else "", 1
        )


def patched(folder: Path, name: str, data: bytes) -> Path:
    """The folder with other bytes from the beginning of one tensor on."""
    entry = scan(folder).tensors[name]
    with (folder / entry.file).open("r+b") as file:
        file.seek(entry.start)
        file.write(data)
    return folder


SMALL = "model.llm.layers.4.mlp.experts.w2_weight"


@pytest.mark.parametrize(
    ("suffix", "data", "words"),
    [
        (".scale2", struct.pack("<4f", 1, 1, 1, 0), "is 0.0 for expert 3; must be finite"),
        (".scale2", struct.pack("<f", -1), "is -1.0 for expert 0"),
        (".scale2", b"\0\0\xc0\xff", "is nan for expert 0"),
        (".scale2", struct.pack("<2f", 1, 3e38), "for expert 1; must be below 1.26e+35"),
        (".weight_global_scale", struct.pack("<2f", 1, 1e-39), "for expert 1; must be above 7.9"),
        (".input_amax", b"\xc0\xff", "is nan; the scale of activations"),
        (".original_shape", struct.pack("<q", 9), "holds [9, 64, 32]; the codes beside it are"),
    ],
)
def test_values_of_small_tensors_are_checked_as_by_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, data: bytes, words: str
) -> None:
    names = "compressed-tensors" if "weight" in suffix else "modelopt"
    entries = list(table(CONFIG, Storage(nvfp4_layers=(3, 4), names=names)))
    folder = patched(written(tmp_path / "m", entries), SMALL + suffix, data)
    code, document, text = shown(folder, capsys)
    (fault,) = document["faults"]
    assert code == 1 and SMALL + suffix in fault and words in fault
    assert "1 fault(s), first" in text.splitlines()[-1]
    with pytest.raises(CheckpointError) as caught:
        load_weights(Inkling(CONFIG), folder, want=PARTS)
    assert fault in str(caught.value)


def test_a_tower_that_the_config_lacks_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As loading has it (w06); a draft that the config lacks is not (w07)."""
    folder = copied(tmp_path)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"vision_config": None}))
    code, found, _ = shown(folder, capsys)
    (fault,) = found["faults"]
    assert code == 1 and "model.visual.* is surplus: 6 tensors" in fault and "--text-only" in fault
    (folder / "config.json").write_text(json.dumps(document | {"mtp_config": None}))
    assert shown(folder, capsys)[0] == 0


@pytest.mark.parametrize("name", ["hf_quant_config.json", INDEX, "config.json"])
def test_a_pipe_is_a_fault_and_never_opened(tmp_path: Path, name: str) -> None:
    """In a process of its own: opened, it would wait for ever."""
    folder = copied(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    commands: dict[str, list[str]] = {"inspect": []}
    commands |= {"trace": []} if name == INDEX else {"plan": ["--gpu", "h200"]}
    for command, more in commands.items():
        done = subprocess.run(
            [sys.executable, "-m", "suzuri", command, str(folder), *more],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == (1 if command == "inspect" else 2), done.stderr
        assert re.search("not a (plain )?file", " ".join((done.stdout + done.stderr).split()))


def test_random_weights_show_the_shape_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(tmp_path)
    (folder / MAIN).write_bytes(b"broken")
    assert run_inspect(InspectConfig(model=str(folder), random_weights=True)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("OK: a shape without files")
    assert run_inspect(InspectConfig(model=str(folder))) == 1


@pytest.mark.parametrize(("model", "nvfp4"), [("inkling-small", False), ("inkling", True)])
def test_the_plan_that_is_named_is_a_yes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, nvfp4: bool
) -> None:
    config = PRESETS[model]
    if nvfp4:
        said = Quantization(names="modelopt", layers=released_nvfp4_layers(config))
        config = dataclasses.replace(config, quantization=said)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert run_inspect(InspectConfig(model=str(tmp_path / "config.json"))) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "what it runs on: " in x]
    command = shlex.split(line.partition("what it runs on: suzuri plan ")[2])
    command[0] = str(tmp_path / "config.json")
    with pytest.raises(SystemExit) as ended:
        main(["plan", *command])
    assert ended.value.code == 0
