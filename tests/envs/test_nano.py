"""The shape and the vocabulary of inkling-nano."""

import importlib.util
from pathlib import Path
from typing import Any

from suzuri.envs.mixture import Mixture
from suzuri.model.config import FIRST_SPECIAL, NUM_IDS, ModelConfig, preset
from suzuri.model.tensor_table import table
from suzuri.processing.chat import ChatRenderer
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import KeptVocabulary

NANO = preset("inkling-nano")
TOKENIZER = Tokenizer()
SCRIPT = Path(__file__).parents[2] / "scripts" / "nano_vocabulary.py"


def vocabulary() -> KeptVocabulary:
    assert NANO.kept_vocabulary is not None
    return KeptVocabulary(NANO.kept_vocabulary, TOKENIZER.token_bytes)


def script() -> Any:
    spec = importlib.util.spec_from_file_location("nano_vocabulary", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nano_has_every_layer_kind_within_its_size():
    def kinds(config: ModelConfig) -> set[tuple[bool, bool]]:
        text = config.text
        return {(text.is_local(i), text.is_dense(i)) for i in range(text.num_hidden_layers)}

    def depths(config: ModelConfig) -> set[bool]:
        return {config.depth_attention(d).is_local for d in range(config.mtp_depths)}

    large, text = preset("inkling-small"), NANO.text
    assert (kinds(NANO), depths(NANO)) == (kinds(large), depths(large))
    assert 2 <= NANO.mtp_depths <= 4 and NANO.vision is not None and NANO.audio is not None
    assert (NANO.vision.patch_size, NANO.vision.n_layers) == (40, 2)
    assert (text.n_routed_experts, text.num_experts_per_tok, text.n_shared_experts) == (16, 2, 2)
    assert text.log_scaling_n_floor == 256 and text.model_max_length >= 4096
    sizes = {entry.name: entry.num_values for entry in table(NANO)}
    total = sum(sizes.values())
    tower = sum(size for name, size in sizes.items() if name.startswith("model.visual"))
    assert 8_000_000 < total < 14_000_000 and tower < 0.22 * total
    assert 2 * total < 28_000_000 and 2 * max(sizes.values()) < 16 * 2**20


def test_the_vocabulary_has_bytes_specials_and_no_number_but_digits():
    kept = vocabulary()
    assert kept.num_rows == NANO.text.unpadded_vocab_size == NANO.text.vocab_size <= 4096
    assert kept.num_rows % 64 == 0
    for id in kept.ids:
        if 256 <= id < FIRST_SPECIAL:
            assert not any(48 <= byte <= 57 for byte in TOKENIZER.token_bytes(id))
    spelled = kept.expand(TOKENIZER.encode("31415 apples"))
    assert [TOKENIZER.decode([id]) for id in spelled] == ["3", "1", "4", "1", "5", " apples"]


def test_the_file_is_what_the_script_writes():
    kept = [id for id in vocabulary().ids if 256 <= id < FIRST_SPECIAL]
    module = script()
    assert module.source(kept) == module.FILE.read_text("utf-8")


def test_tasks_are_spelled_mostly_in_kept_words():
    """Fails when generators say much that the vocabulary was not chosen for: write it again."""
    kept = set(vocabulary().ids)
    renderer = ChatRenderer(TOKENIZER, NANO)
    words = missing = longest = 0
    mixture = Mixture(seed=9, split="held_out")
    for position in range(500):
        task = mixture.task(position)
        whole = [*task.messages, *task.target]
        tools = list(task.tools) or None
        ids = renderer.render(whole, tools, task.effort, add_generation_prompt=False).token_ids
        spelled = vocabulary().expand(ids)
        assert TOKENIZER.decode_bytes(spelled) == TOKENIZER.decode_bytes(ids)
        text = [id for id in ids if not TOKENIZER.decode([id])[:1].isdigit() and id < NUM_IDS]
        words += len(text)
        missing += sum(id not in kept for id in text)
        longest = max(longest, len(spelled))
    assert missing < 0.01 * words
    assert 256 < longest < 4096
