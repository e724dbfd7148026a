"""Every way in which a pull can be refused: words with the fix, no traceback, nothing left behind
that a later run would trust."""

import errno
import os
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from suzuri.model.hub_errors import HubError, in_words
from suzuri.tools.pull import fetch, places
from tests.tools.fake_hub import FakeHub, Repo
from tests.tools.hub_settings import SHARD, environment, model_files, program, pull
from tests.waiting import PATIENCE

REPO = "ink/small"


def refusal(*words: str) -> str:
    """The message of a pull that is refused, on one line."""
    with pytest.raises(ValueError) as caught:
        pull(*words)
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def point_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("", "not the id of a model"),
        ("../x", "not the id of a model"),
        ("small", "not the id of a model"),
        ("a/b/c", "not the id of a model"),
        ("a b/c", "not the id of a model"),
        ("インク/small", "not the id of a model"),
        ("a--b/c", "not the id of a model"),
        ("a/b\n", "not the id of a model"),
        ("a/b@", "cannot be a branch"),
        ("a/b@../../x", "cannot be a branch"),
        ("a/b@ x", "cannot be a branch"),
        ("https://huggingface.co/ink/small", "give the model's id alone, like 'ink/small'"),
    ],
)
def test_odd_names_are_refused_before_anything_is_asked(hub: FakeHub, word: str, said: str) -> None:
    assert said in refusal(word)
    assert hub.requests == []


def test_flags_that_cannot_be_right_are_refused_by_name(hub: FakeHub, tmp_path: Path) -> None:
    assert "--revision v2 contradicts" in refusal(f"{REPO}@v1", "--revision", "v2")
    assert "--max-workers 0" in refusal(REPO, "--max-workers", "0")
    assert "--verify and --no-verify" in refusal(REPO, "--verify", "--no-verify")
    assert "empty pattern" in refusal(REPO, "--include", "")
    assert "--revision: '../x'" in refusal(REPO, "--revision", "../x")
    (tmp_path / "file").write_text("")
    assert "is a file; give a folder" in refusal(REPO, "--to", str(tmp_path / "file"))
    assert hub.requests == []


def test_a_repository_that_is_not_there(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal("ink/smal")
    assert f"no model ink/smal at {hub.url} (401): check the spelling" in text
    assert "a private one looks the same without a token" in text
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    text = refusal("ink/smal")
    assert "(404)" in text and "looks the same to a token that may not read it" in text


def test_a_wrong_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    text = refusal(REPO)
    assert "refuses the token" in text and "/settings/tokens" in text and "HF_TOKEN" in text
    assert "wrong or has expired" in text


def test_a_token_that_no_request_can_carry(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ü“")
    assert "HF_TOKEN" in refusal(REPO)


def test_a_gated_repository(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is open, the files are not; the first small one tells."""
    hub.repos[REPO].gated = True
    text = refusal(REPO)
    assert f"is gated: accept its terms at {hub.url}/{REPO}; then log in" in text
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert "has not been let in yet" in refusal(REPO)
    assert hub.sent == []


def test_a_revision_that_is_not_there(hub: FakeHub) -> None:
    assert f"{REPO} has no revision 'v9'" in refusal(f"{REPO}@v9")


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (429, {"Retry-After": "7"}, "too many requests; try again in 7 seconds; logged in"),
        (429, {}, "too many requests; try again in some minutes"),
        (500, {}, "the trouble is on its side"),
        (503, {}, "the trouble is on its side"),
        (403, {}, "access denied"),
        (418, {}, "answers 418"),
    ],
)
def test_a_hub_that_says_no_to_the_list(
    hub: FakeHub, status: int, headers: dict[str, str], said: str
) -> None:
    hub.trouble.status["list"] = [(status, headers)]
    text = refusal(REPO)
    assert said in text and hub.url in text and str(status) in text
    assert len([path for _, path in hub.requests if path.startswith("/api/models")]) == 1


def test_a_file_that_fails_for_a_while_comes_in_the_end(hub: FakeHub, tmp_path: Path) -> None:
    wait = {"Retry-After": "0"}
    hub.trouble.status[SHARD] = [(500, {}), (429, wait), (503, {}), (200, {})]
    assert pull(REPO) == 0
    assert hub.bytes_of(SHARD) == len(model_files()[SHARD])


def test_a_file_that_fails_for_good_ends_the_pull_and_says_what_is_kept(hub: FakeHub) -> None:
    hub.trouble.status[SHARD] = [(502, {})]
    text = refusal(REPO)
    assert "answers 502" in text and "are kept; the same command goes on from there" in text
    asked = [path for _, path in hub.requests if path.endswith(SHARD)]
    assert len(asked) == fetch.MAX_FAULTS + 1
    hub.trouble.status.clear()
    hub.forget()
    assert pull(REPO) == 0
    assert hub.bytes_of("config.json") == 0


def test_an_address_where_nobody_answers(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    point_to(monkeypatch, address)
    text = refusal(REPO)
    assert f"cannot reach {address} (the mirror that HF_ENDPOINT names)" in text
    assert "or unset it" in text


@pytest.mark.parametrize("address", ["huggingface.co", "http://", "http://a:b", "ftp://x", "://"])
def test_an_endpoint_that_is_no_address(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    point_to(monkeypatch, address)
    assert f"HF_ENDPOINT = {address!r} is no address" in refusal(REPO)


def test_a_hub_that_does_not_answer_in_time(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    hub.trouble.holds_list = True
    assert "did not answer in time" in refusal(REPO)


@pytest.mark.parametrize("body", [b"<html>Log in to the hotel</html>", b"{}", b"[]", b'{"id": 1}'])
def test_something_that_is_no_hub(hub: FakeHub, body: bytes) -> None:
    hub.trouble.body = body
    assert "does not answer like a model hub" in refusal(REPO)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_a_certificate_that_nobody_trusts(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def serve() -> None:
            line, _ = plain.accept()
            with pytest.raises(OSError):
                context.wrap_socket(line, server_side=True)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        point_to(monkeypatch, f"https://127.0.0.1:{plain.getsockname()[1]}")
        text = refusal(REPO)
        thread.join(5)
    assert "the certificate of https://127.0.0.1" in text and "SSL_CERT_FILE" in text


def test_https_to_a_server_that_speaks_plain_http(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, hub.url.replace("http:", "https:"))
    assert "no secure connection to https://127.0.0.1" in refusal(REPO)


def test_offline_with_nothing_or_a_part_here(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is on (HF_HUB_OFFLINE)" in refusal(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert pull(REPO, "--exclude", SHARD) == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refusal(REPO)
    assert "offline mode is on" in text and "not complete: " in text and SHARD in text


def test_a_disk_that_is_too_small_is_told_before_the_first_byte(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = 1_000_000

    def disk_usage(path: Path) -> shutil._ntuple_diskusage:
        assert Path(path).exists()
        return shutil._ntuple_diskusage(10**9, 10**9 - free, free)

    monkeypatch.setattr(places.shutil, "disk_usage", disk_usage)
    text = refusal(REPO)
    assert "1.6 MB more are needed" in text and "1.0 MB are free there" in text
    assert "--to DIR" in text and "HF_HOME" in text
    assert hub.sent == []
    # What is here already is not needed again.
    assert pull(REPO, "--exclude", SHARD) == 0
    hub.repos[REPO].files["extra.json"] = b"x" * 310_000
    assert pull(REPO, "--exclude", SHARD) == 0
    other = str(tmp_path / "not" / "there yet")
    assert "1.7 MB more are needed" in refusal(REPO, "--to", other, "--exclude", "mtp*", "R*")
    assert not (tmp_path / "not").exists()


def test_a_disk_that_fills_up_on_the_way(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = fetch._settle

    def settle(path: Path) -> None:
        if path.exists() and path.stat().st_size > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path)

    monkeypatch.setattr(fetch, "_settle", settle)
    text = refusal(REPO)
    assert "No space left on device; free some space" in text and "are kept" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_may_not_be_written(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o500)
    assert "Permission denied" in refusal(REPO)


def test_a_cache_whose_place_is_taken_by_a_file(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "hub").write_text("")
    text = refusal(REPO)
    assert f"{tmp_path / 'home' / 'hub'}" in text and "Not a directory" in text


def test_a_token_file_that_cannot_be_read(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "home" / "token").mkdir(parents=True)
    assert f"{tmp_path / 'home' / 'token'}: Is a directory" in refusal(REPO)


def test_a_repository_without_usable_weights(hub: FakeHub) -> None:
    config = model_files()["config.json"]
    hub.repos["ink/pickle"] = Repo({"config.json": config, "pytorch_model.bin": b"x"})
    text = refusal("ink/pickle")
    assert "no *.safetensors file; there is pytorch_model.bin, a format that is not read" in text
    hub.repos["ink/below"] = Repo({"config.json": config, "fp4/a.safetensors": b"x"})
    assert "there is fp4/a.safetensors in a subfolder" in refusal("ink/below")
    hub.repos["ink/bare"] = Repo({"model.safetensors": b"x"})
    assert "has no config.json" in refusal("ink/bare")
    hub.repos["ink/empty"] = Repo({})
    assert "no *.safetensors file" in refusal("ink/empty")
    assert hub.sent == []


def test_another_family_is_told_before_its_weights_are_fetched(hub: FakeHub) -> None:
    hub.repos[REPO].files["config.json"] = b'{"model_type": "llama", "hidden_size": 64}'
    text = refusal(REPO)
    assert "ink/small cannot be used" in text and "llama" in text and "--include '*'" in text
    assert {sent.name for sent in hub.sent} == {"config.json"}


def test_a_shard_that_is_cut_short_on_the_hub_itself(hub: FakeHub) -> None:
    """The list and the hash agree with the bytes; only the header tells. (W01, W02)"""
    hub.repos[REPO].files[SHARD] = model_files()[SHARD][:-100]
    text = refusal(REPO)
    assert "as the hub lists it, and yet the model is not whole" in text
    assert f"{SHARD} is cut off: 100 bytes are missing" in text
    assert "as the hub lists it" in refusal(REPO)
    del hub.repos[REPO].files["mtp.safetensors"]
    hub.repos[REPO].files[SHARD] = model_files()[SHARD]
    hub.repos[REPO].commits["main"] = "f" * 40
    text = refusal(REPO)
    assert "mtp.safetensors" in text and "not whole" in text


@pytest.mark.parametrize("error", [-1000, 1000])
def test_a_list_that_lies_about_a_size(hub: FakeHub, error: int) -> None:
    true = len(model_files()[SHARD])
    hub.repos[REPO].listed_sizes[SHARD] = true + error
    text = refusal(REPO)
    assert f"{SHARD}: the hub lists {true + error} bytes and sends {true}" in text
    assert hub.bytes_of("mtp.safetensors") > 0


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\b.json"]
)
def test_a_list_with_a_name_that_leaves_the_folder(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.repos[REPO].files[name] = b"{}"
    assert "no safe file name" in refusal(REPO)
    assert hub.sent == [] and not list(tmp_path.rglob("*evil*"))


def test_the_command_ends_with_code_two_and_one_line(hub: FakeHub, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom suzuri import cli\n"
        "def pull(args):\n"
        "    from suzuri.config import parse\n"
        "    from suzuri.tools.pull.config import PullConfig\n"
        "    from suzuri.tools.pull.run import run_pull\n"
        "    return run_pull(parse(PullConfig, prog='suzuri pull', args=args).resolve())\n"
        "cli.COMMANDS['pull'] = pull\n"
        "cli.main(['pull', *sys.argv[1:]])"
    )
    done = subprocess.run(
        [*program(code), "ink/none"],
        env=environment(hub, tmp_path / "home"),
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("suzuri pull: no model ink/none") and done.stderr.count("\n") == 1


def test_the_default_hub_is_named_without_a_mirror() -> None:
    class ConnectError(OSError):
        pass

    ConnectError.__mro__[0].__name__ = "NetworkError"
    text = str(in_words(ConnectError("no route"), repo="a/b"))
    assert text == (
        "cannot reach https://huggingface.co for a/b: no route; check the network and HTTPS_PROXY"
    )
    assert isinstance(in_words(KeyError("x"), repo="a/b"), HubError)
