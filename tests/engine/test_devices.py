"""A device that cannot be used is refused in words that say what to do."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from suzuri.cli import main
from suzuri.engine.devices import device_named
from suzuri.engine.llm import LLM

Patch = pytest.MonkeyPatch


def a_torch(
    patch: Patch,
    *,
    cuda: str | None,
    devices: int,
    error: str | None = None,
    capability: tuple[int, int] = (9, 0),
    shared: int = 232_448,
) -> None:
    """As if torch were built so, on a machine with so many such GPUs."""
    empty = torch.empty

    def made(*shape: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            if error is not None:
                raise RuntimeError(error)
            device = "cpu"
        return empty(*shape, device=device, **options)

    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], shared_memory_per_block_optin=shared
    )
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    patch.setattr(torch.version, "cuda", cuda)
    patch.setattr(torch.version, "hip", None)
    patch.setattr(torch.cuda, "device_count", lambda: devices)
    patch.setattr(torch, "empty", made)


@pytest.mark.parametrize("name", ["gpu", "tpu", "meta", "cuda:x", "cuda:-1", "", "mps"])
def test_no_such_device(name: str) -> None:
    with pytest.raises(ValueError, match=r"^--device X: must be cpu, cuda or cuda:N$"):
        device_named(name, "--device X")


def test_the_cpu_is_always_there() -> None:
    assert device_named("cpu", "") == torch.device("cpu")


def test_a_torch_for_the_cpu_alone(monkeypatch: Patch) -> None:
    a_torch(monkeypatch, cuda=None, devices=0)
    with pytest.raises(ValueError, match=r"^D: .*built for the CPU alone; install one .*get-start"):
        device_named("cuda", "D")


def test_machines_with_too_few_gpus_or_broken_ones(monkeypatch: Patch) -> None:
    a_torch(monkeypatch, cuda="12.8", devices=0)
    with pytest.raises(ValueError, match=r"^D: torch finds no GPU on this machine; suzuri doctor"):
        device_named("cuda:1", "D")
    a_torch(monkeypatch, cuda="12.8", devices=2)
    assert device_named("cuda", "D") == torch.device("cuda")
    assert device_named("cuda:1", "D") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"^D: torch finds 2 GPU\(s\), cuda:0 to cuda:1$"):
        device_named("cuda:2", "D")
    a_torch(monkeypatch, cuda="12.8", devices=1, error="CUDA error: busy\nmore of it")
    with pytest.raises(ValueError, match=r"cannot be used \(CUDA error: busy\); suzuri doctor"):
        device_named("cuda", "D")


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "tiny", "--prompt", "x"),
        ("verify", "tiny", "--random-weights"),
        ("convert", "tiny", "TMP/out", "--random-weights"),
    ],
)
def test_every_command_with_a_device_says_so(
    words: tuple[str, ...], monkeypatch: Patch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    a_torch(monkeypatch, cuda=None, devices=0)
    with pytest.raises(SystemExit) as end:
        main([*(word.replace("TMP", str(tmp_path)) for word in words), "--device", "cuda"])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"suzuri {words[0]}: --device cuda: the torch installed here (")
    assert "built for the CPU alone" in last
    assert not list(tmp_path.iterdir())


def test_llm_names_its_field(monkeypatch: Patch) -> None:
    a_torch(monkeypatch, cuda=None, devices=0)
    with pytest.raises(ValueError, match=r"^device = 'cuda': the torch installed here .* is built"):
        LLM(device="cuda")


def test_a_gpu_that_the_kernels_cannot_run_on_is_refused_and_an_untried_one_told(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    a_torch(monkeypatch, cuda="12.8", devices=1, capability=(7, 5), shared=65_536)
    with pytest.raises(ValueError, match=r"^D: sm_75: .*compute capability 8.0"):
        device_named("cuda", "D")
    a_torch(monkeypatch, cuda="12.8", devices=1, capability=(12, 0), shared=101_376)
    with caplog.at_level(logging.WARNING, "suzuri"):
        assert device_named("cuda", "D").type == "cuda"
    assert "sm_120" in caplog.text and "suzuri verify" in caplog.text
    caplog.clear()
    a_torch(monkeypatch, cuda="12.8", devices=1)
    assert device_named("cuda", "D").type == "cuda"
    assert not caplog.text
