"""What a run is put together from, besides its folder: models, tokenizer, sampler, scorers."""

import dataclasses

import torch

import suzuri
from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.load import memory_for, prepare_engine
from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Problems
from suzuri.model.checkpoint_files import Checkpoint
from suzuri.model.config import ModelConfig, MtpConfig
from suzuri.model.inkling import Inkling
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import Vocabulary, vocabulary_of
from suzuri.rl.config import SCORES, RlConfig
from suzuri.rl.http_scorer import HttpScorer
from suzuri.rl.local_sampler import LocalSampler
from suzuri.rl.local_scorer import load_scorer
from suzuri.rl.scores import Scorer
from suzuri.training.initial import find_model
from suzuri.training.keeping import start_trainer
from suzuri.training.run_dir import RunDir
from suzuri.training.trainer import LocalTrainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """`config`: with the limits that the model allows. `checkpoint` None: weights are drawn."""

    config: RlConfig
    shape: ModelConfig
    checkpoint: Checkpoint | None
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    @property
    def prompts(self) -> ChatPrompts:
        return ChatPrompts(self.tokenizer, self.shape, self.vocabulary)


def find_setting(config: RlConfig) -> Setting:
    """Raises ValueError for a model that cannot be used. Reads no weight."""
    shape, checkpoint = find_model(config.model, random_weights=config.random_weights)
    tokenizer = Tokenizer()
    # An engine that only reads a conversation draws one token after it all the same.
    most = shape.text.model_max_length - bool(config.teacher or config.reference)
    most = min(config.limits.max_context, most)
    limits = dataclasses.replace(config.limits, max_context=most)
    return Setting(
        config=dataclasses.replace(config, limits=limits),
        shape=shape,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        vocabulary=vocabulary_of(shape.kept_vocabulary, tokenizer.token_bytes),
    )


def document_of_run(config: RlConfig, **problems: Problems | None) -> dict[str, object]:
    """What the run's folder is compared with when it goes on. Of problems that say what they are
    made of (`digest`, as those of files do) that is compared; the config names the others."""
    data = {name: getattr(value, "digest", None) for name, value in problems.items()}
    return {"suzuri": suzuri.__version__, "config": config.document(), "data": data}


def trainer_of(setting: Setting, folder: RunDir, first: int) -> LocalTrainer:
    """After step `first`."""
    config = setting.config
    return start_trainer(
        setting.shape,
        setting.checkpoint,
        setting.vocabulary,
        config.trainer,
        folder,
        first,
        dtype=config.dtype,
        device=config.device,
        seed=config.seed,
    )


def local_sampler(setting: Setting, version: int) -> LocalSampler:
    """An engine for the trainer's model, without weights until they are published: they are to
    have the next `version`. ValueError where it does not fit."""
    config, device = setting.config, torch.device(setting.config.device)
    engine_config = EngineConfig(
        dtype=config.dtype,
        max_context=config.limits.max_context,
        max_running=config.max_running,
        token_budget=max(2048, config.max_running),
        memory_gb=config.memory_gb,
    )
    model = Inkling(
        dataclasses.replace(setting.shape, mtp=MtpConfig()),
        dtype=getattr(torch, config.dtype),
        device=device,
        parts=frozenset({"vision", "audio"}),
        dequantized=True,
    ).requires_grad_(False)
    memory = memory_for(engine_config, device)
    engine = Engine(model, engine_config, memory_bytes=memory, vocabulary=setting.vocabulary)
    prepare_engine(engine, has_weights=False)
    engine.weight_version = version
    return LocalSampler(engine, on_publish=config.on_publish)


def scorers_of(setting: Setting) -> dict[str, Scorer]:
    """Those that the config names. Raises ValueError naming the field."""
    config, found = setting.config, dict[str, Scorer]()
    for who in SCORES:
        model: str | None = getattr(config, who)
        if model is None:
            continue
        if model.startswith(("http://", "https://")):
            found[who] = HttpScorer(model)
            continue
        found[who] = load_scorer(
            who,
            model,
            setting.vocabulary,
            setting.tokenizer,
            dtype=config.dtype,
            device=config.device,
            max_context=config.limits.max_context,
        )
    return found
