"""The text process: encodes texts and renders conversations, one question after the other.

Started by text_client.py as `python -m suzuri.server.text_worker`; questions come on standard
input, answers go to what was standard output. It ends when its input ends.
"""

import json
import os
import sys
import threading
import time
from typing import BinaryIO

import msgspec

from suzuri.engine.messages import MediaInput
from suzuri.engine.prompts import Prepared, prepare_chat
from suzuri.engine.request import Media
from suzuri.log import start_logging
from suzuri.model.config import NUM_IDS
from suzuri.processing.chat import ChatRenderer
from suzuri.processing.media import MediaReader
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import vocabulary_of
from suzuri.server.text_messages import (
    LENGTH_BYTES,
    Answer,
    Beat,
    Encode,
    Prompts,
    Question,
    Render,
    Said,
    Setup,
    Table,
    Wrong,
    framed,
)

LONGEST_TOKEN = 128
"""Bytes of the longest token of o200k."""
BEAT_SECONDS = 0.25


class TextWorker:
    """Set up once, with the shape of the model that the engine has loaded."""

    def __init__(self, setup: Setup, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._most = setup.max_tokens
        self._vocabulary = vocabulary_of(setup.config.kept_vocabulary, tokenizer.token_bytes)
        self._reader = MediaReader(setup.config, local_files=False)
        self._renderer = ChatRenderer(tokenizer, setup.config, local_files=False)

    def answer(self, question: Question) -> Answer:
        try:
            match question:
                case Encode(texts):
                    return Prompts([self._encode(text) for text in texts])
                case Render():
                    prepared = self._render(question)
                    return Prompts([prepared.token_ids], [_input(item) for item in prepared.media])
                case Setup():
                    raise ValueError("set up already")
        except ValueError as error:
            return Wrong(str(error))

    def table(self) -> Table:
        return Table([self._tokenizer.token_bytes(id) for id in range(NUM_IDS)])

    def _encode(self, text: str) -> list[int]:
        if len(text) > self._most * LONGEST_TOKEN:
            raise ValueError(
                f"the prompt has {len(text)} characters, which is more than {self._most} tokens, "
                "the most that fit; shorten it"
            )
        return self._vocabulary.expand(self._tokenizer.encode(text))

    def _render(self, question: Render) -> Prepared:
        rendered = self._renderer.render(
            json.loads(question.messages),
            json.loads(question.tools),
            question.effort,
            question.add_generation_prompt,
            max_tokens=self._most,
        )
        return prepare_chat(rendered, self._vocabulary, self._reader)


def _input(item: Media) -> MediaInput:
    return MediaInput(
        index=item.index,
        count=item.count,
        kind=item.kind,
        digest=item.digest,
        dtype=str(item.inputs.dtype),
        shape=tuple(item.inputs.shape),
        data=item.inputs.tobytes(),
    )


class _Answers:
    """Where answers go, and from `start_beats` on a sign of life every BEAT_SECONDS."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def send(self, message: Said) -> None:
        data = framed(message)
        with self._lock:
            self._file.write(data)
            self._file.flush()

    def start_beats(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.send(Beat())
            except OSError:
                return  # the server has gone, and the input will end too


def main() -> None:
    """Answer until the input ends."""
    answers = _Answers(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what a library prints must not come between the answers
    questions = sys.stdin.buffer
    start_logging()
    decode = msgspec.msgpack.Decoder(Question).decode
    worker: TextWorker | None = None
    tokenizer = Tokenizer()
    while len(head := questions.read(LENGTH_BYTES)) == LENGTH_BYTES:
        question = decode(questions.read(int.from_bytes(head, "little")))
        if worker is None:
            assert isinstance(question, Setup), "the first message is the setup"
            worker = TextWorker(question, tokenizer)
            answers.send(worker.table())
            answers.start_beats()
        else:
            answers.send(worker.answer(question))


if __name__ == "__main__":
    main()
