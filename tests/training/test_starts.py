"""What a run may start from, and what becomes of what it trained: layouts, parts, NVFP4."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from suzuri.model.config import ModelConfig
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.weights import load_weights
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.tools.convert import run_convert
from suzuri.tools.convert_config import ConvertConfig
from suzuri.training.checkpoint import content_hash
from suzuri.training.config import SftConfig, TrainingConfig
from suzuri.training.sft import run_sft
from suzuri.training.trainer import LocalTrainer
from suzuri.types import AdamParams
from tests.training.samples import samples, trainer


def trained(folder: Path) -> LocalTrainer:
    """A step on tiny, towers and draft depths included, and its weights in `folder`."""
    subject = trainer(draft_loss_weight=0.5, bias_rate=0.1)
    subject.forward_backward(samples(), "cross_entropy")
    subject.optim_step(AdamParams(learning_rate=1e-2))
    subject.publish_weights(folder)
    return subject


def convert(source: Path, destination: Path, **fields: Any) -> str:
    assert run_convert(ConvertConfig(source=str(source), destination=destination, **fields)) == 0
    return str(destination)


def run(model: Path | str, run_dir: Path, **fields: Any) -> Path:
    data = run_dir.parent / "data.jsonl"
    data.write_text('{"text": "Ink is ground on a stone."}\n{"text": "Then one writes."}\n')
    config = SftConfig(
        model=str(model), dtype="float32", train=(str(data),), run_dir=str(run_dir), steps=2
    )
    assert run_sft(dataclasses.replace(config, **fields).resolve()) == 0
    return run_dir


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").open()]


def test_a_run_from_either_layout_has_the_same_bits(tmp_path: Path) -> None:
    """And what it trained comes back from the other layout as it was, all parts of it."""
    trained(tmp_path / "released")
    convert(tmp_path / "released", tmp_path / "theirs", layout="transformers")
    options: dict[str, Any] = {"trainer": TrainingConfig(draft_loss_weight=0.1)}
    found = [
        run(tmp_path / name, tmp_path / f"run-{name}", **options) for name in ("released", "theirs")
    ]
    assert losses(found[0]) == losses(found[1])
    hashes = [json.loads((one / "weights.json").read_text())["content_hash"] for one in found]
    assert hashes[0] == hashes[1]
    convert(found[0] / "weights", tmp_path / "out", layout="transformers")
    back = Inkling(ModelConfig.from_file(tmp_path / "out"), dtype=torch.float32)
    load_weights(back, tmp_path / "out", want=PARTS)
    assert content_hash(back) == hashes[0]


def test_quantised_experts_are_trained_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    trained(tmp_path / "released")
    convert(tmp_path / "released", tmp_path / "small", experts="nvfp4")
    folder = run(tmp_path / "small", tmp_path / "run")
    shape = ModelConfig.from_file(tmp_path / "small")
    before = Inkling(shape, dtype=torch.float32, dequantized=True)
    load_weights(before, tmp_path / "small", want=PARTS)
    after = Inkling(ModelConfig.from_file(folder / "weights"), dtype=torch.float32)
    load_weights(after, folder / "weights", want=PARTS)
    moved = {
        name
        for (name, x), (_, y) in zip(
            before.named_parameters(), after.named_parameters(), strict=True
        )
        if not torch.equal(x, y)
    }
    assert any(".experts" in name or "gate_up" in name for name in moved)


def held_in_nvfp4(folder: Path) -> LocalTrainer:
    model = Inkling(ModelConfig.from_file(folder), dtype=torch.float32)
    load_weights(model, folder, want=PARTS)
    return LocalTrainer(model, TrainingConfig(), FullVocabulary())


def test_quantised_experts_that_stay_are_part_of_states_and_hashes(tmp_path: Path) -> None:
    """Held as they are they take no gradient; all else learns beside them."""
    trained(tmp_path / "released")
    convert(tmp_path / "released", tmp_path / "small", experts="nvfp4")
    subject = held_in_nvfp4(tmp_path / "small")
    codes = {name: x for name, x in subject.model.named_buffers() if name.endswith("codes")}
    assert codes
    before = {name: x.clone() for name, x in codes.items()}
    subject.forward_backward(samples(), "cross_entropy")
    subject.optim_step(AdamParams(learning_rate=1e-2))
    assert all(torch.equal(x, before[name]) for name, x in codes.items())
    subject.save_state(tmp_path / "state")
    digest = subject.publish_weights(tmp_path / "out")
    served = held_in_nvfp4(tmp_path / "out")
    assert content_hash(served.model) == digest
    other = held_in_nvfp4(tmp_path / "small")
    for _, x in other.model.named_buffers():
        x.zero_()
    assert content_hash(other.model) != digest
    other.load_state(tmp_path / "state")
    assert content_hash(other.model) == digest


def test_parts_that_the_files_lack_are_not_trained(tmp_path: Path) -> None:
    trained(tmp_path / "released")
    bare = convert(tmp_path / "released", tmp_path / "bare", mtp=False, text_only=True)
    weights = run(bare, tmp_path / "run") / "weights"
    config = ModelConfig.from_file(weights)
    assert config.vision is None
    assert config.mtp.num_nextn_predict_layers == 0
    with pytest.raises(ValueError, match=r"draft_loss_weight = 0\.1: this model has no draft"):
        run(bare, tmp_path / "other", trainer=TrainingConfig(draft_loss_weight=0.1))
    picture = [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]
    line = {
        "messages": [
            {"role": "user", "content": picture},
            {"role": "assistant", "content": "Blue."},
        ]
    }
    data = tmp_path / "media.jsonl"
    data.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"media\.jsonl:1: .*no vision tower"):
        run(bare, tmp_path / "third", train=(str(data),))
