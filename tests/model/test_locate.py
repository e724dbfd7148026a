"""What a MODEL argument may be: presets, paths, hub ids; with and without a network."""

import json
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from suzuri.config import parse
from suzuri.engine.config import EngineConfig
from suzuri.engine.load import load_engine
from suzuri.model import presets
from suzuri.model.config import ModelConfig, preset
from suzuri.model.locate import locate
from suzuri.model.reconcile import reconcile
from suzuri.model.tensor_names import OPTIONAL_PARTS
from suzuri.processing.tokenizer import Tokenizer
from suzuri.tools.pull.config import PullConfig
from suzuri.tools.pull.run import run_pull
from tests.tools.fake_hub import COMMIT, FakeHub, running
from tests.tools.hub_settings import BASE, SHARD, connect, environment, model_files, program

REPO = "ink/small"
NEWER = "abcdef1234567890abcdef1234567890abcdef12"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with running() as server:
        connect(monkeypatch, server, tmp_path / "home")
        yield server


def pull(*words: str) -> int:
    return run_pull(parse(PullConfig, prog="suzuri pull", args=words).resolve())


def refusal(model: str, *, weights: bool = False) -> str:
    with pytest.raises(ValueError) as caught:
        locate(model, weights=weights)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_preset() -> None:
    found = locate("tiny")
    assert (found.name, found.kind, found.folder) == ("tiny", "preset", None)
    assert found.config == preset("tiny")
    assert "did you mean 'tiny'?" in refusal("tinny")
    assert "written owner/name" in refusal("gpt2")
    assert "a shape without weights" in refusal("tiny", weights=True)


@pytest.mark.parametrize("name", ["nano", "inkling-nano"])
def test_the_model_that_comes_with_the_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for weights in (False, True):
        found = locate(name, weights=weights)
        assert (found.name, found.kind) == ("inkling-nano", "preset")
        assert found.folder is not None and found.folder.parent.parent.name == "suzuri"
        # The shape is the preset's, so that it is the same with --random-weights.
        assert found.config == preset("inkling-nano") == ModelConfig.from_file(found.folder)
    plan = reconcile(found.config, found.checkpoint(), frozenset(OPTIONAL_PARTS))
    assert plan.parts == {"text", *OPTIONAL_PARTS} and not plan.notes
    sizes = [path.stat().st_size for path in found.folder.iterdir()]
    assert max(sizes) < 16 * 2**20 and sum(sizes) < 32_000_000
    shutil.copytree(BASE, tmp_path / name)
    assert locate(name).kind == "folder"


def test_an_installation_without_its_weights_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(presets.SHIPPED, "inkling-nano", tmp_path)
    monkeypatch.chdir(tmp_path)
    said = f"the weights of 'nano' are not in this installation ({tmp_path} has no config.json)"
    assert said in refusal("nano", weights=True)
    with pytest.raises(ValueError) as caught:
        load_engine("nano", EngineConfig(), Tokenizer())
    assert said in str(caught.value)
    assert locate("nano").config == preset("inkling-nano")  # the shape is there all the same


def test_the_parent_of_model_folders_points_to_them(tmp_path: Path) -> None:
    golden = BASE.parent
    near = f"did you mean one of {golden / 'original'}, {golden / 'transformers'}?"
    for weights in (False, True):
        assert refusal(str(golden), weights=weights) == f"{golden} has no config.json; {near}"
    assert f"did you mean one of {golden.parent}/alldense/original, " in refusal(str(golden.parent))
    assert "and 9 more?" in refusal(str(golden.parent))
    (tmp_path / "a").mkdir()
    shutil.copy(BASE / "config.json", tmp_path / "a")
    assert refusal(str(tmp_path)) == f"{tmp_path} has no config.json; did you mean {tmp_path}/a?"
    assert "config.json: no such file" in refusal(str(golden / "original" / ".." / ".." / "media"))


def test_a_folder_and_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mein modell ö"
    shutil.copytree(BASE, folder)
    for word in (str(folder), f"{folder}/"):
        found = locate(word, weights=True)
        assert (found.name, found.kind, found.folder) == ("mein modell ö", "folder", folder)
        assert found.config == ModelConfig.from_file(BASE)
    alone = locate(str(folder / "config.json"))
    assert (alone.name, alone.kind, alone.folder) == ("mein modell ö", "config", None)
    shutil.copy(BASE / "config.json", tmp_path / "other.json")
    assert locate(str(tmp_path / "other.json")).name == "other"
    assert "a shape without weights" in refusal(str(tmp_path / "other.json"), weights=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/mein modell ö").folder == folder
    assert locate("./mein modell ö").name == "mein modell ö"
    monkeypatch.chdir(folder)
    assert locate(".").name == "mein modell ö"


def test_an_existing_path_wins_over_a_preset_and_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(BASE, tmp_path / "tiny")
    shutil.copytree(BASE, tmp_path / "ink" / "small")
    monkeypatch.chdir(tmp_path)
    assert locate("tiny").kind == locate("ink/small").kind == "folder"


@pytest.mark.parametrize(
    "word",
    [
        *("./x", "../x", "/no/such", "~/no-such-folder", "x.json", "a/b.json", "a/b/c", "a/b/"),
        *("a\\b", "a/model.safetensors", ".x"),
    ],
)
def test_what_looks_like_a_path_is_not_asked_of_the_hub(
    hub: FakeHub, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # whatever lies beside the checkout
    assert "this path does not exist" in refusal(word)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("", "MODEL is empty"),
        ("  ", "MODEL is empty"),
        ("a b/c", "not the id of a model"),
        ("模型/x", "not the id of a model"),
        ("a/b@", "cannot be a branch"),
        ("a/b@x y", "cannot be a branch"),
        ("a/..", "not the id of a model"),
        ("hf://ink/small", "give the model's id alone, like 'ink/small'"),
        ("https://huggingface.co/ink/small", "give the model's id alone, like 'ink/small'"),
        ("~nobody-of-that-name/x", "~nobody-of-that-name/x"),
        ("x" * 5000, "cannot be looked at"),
        ("a\0b", "no preset"),
    ],
)
def test_odd_words_are_refused_in_words(hub: FakeHub, word: str, said: str) -> None:
    assert said in refusal(word)
    assert hub.requests == []


def test_odd_things_at_a_path(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    assert "is a broken link" in refusal(str(tmp_path / "broken"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert str(tmp_path / "loop") in refusal(str(tmp_path / "loop"))
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(str(tmp_path / "empty"))
    assert f"give the folder that holds it: {BASE}" in refusal(str(BASE / SHARD))
    assert "not a file" in refusal("/dev/null")
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json" in refusal(str(tmp_path / "bad.json"))


def test_of_a_hub_model_only_the_config_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    side = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}}
    hub.repos[REPO].files["hf_quant_config.json"] = json.dumps(side).encode()
    found = locate(REPO)
    assert (found.name, found.kind) == (REPO, "hub")
    assert found.folder is not None
    assert found.config == ModelConfig.from_file(found.folder)
    assert found.config.text == ModelConfig.from_file(BASE).text
    assert sorted(path.name for path in found.folder.iterdir()) == [
        *("config.json", "hf_quant_config.json")
    ]
    assert {sent.name for sent in hub.sent} == {"config.json", "hf_quant_config.json"}
    hub.forget()
    assert locate(REPO) == found
    assert hub.sent == [] and len(hub.requests) == 1
    text = refusal(REPO, weights=True)
    assert "not complete in the hub's cache" in text and text.endswith(f"suzuri pull {REPO}")


def test_weights_that_were_never_pulled(hub: FakeHub, tmp_path: Path) -> None:
    text = refusal(f"{REPO}@v1", weights=True)
    assert text.endswith(f"fetch it with: suzuri pull {REPO}@v1") and str(tmp_path) in text
    assert hub.requests == []


def test_pulled_weights_are_used_without_asking_and_stay_what_they_were(
    hub: FakeHub, tmp_path: Path
) -> None:
    """A newer commit on the hub changes what a plan sees, not what a server loads."""
    assert pull(REPO) == 0
    pulled = locate(REPO, weights=True).folder
    hub.repos[REPO].commits["main"] = NEWER
    hub.repos[REPO].files["config.json"] = model_files()["config.json"] + b"\n"
    planned = locate(REPO).folder
    hub.forget()
    assert planned is not None and planned.name == NEWER
    assert locate(REPO, weights=True).folder == pulled
    assert hub.requests == []


def test_a_pulled_model_with_a_cut_shard_is_refused(hub: FakeHub) -> None:
    """W01: by name, with the way on."""
    assert pull(REPO) == 0
    folder = locate(REPO, weights=True).folder
    assert folder is not None
    os.truncate(folder / SHARD, 1_000_000)
    text = refusal(REPO, weights=True)
    assert f"{SHARD} is cut off" in text and f"suzuri pull {REPO}" in text
    assert pull(REPO) == 0
    assert locate(REPO, weights=True).folder == folder


@pytest.mark.parametrize("how", ["offline", "unreachable", "500", "429", "slow", "no hub"])
def test_without_an_answer_the_cached_copy_is_used_and_said_so(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    found = locate(REPO)
    caplog.set_level(logging.INFO, logger="suzuri")
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "unreachable":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    elif how == "slow":
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
        hub.trouble.holds_list = True
    elif how == "no hub":
        hub.trouble.body = b"<html>"
    else:
        hub.trouble.status["list"] = [(int(how), {})]
    assert locate(REPO) == found
    assert f"using the cached copy of commit {COMMIT}" in caplog.text
    assert locate(f"{REPO}@{COMMIT}") == found
    text = refusal("ink/other")
    assert "No copy of ink/other is in the cache" in text
    assert "there is no folder ink/other here" in text


def test_a_refusal_is_not_papered_over_with_the_cached_copy(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    locate(REPO)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "refuses the token" in refusal(REPO)
    monkeypatch.delenv("HF_TOKEN")
    assert "has no revision 'v9'" in refusal(f"{REPO}@v9")
    hub.repos[REPO].token = "hf_other"
    assert "a private one looks the same" in refusal(REPO)


def test_a_gated_model(hub: FakeHub) -> None:
    hub.repos[REPO].gated = True
    assert f"accept its terms at {hub.url}/{REPO}; then log in" in refusal(REPO)


def test_a_hub_model_of_another_family_or_without_config(hub: FakeHub) -> None:
    hub.repos[REPO].files["config.json"] = b'{"model_type": "llama"}'
    text = refusal(REPO)
    assert text.startswith(f"{REPO}: ") and "llama" in text
    del hub.repos[REPO].files["config.json"]
    assert "has no config.json at main" in refusal(REPO)


def test_a_preset_costs_no_import_of_the_hub_and_none_costs_torch(
    hub: FakeHub, tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom suzuri.model.locate import locate\nlocate('tiny')\n"
        "assert not {'huggingface_hub', 'torch', 'httpx', 'httpx2'} & set(sys.modules)\n"
        "print(locate('ink/small').folder)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        program(code),
        env=environment(hub, tmp_path / "home"),
        capture_output=True,
        check=False,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"snapshots/{COMMIT}")
