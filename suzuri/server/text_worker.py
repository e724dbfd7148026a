"""The text process: encodes texts and renders conversations, one question after the other.

Started by text_client.py as `python -m suzuri.server.text_worker`; questions come on standard
input, answers go to what was standard output. It ends when its input ends.
"""

import json
import os
import sys

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
    Encode,
    Prompts,
    Question,
    Render,
    Setup,
    Table,
    Wrong,
    framed,
)

LONGEST_TOKEN = 128
"""Bytes of the longest token of o200k."""


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


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
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
            answer: Answer = worker.table()
        else:
            answer = worker.answer(question)
        answers.write(framed(answer))
        answers.flush()


if __name__ == "__main__":
    main()
