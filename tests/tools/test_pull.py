"""`suzuri pull` against a hub on this machine: what arrives, what is asked for again, and what not.

The words for a hub that refuses are in test_pull_refusals.py.
"""

import dataclasses
import hashlib
import json
import signal
import subprocess
from pathlib import Path

import huggingface_hub
import pytest

from suzuri.model.locate import locate
from suzuri.tools.pull import fetch
from suzuri.tools.pull.choice import amount
from tests.tools.fake_hub import COMMIT, FakeHub, Sent, blob_id
from tests.tools.hub_settings import INDEX, SHARD, environment, model_files, program, pull
from tests.waiting import PATIENCE, until

REPO = "ink/small"
OTHER_COMMIT = "abcdef1234567890abcdef1234567890abcdef12"
COMMAND = """
import sys
from suzuri.config import parse
from suzuri.log import start_logging
from suzuri.tools.pull.run import run_pull
from suzuri.tools.pull.config import PullConfig
start_logging()
sys.exit(run_pull(parse(PullConfig, prog="suzuri pull", args=sys.argv[1:]).resolve()))
"""


def snapshot(tmp_path: Path, commit: str = COMMIT) -> Path:
    return tmp_path / "home" / "hub" / "models--ink--small" / "snapshots" / commit


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a model folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def unfinished(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.suzuri.incomplete"))


def test_a_pulled_model_is_whole_and_every_other_program_finds_it(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull(REPO) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    folder = snapshot(tmp_path)
    assert lines[-1] == f"OK: {REPO} at {COMMIT[:12]} is complete: {folder}"
    assert (
        "8 layers of width 64, 8 experts, 2 per token, images, audio, 3 draft depths"
        in "\n".join(lines)
    )
    assert contents(folder) == model_files()
    assert {sent.name: sent.count for sent in hub.sent if sent.count} == {
        name: len(data) for name, data in model_files().items() if data
    }
    assert unfinished(tmp_path) == []
    # The hub's own library takes it for its own work, and fetches no byte of it again.
    hub.forget()
    assert Path(huggingface_hub.snapshot_download(REPO)) == folder
    assert Path(huggingface_hub.hf_hub_download(REPO, SHARD)) == folder / SHARD
    assert hub.sent == []
    located = locate(REPO, weights=True)
    assert (located.kind, located.name, located.folder) == ("hub", REPO, folder)


@pytest.mark.parametrize("to", [False, True])
def test_a_complete_model_is_left_alone(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: bool
) -> None:
    words = (REPO, "--to", str(tmp_path / "a folder")) if to else (REPO,)
    assert pull(*words) == 0
    hub.forget()
    capsys.readouterr()
    assert pull(*words) == 0
    out = capsys.readouterr().out
    assert "already complete: nothing to fetch" in out and "OK: " in out
    assert [method for method, _ in hub.requests] == ["GET"]
    assert hub.sent == []


@pytest.mark.parametrize("to", [False, True])
def test_ctrl_c_keeps_the_bytes_and_the_next_run_asks_for_the_rest_only(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: bool
) -> None:
    hub.trouble.hold_after[SHARD] = 3 * fetch.PIECE
    where = tmp_path / "out" if to else snapshot(tmp_path)
    words = (REPO, "--to", str(where)) if to else (REPO,)
    process = subprocess.Popen(
        [*program(COMMAND), *words],
        env=environment(hub, tmp_path / "home"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    digest = hashlib.sha256(model_files()[SHARD]).hexdigest()
    parts: list[Path] = []

    def has_come() -> bool:
        assert process.poll() is None
        parts[:] = tmp_path.rglob(f"{digest}.suzuri.incomplete")
        return bool(parts) and parts[0].stat().st_size > fetch.PIECE

    until(has_come)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted" in err and "The same command goes on from there" in err
    assert "Traceback" not in err
    have = parts[0].stat().st_size
    assert not (where / SHARD).exists()
    hub.go_on.set()
    until(lambda: hub.bytes_of(SHARD))  # the hub has seen it go
    hub.trouble.hold_after.clear()
    hub.forget()
    assert pull(*words) == 0
    size = len(model_files()[SHARD])
    assert [sent for sent in hub.sent if sent.name == SHARD] == [Sent(SHARD, have, size - have)]
    assert fetch.PIECE < have < size
    assert contents(where) == model_files()


def test_a_line_that_is_cut_again_and_again_is_taken_up_where_it_broke(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.trouble.cut_after[SHARD] = [600_000, 300_000, 0, 100_000]
    assert pull(REPO) == 0
    sent = [sent for sent in hub.sent if sent.name == SHARD]
    assert len(sent) == 5 and sent[0].start == 0 and all(one.start > 0 for one in sent[1:])
    size = len(model_files()[SHARD])
    # Only what was on its way when the line broke is sent twice.
    assert size <= hub.bytes_of(SHARD) < size + 5 * fetch.PIECE
    assert contents(snapshot(tmp_path)) == model_files()


def test_a_server_without_ranges_sends_all_again_and_nothing_is_doubled(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.trouble.ignore_range = True
    hub.trouble.cut_after[SHARD] = [600_000]
    assert pull(REPO) == 0
    assert [sent.start for sent in hub.sent if sent.name == SHARD] == [0, 0]
    assert contents(snapshot(tmp_path)) == model_files()


def test_a_huge_file_is_asked_for_in_several_requests(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LARGEST_REQUEST", 500_000)
    assert pull(REPO) == 0
    size = len(model_files()[SHARD])
    assert [sent for sent in hub.sent if sent.name == SHARD] == [
        Sent(SHARD, 0, 500_000),
        Sent(SHARD, 500_000, 500_000),
        Sent(SHARD, 1_000_000, size - 1_000_000),
    ]
    assert contents(snapshot(tmp_path)) == model_files()


def test_a_partial_file_that_is_too_long_or_of_other_bytes_is_given_up(
    hub: FakeHub, tmp_path: Path
) -> None:
    """Left by a full disk or another program: the hash tells, and the file comes from zero."""
    listed = {name: data for name, data in model_files().items()}
    blobs = snapshot(tmp_path).parent.parent / "blobs"
    blobs.mkdir(parents=True)
    config = blobs / f"{blob_id(listed['config.json'])}.suzuri.incomplete"
    config.write_bytes(b"x" * 5000)
    index = blobs / f"{blob_id(listed[INDEX])}.suzuri.incomplete"
    index.write_bytes(b"x" * 5000)
    assert pull(REPO) == 0
    assert [sent.start for sent in hub.sent if sent.name == "config.json"] == [0]
    assert [sent.start for sent in hub.sent if sent.name == INDEX] == [5000, 0]
    assert contents(snapshot(tmp_path)) == listed


def test_a_file_that_arrives_damaged_is_fetched_again(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.trouble.corrupt = {SHARD: 1, "config.json": 1}
    assert pull(REPO) == 0
    assert "config.json arrived damaged" in caplog.text and f"{SHARD} arrived" in caplog.text
    assert contents(snapshot(tmp_path)) == model_files()


def test_a_file_that_stays_damaged_is_refused_by_name_and_the_others_are_kept(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.trouble.corrupt = {SHARD: 1000}
    with pytest.raises(ValueError, match=f"1 of 6 files cannot be had. {SHARD} arrived damaged"):
        pull(REPO)
    there = contents(snapshot(tmp_path))
    assert there == {name: data for name, data in model_files().items() if name != SHARD}
    with pytest.raises(ValueError, match=r"not complete.*suzuri pull ink/small"):
        locate(f"{REPO}@{COMMIT}", weights=True)
    hub.trouble.corrupt = {}
    hub.forget()
    assert pull(REPO) == 0
    assert {sent.name for sent in hub.sent} == {SHARD}


def test_no_verify_hashes_nothing(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble.corrupt = {"tokenizer_config.json": 1}
    assert pull(REPO, "--no-verify") == 0
    assert contents(snapshot(tmp_path))["tokenizer_config.json"] == b"{|"
    assert pull(REPO, "--verify") == 0
    assert contents(snapshot(tmp_path)) == model_files()


@pytest.mark.parametrize("to", [False, True])
def test_bytes_that_rotted_on_the_disk_are_found_by_verify(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, to: bool
) -> None:
    folder = tmp_path / "out" if to else snapshot(tmp_path)
    words = (REPO, "--to", str(folder)) if to else (REPO,)
    assert pull(*words) == 0
    data = bytearray(model_files()[SHARD])
    data[700_000] ^= 4
    (folder / SHARD).write_bytes(data)
    hub.forget()
    assert pull(*words, "--verify") == 0
    assert f"{SHARD} is here but has not the hash" in caplog.text
    assert {sent.name for sent in hub.sent} == {SHARD}
    assert contents(folder) == model_files()


def test_a_folder_with_another_revision_of_the_same_size_is_brought_up_to_date(
    hub: FakeHub, tmp_path: Path
) -> None:
    """Weights that were trained on have the same sizes: only the hash tells them apart."""
    folder = tmp_path / "out"
    assert pull(REPO, "--to", str(folder)) == 0
    changed = model_files()
    changed[SHARD] = changed[SHARD][:-4] + b"\x01\x02\x03\x04"
    repo = hub.repos[REPO]
    hub.repos[REPO] = dataclasses.replace(
        repo, files=changed, commits={"main": OTHER_COMMIT, "v1": COMMIT}
    )
    hub.forget()
    assert pull(REPO, "--to", str(folder)) == 0
    assert {sent.name for sent in hub.sent} == {SHARD}
    assert contents(folder) == changed


def test_a_folder_filled_by_hand_is_checked_and_not_fetched(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "ordner ö"
    folder.mkdir()
    for name, data in model_files().items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_bytes(model_files()["config.json"].replace(b"64", b"32", 1))
    assert pull(REPO, "--to", str(folder)) == 0
    assert {sent.name for sent in hub.sent} == {"config.json"}
    assert contents(folder) == model_files()


def test_two_revisions_share_what_is_equal(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[REPO].commits["v1.0"] = OTHER_COMMIT
    assert pull(REPO) == 0
    hub.forget()
    assert pull(f"{REPO}@v1.0") == 0
    assert hub.sent == []
    assert contents(snapshot(tmp_path, OTHER_COMMIT)) == model_files()
    assert locate(f"{REPO}@v1.0", weights=True).folder == snapshot(tmp_path, OTHER_COMMIT)
    assert locate(f"{REPO}@{COMMIT}", weights=True).folder == snapshot(tmp_path)
    assert pull(REPO, "--revision", OTHER_COMMIT) == 0


def test_two_pulls_at_once_fetch_every_byte_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble.seconds_per_piece = 0.001
    commands = [
        subprocess.Popen(
            [*program(COMMAND), REPO],
            env=environment(hub, tmp_path / "home"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [(process.communicate(timeout=PATIENCE), process.returncode) for process in commands]
    for (out, err), code in results:
        assert code == 0, err
        assert out.strip().splitlines()[-1].startswith("OK: ")
    for name, data in model_files().items():
        assert hub.bytes_of(name) == len(data), name
    assert contents(snapshot(tmp_path)) == model_files()


def test_what_no_server_needs_is_left_out_and_named(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = hub.repos[REPO].files
    files |= {"pytorch_model.bin": b"x" * 2000, "original/a.safetensors": b"y" * 3000}
    files |= {"original/b.pth": b"z" * 3000, "chat_template.jinja": b"{{ x }}", "LICENSE": b"free"}
    assert pull(REPO) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "left out: pytorch_model.bin (2.0 kB), original/ (2 files, 6.0 kB)" in out
    assert contents(snapshot(tmp_path)) == model_files() | {
        "chat_template.jinja": b"{{ x }}",
        "LICENSE": b"free",
    }
    assert pull(REPO, "--include", "original/", "--exclude", "*.pth") == 0
    assert (snapshot(tmp_path) / "original" / "a.safetensors").read_bytes() == b"y" * 3000
    assert hub.bytes_of("original/b.pth") == hub.bytes_of("pytorch_model.bin") == 0


@pytest.mark.parametrize("to", [False, True])
def test_two_files_of_equal_contents_are_two_files(hub: FakeHub, tmp_path: Path, to: bool) -> None:
    folder = tmp_path / "out" if to else snapshot(tmp_path)
    equal = {"vocab.json": b"{1}" * 90_000, "merges.txt": b"{1}" * 90_000}
    hub.repos[REPO].files |= equal
    assert pull(REPO, *(("--to", str(folder)) if to else ())) == 0
    assert contents(folder) == model_files() | equal
    assert unfinished(tmp_path) == []


def test_leaving_out_weights_gives_no_verdict_on_the_whole(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull(REPO, "--exclude", "*.safetensors") == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("OK: 5 chosen files")
    assert hub.bytes_of(SHARD) == 0
    with pytest.raises(ValueError, match="leave none of the 7 files"):
        pull(REPO, "--include", "nothing*")


def test_a_dry_run_lists_and_fetches_nothing(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull(REPO, "--dry-run") == 0
    out = capsys.readouterr().out
    assert SHARD in out and "1.3 MB" in out
    assert "7 files, 1.6 MB: 0 bytes here, 1.6 MB to fetch into" in out and "B free)" in out
    assert hub.sent == [] and not (tmp_path / "home" / "hub").exists()


def test_a_mirror_that_lists_names_only_is_asked_for_the_rest(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[REPO].bare_list = True
    assert pull(REPO) == 0
    assert contents(snapshot(tmp_path)) == model_files()
    assert sorted(path for method, path in hub.requests if method == "HEAD") == sorted(
        f"/{REPO}/resolve/{COMMIT}/{name}" for name in model_files()
    )


def test_the_token_goes_to_the_hub_and_not_to_the_host_it_sends_on_to(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REPO].token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pull(REPO) == 0
    assert hub.leaked_tokens == 0 and hub.bytes_of(SHARD) > 0
    assert contents(snapshot(tmp_path)) == model_files()


def test_without_the_hub_a_complete_copy_counts(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull(REPO) == 0
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    capsys.readouterr()
    assert pull(REPO) == 0
    out = capsys.readouterr().out
    assert "offline mode is on" in out
    assert out.strip().splitlines()[-1].endswith("it was not compared with the hub")


def test_settings_come_from_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN, as the hub's library reads them, in a fresh process."""
    hub.repos[REPO].token = "hf_right"
    env = environment(hub, tmp_path / "elsewhere", HF_TOKEN="hf_right", HF_HUB_DISABLE_XET="1")
    done = subprocess.run(
        [*program(COMMAND), REPO],
        env=env,
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith(f"OK: {REPO}")
    found = tmp_path / "elsewhere" / "hub" / "models--ink--small" / "refs" / "main"
    assert found.read_text() == COMMIT


def test_the_index_is_there_before_the_weights(hub: FakeHub) -> None:
    """So that a stopped pull is seen to be incomplete from its headers alone."""
    assert pull(REPO, "--max-workers", "1") == 0
    order = [sent.name for sent in hub.sent]
    assert order[0] == "config.json" and order[-2:] == [SHARD, "mtp.safetensors"]
    assert json.loads(model_files()[INDEX])["weight_map"]


def test_amounts_are_decimal_and_round_to_the_unit() -> None:
    assert [amount(n) for n in (0, 999, 1000, 999_600, 531_912_898_740, 1_904_800_000_000)] == [
        *("0 bytes", "999 bytes", "1.0 kB", "1.0 MB", "531.9 GB", "1.9 TB")
    ]
