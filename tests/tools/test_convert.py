"""`suzuri convert`: the same tensors in every layout and back, in bf16 and in NVFP4."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from suzuri.kernels import nvfp4
from suzuri.model.checkpoint_files import scan
from suzuri.model.config import PRESETS, ModelConfig, MtpConfig
from suzuri.model.inkling import Inkling
from suzuri.model.locate import locate
from suzuri.model.nvfp4_scales import divisor_of
from suzuri.model.random_weights import initialize
from suzuri.model.weights import export_weights, quantised
from tests.memory import peak_growths
from tests.model import nvfp4_checkpoints as foreign
from tests.model.checkpoints import BASE, CASES, GOLDEN, Tensors, assert_same_bits, read_tensors
from tests.tools.conversions import SMALL_SHARDS, convert, file_bytes, partial, refused, run

W13 = "model.llm.layers.3.mlp.experts.w13_weight"
NVFP4 = ("--experts", "nvfp4")
BF16 = ("--experts", "bf16")
RELEASED = ("--layout", "released")
TRANSFORMERS = ("--layout", "transformers")
COMPRESSED = ("--names", "compressed-tensors")


# Layouts.


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.parent.name)
def test_to_transformers_and_back_is_equal_to_the_byte(tmp_path: Path, folder: Path) -> None:
    config = ModelConfig.from_file(folder)
    other = convert(folder, tmp_path / "transformers", *TRANSFORMERS)
    assert ModelConfig.from_file(other) == config
    golden = read_tensors(folder.parent / "transformers")
    drafts = {name: t for name, t in read_tensors(folder).items() if name.startswith("model.mtp.")}
    assert drafts and not drafts.keys() & golden.keys()
    assert_same_bits(read_tensors(other), golden | drafts)

    back = convert(other, tmp_path / "released", *RELEASED)
    assert_same_bits(read_tensors(back), read_tensors(folder))
    assert ModelConfig.from_file(back) == config
    again = convert(back, tmp_path / "again")
    assert file_bytes(again) == file_bytes(back)

    without = convert(folder, tmp_path / "without", *TRANSFORMERS, "--no-mtp")
    assert_same_bits(read_tensors(without), golden)
    assert ModelConfig.from_file(without) == dataclasses.replace(config, mtp=MtpConfig())


def test_a_text_only_model_gets_the_names_of_its_class(tmp_path: Path) -> None:
    for case, start in (("alldense", "model.layers."), ("base", "model.language_model.layers.")):
        folder = convert(GOLDEN / case / "original", tmp_path / case, *TRANSFORMERS, "--no-mtp")
        names = [name for name in read_tensors(folder) if ".layers." in name]
        assert names and all(name.startswith(start) for name in names)


def test_a_golden_transformers_folder_becomes_a_released_one(tmp_path: Path) -> None:
    folder = convert(GOLDEN / "base" / "transformers", tmp_path / "out", *RELEASED)
    expected = {n: t for n, t in read_tensors(BASE).items() if not n.startswith("model.mtp.")}
    assert_same_bits(read_tensors(folder), expected)


@pytest.mark.parametrize("size", ["0.000001", "0.0001", "0.001"])
def test_shards_of_any_size_hold_the_same(tmp_path: Path, size: str) -> None:
    folder = convert(BASE, tmp_path / "out", "--max-shard-gb", size)
    assert_same_bits(read_tensors(folder), read_tensors(BASE))
    checkpoint = scan(folder)
    for file in checkpoint.files:
        held = [tensor.nbytes for tensor in checkpoint.tensors.values() if tensor.file == file]
        assert sum(held) <= float(size) * 1e9 or len(held) <= 2  # one pair of gate and up
    assert len(checkpoint.files) > 2


# NVFP4.


def test_nvfp4_and_back_and_again(tmp_path: Path) -> None:
    first = convert(BASE, tmp_path / "first", *NVFP4)
    tensors, plain = read_tensors(first), read_tensors(BASE)
    routed = [name for name in plain if ".mlp.experts." in name]
    chosen = [name for name in routed if int(name.split(".")[3]) >= 3]
    assert 0 < len(chosen) < len(routed)
    assert [name for name in plain if tensors[name].dtype != plain[name].dtype] == chosen
    assert not any(name.endswith("input_amax") for name in tensors)
    for name in chosen:
        expected = nvfp4.quantize(plain[name])
        held = [tensors[name + suffix] for suffix in ("", ".scale", ".scale2")]
        parts = (expected.codes, expected.block_scales, expected.global_scales)
        for one, other in zip(held, parts, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
        assert tensors[name + ".original_shape"].tolist() == list(plain[name].shape)
    for name in plain.keys() - set(chosen):
        assert torch.equal(tensors[name], plain[name]), name

    wide = convert(first, tmp_path / "bf16", *BF16)
    values = read_tensors(wide)
    for name in chosen:
        parts = [tensors[name + suffix] for suffix in ("", ".scale", ".scale2")]
        assert torch.equal(values[name], foreign.plain_dequantize(*parts)), name
    assert ModelConfig.from_file(wide).quantization is None
    again = convert(wide, tmp_path / "again", *NVFP4)
    assert file_bytes(again) == file_bytes(first)
    assert file_bytes(convert(first, tmp_path / "kept", *NVFP4)) == file_bytes(first)


@pytest.mark.parametrize("names", [(), COMPRESSED])
def test_our_nvfp4_in_the_other_layout_and_back(tmp_path: Path, names: tuple[str, ...]) -> None:
    first = convert(BASE, tmp_path / "first", *NVFP4)
    other = convert(first, tmp_path / "other", *TRANSFORMERS, *names)
    stored = read_tensors(other)
    start = "model.language_model.layers.3.mlp.experts.gate_up_proj"
    assert (start + (".weight_packed" if names else ".scale2")) in stored
    back = convert(other, tmp_path / "back", *RELEASED, "--names", "modelopt")
    assert file_bytes(back) == file_bytes(first)
    # Quantising on the way gives the same as quantising first.
    at_once = convert(BASE, tmp_path / "at_once", *TRANSFORMERS, *NVFP4, *names)
    assert file_bytes(at_once) == file_bytes(other)


@pytest.mark.parametrize("activations", [True, False])
def test_a_foreign_checkpoint_is_kept_to_the_byte(tmp_path: Path, activations: bool) -> None:
    """Global scales of amax / 2688, with activation scales or without; scales of 0 dims."""
    source = foreign.quantised(tmp_path / "source", activations=activations)
    tensors = read_tensors(source)
    if not activations:  # without it there is no shape either: we write it
        for layer in foreign.LAYERS:
            for which in ("w13_weight", "w2_weight"):
                name = f"model.llm.layers.{layer}.mlp.experts.{which}"
                experts, rows, packed = tensors[name].shape
                tensors[f"{name}.original_shape"] = torch.tensor([experts, rows, 2 * packed])
    same = convert(source, tmp_path / "same")
    assert_same_bits(read_tensors(same), tensors)
    other = convert(source, tmp_path / "other", *TRANSFORMERS)
    assert_same_bits(read_tensors(convert(other, tmp_path / "back", *RELEASED)), tensors)


def awkward_scales(count: int) -> tuple[Tensor, Tensor]:
    """fp32 (scales whose nearest divisor changes their bytes but no value, ones that have none)."""
    moved: list[float] = []
    none: list[float] = []
    for bits in range(0x3E80, 0x3F80):
        scale = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16).float() / 2688
        try:
            if not torch.equal(1 / divisor_of(scale, ""), scale):
                moved.append(scale.item())
        except ValueError:
            none.append(scale.item())
    return torch.tensor(moved[:count]), torch.tensor(none[:count])


def test_foreign_scales_as_divisors_keep_values_or_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = read_tensors(BASE)[W13].shape[0]
    moved, none = awkward_scales(experts)
    assert len(moved) == experts and len(none) > 0

    def with_scales(scales: Tensor) -> foreign.Change:
        def change(tensors: Tensors) -> None:
            for name in [name for name in tensors if name.endswith(".scale2")]:
                tensors[name] = scales.clone()

        return change

    source = foreign.quantised(tmp_path / "source", change=with_scales(moved))
    other = convert(source, tmp_path / "other", *TRANSFORMERS, *COMPRESSED)
    back = read_tensors(convert(other, tmp_path / "back", *RELEASED, "--names", "modelopt"))
    before = read_tensors(source)
    changed = [name for name in before if not torch.equal(before[name], back[name])]
    assert changed and all(name.endswith(".scale2") for name in changed)
    assert back[f"{W13}.input_amax"].item() == 5.5
    wide = [convert(folder, tmp_path / f"{folder.name}_bf16", *BF16) for folder in (source, other)]
    released = convert(wide[1], tmp_path / "released", *RELEASED)
    assert_same_bits(read_tensors(released), read_tensors(wide[0]))

    moved[1] = none[0]
    source = foreign.quantised(tmp_path / "worse", change=with_scales(moved))
    error = refused(capsys, source, tmp_path / "never", *COMPRESSED)
    assert "no divisor" in error and "expert 1" in error and "gate_up" in error
    assert not partial(tmp_path / "never").exists()


def test_what_cannot_be_quantised_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, GOLDEN / "odd" / "original", tmp_path / "odd", *NVFP4)
    assert "multiple" in error and "16" in error
    error = refused(capsys, GOLDEN / "alldense" / "original", tmp_path / "dense", *NVFP4)
    assert "no routed experts from layer 3 on" in error
    error = refused(capsys, BASE, tmp_path / "names", *COMPRESSED)
    assert "--names compressed-tensors" in error and "no NVFP4 experts" in error
    assert [file.name for file in tmp_path.iterdir()] == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    """Refused by file, tensor and expert, whether they are quantised or copied."""
    model = Inkling(ModelConfig.from_file(BASE), dtype=torch.bfloat16)
    initialize(model)
    with torch.no_grad():
        model.get_parameter("decoder.layers.5.mlp.down")[2, 1, 3] = value
    export_weights(model, tmp_path / "source")
    for words in (NVFP4, TRANSFORMERS, ()):
        error = refused(capsys, tmp_path / "source", tmp_path / "out", *words, "--restart")
        where = tmp_path / "source" / "model-00001-of-00001.safetensors"
        name = "model.llm.layers.5.mlp.experts.w2_weight"
        assert f"{where}: {name} holds {value}, in expert 2; no model" in error
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.parent.name)
def test_no_tensor_is_copied_with_a_value_that_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """The tensor is named also where two make up one parameter."""
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    seen = set[str]()
    for name, entry in scan(folder).tensors.items():
        if (kind := name.split(".")[-2] + entry.dtype) in seen or entry.dtype not in NAN:
            continue
        seen.add(kind)
        count = len(NAN[entry.dtype])
        at = entry.start + entry.nbytes // count // 2 * count
        with (source / entry.file).open("r+b") as file:
            file.seek(at)
            before = file.read(count)
            file.seek(at)
            file.write(NAN[entry.dtype])
        error = refused(capsys, source, tmp_path / "out", *TRANSFORMERS, "--restart")
        assert f"{source / entry.file}: {entry.stored_name} holds nan" in error
        with (source / entry.file).open("r+b") as file:
            file.seek(at)
            file.write(before)
    assert len(seen) > 8
    convert(source, tmp_path / "out", *TRANSFORMERS, "--restart")


NAN = {"BF16": bytes((0xC0, 0x7F)), "F32": bytes((0, 0, 0xC0, 0xFF))}


def test_quantising_says_what_it_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(BASE, tmp_path / "out", *NVFP4)
    said = "NVFP4 goes where the released checkpoints have it, to the routed experts from layer 3"
    assert f"{said} on; those of layer 2 and all other weights stay bfloat16" in (
        capsys.readouterr().out
    )
    convert(tmp_path / "out", tmp_path / "again", *TRANSFORMERS)
    convert(BASE, tmp_path / "bf16")
    assert "NVFP4 goes" not in capsys.readouterr().out


def test_a_block_scale_that_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{W13}.scale"].view(torch.uint8)[1, 0, 0] = 0x7F

    source = foreign.quantised(tmp_path / "source", change=change)
    for words in ((), BF16, TRANSFORMERS):
        error = refused(capsys, source, tmp_path / "out", *words, "--restart")
        assert f"{W13}.scale holds NaN, in expert 1" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"log_scaling_n_floor": 10.5}}, "log_scaling_n_floor = 10.5"),
        ({"vision_config": None}, "vision_config.decoder_dmodel is null"),
    ],
)
def test_a_config_that_the_layout_cannot_express(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    """Found before a byte is written; nothing stays, and nothing is promised."""
    source = tmp_path / "source"
    source.mkdir()
    tensors = read_tensors(BASE)
    document = json.loads((BASE / "config.json").read_text())
    if "vision_config" in changes:
        tensors = {name: t for name, t in tensors.items() if ".visual." not in name}
        document |= changes
    else:
        document["text_config"] |= changes["text_config"]
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(document))
    capsys.readouterr()
    assert run(source, tmp_path / "out", *TRANSFORMERS) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "goes on from there" not in shown.out
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
    convert(source, tmp_path / "out", *RELEASED)


def test_text_only_leaves_the_towers_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """w06: also those that the config does not have, which are refused otherwise."""
    expected = {
        name: tensor
        for name, tensor in read_tensors(BASE).items()
        if not name.startswith(("model.visual.", "model.audio."))
    }
    source = Path(shutil.copytree(BASE, tmp_path / "source"))
    for _ in range(2):
        folder = convert(source, tmp_path / "out", "--text-only")
        assert_same_bits(read_tensors(folder), expected)
        config = ModelConfig.from_file(folder)
        assert config.vision is None and config.audio is None and config.mtp_depths == 3
        assert "vision: 6 tensors skipped, not wanted" in capsys.readouterr().out
        shutil.rmtree(folder)
        document = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(document | {"vision_config": None}))
    error = refused(capsys, source, tmp_path / "out")
    assert "model.visual.* is surplus: 6 tensors" in error and "--text-only" in error
    words = ("--random-weights", "--text-only", "--no-mtp")
    drawn = convert("tiny", tmp_path / "drawn", *words)
    config = ModelConfig.from_file(drawn)
    assert config.vision is None and config.audio is None and not config.mtp_depths


# Random weights.


def test_the_shipped_model_goes_with_its_card_and_its_shape_without(tmp_path: Path) -> None:
    trained = convert("nano", tmp_path / "trained")
    drawn = convert("nano", tmp_path / "drawn", "--random-weights")
    shipped = locate("nano", weights=True).folder
    assert shipped is not None
    assert (trained / "README.md").read_bytes() == (shipped / "README.md").read_bytes()
    assert not (drawn / "README.md").exists()
    assert_same_bits(read_tensors(trained), read_tensors(shipped))
    config = ModelConfig.from_file(drawn)
    assert config == ModelConfig.from_file(trained) == PRESETS["inkling-nano"]


@pytest.mark.parametrize("experts", ["bf16", "nvfp4"])
@pytest.mark.parametrize("layout", ["released", "transformers"])
def test_random_weights_are_those_of_a_model_in_memory(
    tmp_path: Path, layout: str, experts: str
) -> None:
    config = PRESETS["tiny"]
    if experts == "nvfp4":
        config = quantised(config)
    model = Inkling(config, dtype=torch.bfloat16)
    initialize(model, seed=7)
    export_weights(model, tmp_path / "memory", layout=layout)  # type: ignore[arg-type]
    words = ("--random-weights", "--seed", "7", "--layout", layout, "--experts", experts)
    drawn = convert("tiny", tmp_path / "drawn", *words)
    assert_same_bits(read_tensors(drawn), read_tensors(tmp_path / "memory"))
    # The same from a config.json and from a folder, whatever is in its files.
    from_file = convert(drawn / "config.json", tmp_path / "file", *words)
    assert file_bytes(from_file) == file_bytes(drawn)
    other = convert("tiny", tmp_path / "other", "--random-weights", "--seed", "8")
    from_folder = convert(other, tmp_path / "folder", *words)
    assert file_bytes(from_folder) == file_bytes(drawn)
    weight = "model.llm.layers.0.attn.wq_du.weight"
    if layout == "released":
        assert not torch.equal(read_tensors(other)[weight], read_tensors(drawn)[weight])


# Everything else in a folder.


def test_other_files_go_along_and_other_weights_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = foreign.quantised(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"shoe_size": 43}))
    along = ("tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json")
    for name in along:
        (source / name).write_text(f"this is {name}")
        (source / name).chmod(0o444)
    for name in ("model.gguf", "pytorch_model.bin", "model.onnx", "x.safetensors.part"):
        (source / name).write_bytes(b"other weights")
    (source / "original").mkdir()
    (source / ".gitattributes").write_text("hidden")
    target = convert(source, tmp_path / "out", *BF16)
    for name in along:
        assert (target / name).read_text() == f"this is {name}"
    names = {file.name for file in target.iterdir()}
    assert names == {*along, "config.json", *scan(target).files, "model.safetensors.index.json"}
    out = capsys.readouterr().out
    left = "model.gguf, model.onnx, original/, pytorch_model.bin, x.safetensors.part"
    assert f"not copied: {left}" in out
    assert "unknown keys are not carried over: shoe_size" in out
    assert "activation scales (input_amax) are dropped" in out
    assert "and 4 other files" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "gpu"), "--device gpu: "),
        (("--device", "meta"), "--device meta: must be cpu, cuda or cuda:N"),
        (("--device", "cuda:99"), "--device cuda:99: "),
        (("--max-shard-gb", "0"), "--max-shard-gb 0.0: must be from"),
        (("--max-shard-gb", "nan"), "--max-shard-gb nan: must be from"),
        (("--seed", "3"), "--seed goes with --random-weights"),
        (("--layout", "hugging"), "hugging"),
        (("--experts", "int4"), "int4"),
    ],
)
def test_flags_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    error = refused(capsys, BASE, tmp_path / "out", *words)
    assert message in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_sources_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "shape without weights" in refused(capsys, "tiny", tmp_path / "out")
    assert "no such" in refused(capsys, tmp_path, tmp_path / "out")
    error = refused(capsys, BASE / "config.json", tmp_path / "out")
    assert "shape without weights" in error
    assert list(tmp_path.iterdir()) == []


# Memory.


def growth_of_a_run(tmp_path: Path, source: Path, words: tuple[str, ...]) -> int:
    """Bytes that a conversion takes, after one of another source; a control sees a whole shard."""
    setup = f"""
from pathlib import Path
from suzuri.config import parse
from suzuri.model import transfer
from suzuri.tools.convert import run_convert
from suzuri.tools.convert_config import ConvertConfig
transfer.CHUNK_BYTES = 2 << 20
def run(source, target):
    words = (source, target, *{words!r})
    return run_convert(parse(ConvertConfig, prog="convert", args=words).resolve())
run({str(BASE)!r}, {str(tmp_path / "first")!r})
"""
    (shard,) = source.glob("*.safetensors")
    target = tmp_path / "out"
    taken, control = peak_growths(
        setup, f"run({str(source)!r}, {str(target)!r})", f"Path({str(shard)!r}).read_bytes()"
    )
    assert target.exists() and control > shard.stat().st_size * 9 // 10
    return taken


@pytest.mark.parametrize("words", [TRANSFORMERS, RELEASED])
def test_memory_stays_near_one_piece(tmp_path: Path, words: tuple[str, ...]) -> None:
    tiny = PRESETS["tiny"]
    text = dataclasses.replace(tiny.text, vocab_size=300_000, dense_intermediate_size=40_000)
    config = dataclasses.replace(tiny, text=text, vision=None, audio=None, mtp=MtpConfig())
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    other = TRANSFORMERS if words == RELEASED else RELEASED
    source = convert(tmp_path / "config.json", tmp_path / "source", "--random-weights", *other)
    assert sum(file.stat().st_size for file in source.glob("*.safetensors")) > 75 << 20
    assert growth_of_a_run(tmp_path, source, words) < 16 << 20


def test_memory_stays_near_one_expert_when_quantising(tmp_path: Path) -> None:
    tiny = PRESETS["tiny"]
    text = dataclasses.replace(tiny.text, intermediate_size=256, n_routed_experts=160)
    config = dataclasses.replace(tiny, text=text, vision=None, audio=None, mtp=MtpConfig())
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    source = convert(tmp_path / "config.json", tmp_path / "source", "--random-weights")
    assert sum(file.stat().st_size for file in source.glob("*.safetensors")) > 45 << 20
    assert growth_of_a_run(tmp_path, source, NVFP4) < 24 << 20


def test_progress_reaches_the_end_in_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("suzuri.tools.convert_progress.LINE_SECONDS", 0.0)
    convert(BASE, tmp_path / "out", *SMALL_SHARDS)
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("writing: ")]
    parts = [int(line.split("(")[1].split("%")[0]) for line in shown]
    assert len(parts) > 10 and parts == sorted(parts) and parts[-1] == 100
    assert lines[-1].startswith(f"wrote {tmp_path / 'out'}: released layout, bfloat16 weights, ")
