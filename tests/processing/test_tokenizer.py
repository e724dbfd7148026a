"""Ids of text and special ids, against tml-renderers and the recorded chats."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.config import FIRST_SPECIAL, NUM_IDS
from suzuri.processing import tokenizer as tokens
from suzuri.processing.images import num_image_tokens
from suzuri.processing.tokenizer import SPECIAL_IDS, SPECIAL_NAMES, Tokenizer

CHATS = json.loads((Path(__file__).parents[1] / "golden" / "chat.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


def test_special_ids_are_those_of_tml_renderers(tokenizer: Tokenizer) -> None:
    assert len(SPECIAL_NAMES) == len(SPECIAL_IDS) == 60
    assert set(SPECIAL_IDS) == set(tokenizer.native.special_tokens())
    for id, name in SPECIAL_NAMES.items():
        assert tokenizer.native.decode_special(id) == name
        assert SPECIAL_IDS[name] == id
        assert tokenizer.decode([id]) == f"<|{name}|>"
    assert not tokenizer.native.is_special_token(FIRST_SPECIAL - 1)
    assert not tokenizer.native.is_special_token(NUM_IDS)


def test_named_ids_are_those_of_the_chat_format(tokenizer: Tokenizer) -> None:
    named = {
        tokens.MESSAGE_USER: "message_user",
        tokens.MESSAGE_MODEL: "message_model",
        tokens.CONTENT_MODEL_END_SAMPLING: "content_model_end_sampling",
        tokens.END_MESSAGE: "end_message",
        tokens.AUDIO_END: "audio_end",
        tokens.AUDIO_SLOT: "unused_200053",
        tokens.IMAGE_SLOT: "unused_200054",
    }
    assert {id: tokenizer.native.encode_special(name) for id, name in named.items()} == {
        id: id for id in named
    }


def test_markup_in_text_stays_ordinary_text(tokenizer: Tokenizer) -> None:
    for name in SPECIAL_IDS:
        text = f"a<|{name}|>b"
        ids = tokenizer.encode(text)
        assert max(ids) < FIRST_SPECIAL
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("index", range(len(CHATS["render"])))
def test_recorded_chats_decode_to_their_text(tokenizer: Tokenizer, index: int) -> None:
    chat = CHATS["render"][index]
    assert tokenizer.decode(chat["token_ids"]) == chat["text"]


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_text_survives(text: str) -> None:
    ids = Tokenizer().encode(text)
    assert Tokenizer().decode_bytes(ids) == text.encode()
    assert Tokenizer().decode(ids) == text
    assert b"".join(map(Tokenizer().token_bytes, ids)) == text.encode()


def test_part_of_a_character_decodes_to_the_replacement_mark(tokenizer: Tokenizer) -> None:
    ids = [id for byte in "é".encode() for id in range(256) if tokenizer.token_bytes(id)[0] == byte]
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode_bytes(ids[:1]) == b"\xc3"


@pytest.mark.parametrize("wrong", [-1, 200058, 201023, 1 << 40])
def test_ids_out_of_range_are_named(tokenizer: Tokenizer, wrong: int) -> None:
    for function in (tokenizer.decode, tokenizer.decode_bytes):
        with pytest.raises(ValueError, match=rf"not token ids \(0\.\.200057\): {wrong}$"):
            function([5, wrong, 7])
    assert tokenizer.decode([]) == ""


def test_half_a_surrogate_pair_is_refused_in_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"character 2 of the text is half of a surrogate pair"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize(
    ("system", "machine", "libc"),
    [
        ("Windows", "AMD64", "no glibc"),
        ("Darwin", "x86_64", "no glibc"),
        ("Linux", "riscv64", "glibc"),
        ("Linux", "x86_64", "no glibc"),
    ],
)
def test_machines_without_a_wheel_are_named(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, libc: str
) -> None:
    monkeypatch.setitem(sys.modules, "tml_renderers.tokenizers", None)
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc" if libc == "glibc" else "", ""))
    with pytest.raises(ImportError, match=rf"not exist for this machine \({system}, {machine}"):
        Tokenizer()


def test_a_missing_package_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tml_renderers.tokenizers", None)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.39"))
    with pytest.raises(ImportError, match=r"pip install 'tml-renderers>=0\.2\.1,<0\.3'"):
        Tokenizer()


def test_image_counts_are_those_of_the_renderer(tokenizer: Tokenizer) -> None:
    from tml_renderers import chat, v0

    renderer = v0.Renderer(tokenizer.native)
    for size in [(1, 1), (39, 41), (40, 40), (80, 40), (79, 41), (513, 300), (2048, 2048)]:
        pointer = chat.ImagePointer("/none.png", chat.ImageFormat.Png, *size)
        message = chat.Message(pointer, chat.Author(chat.AuthorKind.User))
        spans, _ = renderer.render_for_completion([message])
        counts = [
            span.span.num_tokens
            for span in spans
            if isinstance(span.span, chat.ImageAssetPointerTokenSpan)
        ]
        assert counts == [num_image_tokens(size)], size


def test_the_room_loads_without_torch() -> None:
    files = Path(tokens.__file__).parent.glob("[!_]*.py")
    names = sorted(f"suzuri.processing.{path.stem}" for path in files)
    assert "suzuri.processing.vocabulary" in names
    code = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    root = Path(tokens.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
