"""Models that say how likely they find what another one drew: in this process and over HTTP."""

import asyncio
import copy
import functools
import http.server
import json
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from suzuri.engine.config import EngineConfig
from suzuri.engine.load import load_engine
from suzuri.envs.env import Trajectory
from suzuri.envs.mixture import Mixture
from suzuri.envs.rollout import Limits
from suzuri.envs.task_env import TaskProblems
from suzuri.model.config import preset
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.weights import export_weights, load_weights
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import FullVocabulary, vocabulary_of
from suzuri.rl.algorithms.distillation import Distillation
from suzuri.rl.algorithms.grpo import Grpo
from suzuri.rl.http_scorer import HttpScorer
from suzuri.rl.local_sampler import LocalSampler
from suzuri.rl.local_scorer import LocalScorer, check_vocabulary, load_scorer
from suzuri.rl.rollouts import load_rollouts
from suzuri.rl.run import run_rl
from suzuri.rl.samples import samples_of
from suzuri.rl.scores import ScoringError, with_scores
from suzuri.training.config import TrainingConfig
from suzuri.training.initial import draw_weights
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Array, Sample
from tests.rl.test_local_sampler import PROMPTS, draw, engine_of, model, samples_from, vocabulary
from tests.rl.test_loop import World
from tests.rl.test_run import metrics, small
from tests.rl.trajectories import attempt, turn
from tests.server.conftest import start, stop

__all__ = ["model"]


class Saying:
    """Says of every target id minus 1000, or why not."""

    def __init__(self, refused: Callable[[Sample], bool] = lambda sample: False) -> None:
        self._refused = refused

    async def logprobs(self, samples: Sequence[Sample]) -> list[Array | str]:
        return [
            "no" if self._refused(one) else one.inputs["target_tokens"].astype(np.float32) - 1000
            for one in samples
        ]


def said(trajectory: Trajectory) -> list[list[float]]:
    return [[float(x) + 1000 for x in one.scores["who"]] for one in trajectory.turns]


def test_every_answer_has_the_scores_of_its_own_tokens() -> None:
    """Of turns that go on and of turns that begin anew, of empty answers and of none."""
    going_on = attempt(1.0, turn([1, 2], [3]), turn([1, 2, 3, 7, 8], [4, 5]))
    anew = attempt(0.0, turn([1, 2], [3]), turn([1, 9, 7], [4, 5]))
    empty = attempt(0.0, turn([1, 2], []), turn([1, 2, 6], [9]))
    nothing = Trajectory(turns=[], reward=None, status="failed")
    given = [going_on, anew, empty, nothing]
    found = asyncio.run(with_scores(given, {"who": Saying()}))
    assert [said(one) for one in found] == [[[3], [4, 5]], [[3], [4, 5]], [[], [9]], []]


def test_an_answer_without_scores_is_as_it_was_and_none_at_all_is_an_error() -> None:
    group = [attempt(1.0), attempt(1.0, turn([9], [8]))]
    some = Saying(lambda sample: sample.tokens[0] == 9)
    found = asyncio.run(with_scores(group, {"who": some}))
    assert said(found[0]) == [[3, 4]] and found[1] == group[1]
    with pytest.raises(ScoringError, match="the who gave no numbers for any of 2: no"):
        asyncio.run(with_scores(group, {"who": Saying(lambda sample: True)}))


def test_the_loop_asks_batch_by_batch_and_counts() -> None:
    class Teacher:
        """Finds every token likelier by 1, but does not know the token 3."""

        def __init__(self) -> None:
            self.asked: list[int] = []

        async def logprobs(self, samples: Sequence[Sample]) -> list[Array | str]:
            self.asked.append(len(samples))
            await asyncio.sleep(0)
            return [
                "3" if 3 in one.inputs["target_tokens"] else one.inputs["logprobs"] + 1
                for one in samples
            ]

    teacher = Teacher()
    world = World(lambda token: None, algorithm=Distillation(), scorers={"teacher": teacher})
    lines = world.run()
    assert teacher.asked == [12] * 4, "no reward is needed"
    assert all(line["time/score_seconds"] > 0 for line in lines)
    lost = [line["answers/unscored"] for line in lines]
    assert sum(lost) > 0 and [line["train/samples"] for line in lines] == [12 - n for n in lost]
    assert all(line["kl/tokens"] == 12 for line in lines), "all are compared"
    assert all(line["kl/sampler_trainer_max"] == 0.0 for line in lines)
    for samples in world.trainer.seen:
        assert all(float(one.inputs["advantages"][-1]) == 1.0 for one in samples)


def test_a_model_here_says_what_a_trainer_of_it_would(model: Inkling) -> None:
    samples = samples_from(draw(LocalSampler(engine_of(model))))
    assert len(samples) == len(PROMPTS)
    trainer = LocalTrainer(copy.deepcopy(model), TrainingConfig(), vocabulary())
    expected = trainer.forward(samples, "importance_sampling").logprobs
    scorer = LocalScorer(engine_of(model))
    for _ in range(2):  # nothing is left of the first time
        found = asyncio.run(scorer.logprobs(samples))
        assert [np.asarray(one).tolist() for one in found] == [one.tolist() for one in expected]
    long = Sample(tokens=[5] * 300, inputs={"target_tokens": np.full(300, 5)})
    one, two = asyncio.run(scorer.logprobs([long, samples[0]]))
    assert isinstance(one, str) and "301 tokens" in one
    assert np.asarray(two).tolist() == expected[0].tolist()


def test_a_call_that_is_given_up_leaves_nothing_behind(model: Inkling) -> None:
    samples = samples_from(draw(LocalSampler(engine_of(model))))
    scorer = LocalScorer(engine_of(model))

    async def run() -> list[Array | str]:
        task = asyncio.ensure_future(scorer.logprobs(samples))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await scorer.logprobs(samples)

    assert all(isinstance(one, np.ndarray) for one in asyncio.run(run()))
    assert not scorer.engine.has_work
    scorer.engine.check()


def test_a_vocabulary_that_lacks_tokens_is_refused_at_once(tmp_path: Path) -> None:
    nano = preset("inkling-nano")
    kept = vocabulary_of(nano.kept_vocabulary, Tokenizer().token_bytes)
    check_vocabulary(kept, FullVocabulary())
    check_vocabulary(kept, kept)
    with pytest.raises(ValueError, match=r"its vocabulary lacks .* tokens that the model draws"):
        check_vocabulary(FullVocabulary(), kept)
    export_weights(Inkling(nano, dtype=torch.bfloat16), tmp_path / "nano", dtype="bfloat16")
    loads = functools.partial(
        load_scorer, "teacher", tokenizer=Tokenizer(), dtype="bfloat16", device="cpu"
    )
    with pytest.raises(ValueError, match=r"teacher = .*nano.*its vocabulary lacks"):
        loads(str(tmp_path / "nano"), vocabulary=FullVocabulary(), max_context=64)
    with pytest.raises(ValueError, match=r"teacher = 'tiny': .*a shape without weights"):
        loads("tiny", vocabulary=kept, max_context=64)
    most = nano.text.model_max_length
    with pytest.raises(ValueError, match=r"lower limits.max_context"):
        loads(str(tmp_path / "nano"), vocabulary=kept, max_context=most)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights from which `small` begins."""
    folder = tmp_path_factory.mktemp("scores") / "weights"
    begun = Inkling(preset("tiny"), dtype=torch.bfloat16)
    draw_weights(begun, 0)
    export_weights(begun, folder, dtype="bfloat16")
    return folder


def test_a_student_is_drawn_to_its_teacher(weights: Path, tmp_path: Path) -> None:
    """A teacher that is the student says nothing new: not a bit moves in the first step. One of
    other weights is followed."""
    fields: dict[str, Any] = {"algorithm": Distillation(), "eval_problems": None}
    assert run_rl(small(tmp_path / "same", **fields, teacher=str(weights), steps=1)) == 0
    (line,) = metrics(tmp_path / "same")
    assert line["optim/grad_norm"] == 0.0 and line["kl/sampler_trainer_max"] == 0.0
    assert line["answers/unscored"] == 0
    other = Inkling(preset("tiny"), dtype=torch.bfloat16)
    draw_weights(other, 1)
    export_weights(other, tmp_path / "other", dtype="bfloat16")
    run = tmp_path / "run"
    fields |= {"teacher": str(tmp_path / "other"), "steps": 1, "save_rollouts": 1}
    assert run_rl(small(run, **fields)) == 0
    saved = load_rollouts(run / "rollouts", 1)
    samples = [s for g in saved.groups for s in Distillation().made(g.trajectories).samples]
    after = Inkling(preset("tiny"), dtype=torch.bfloat16)
    load_weights(after, run / "weights", want=PARTS)
    now = LocalTrainer(after, TrainingConfig(), vocabulary()).forward(
        samples, "importance_sampling"
    )
    # What the teacher finds likelier has become likelier.
    gains = [
        one.inputs["weights"] * one.inputs["advantages"] * (new - one.inputs["logprobs"])
        for one, new in zip(samples, now.logprobs, strict=True)
    ]
    assert len(gains) == 6 and sum(float(gain.sum()) for gain in gains) > 0


def test_a_reference_holds_a_model_back(weights: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"eval_problems": None, "steps": 4, "reference": str(weights)}
    found: list[float] = []
    for coefficient in (1e-6, 10.0):
        algorithm = Grpo(kl_coefficient=coefficient)
        run = tmp_path / str(coefficient)
        assert run_rl(small(run, algorithm=algorithm, **fields)) == 0
        lines = metrics(run)
        assert lines[0]["train/kl_reference:mean"] == 0.0, "it is the model's own beginning"
        found.append(lines[-1]["train/kl_reference:mean"])
    assert 0 <= found[1] < found[0]


def test_media_are_shown_to_a_teacher_in_this_process(tmp_path: Path) -> None:
    nano = Inkling(preset("inkling-nano"), dtype=torch.float32)
    draw_weights(nano, 0)
    export_weights(nano, tmp_path / "nano", dtype="float32")
    config = small(
        tmp_path / "run",
        model=str(tmp_path / "nano"),
        random_weights=False,
        problems=functools.partial(TaskProblems, Mixture(weights={"pictures": 1.0})),
        eval_problems=None,
        limits=Limits(max_tokens=8),
        steps=1,
        dtype="float32",
        algorithm=Distillation(),
        teacher=str(tmp_path / "nano"),
    )
    assert run_rl(config) == 0
    (line,) = metrics(tmp_path / "run")
    assert (line["answers/unscored"], line["optim/grad_norm"]) == (0, 0.0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"algorithm": Distillation()}, "teacher: the algorithm needs one"),
        ({"algorithm": Grpo(kl_coefficient=0.1)}, "reference: the algorithm needs one"),
        ({"teacher": "x"}, "teacher = 'x': the algorithm asks for none; it is for Distillation"),
        (
            {"algorithm": Distillation(), "teacher": "x", "limits": Limits(temperature=0.7)},
            "limits.temperature = 0.7: a teacher says how likely",
        ),
    ],
)
def test_a_config_says_what_does_not_go_together(tmp_path: Path, fields: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small(tmp_path, **fields)


# Over HTTP


class Replies(http.server.BaseHTTPRequestHandler):
    """Gives what the server's `reply` makes of a request."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server: Any = self.server
        status, reply = server.reply(body)
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def stub() -> Generator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replies)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def entries(tokens: Sequence[int]) -> list[Any]:
    found = [{str(token): {"logprob": -token / 8}, "-1": {"logprob": 0.0}} for token in tokens[1:]]
    return [None, *found]


def reply_to(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    tokens = body["prompt"]
    assert (body["max_tokens"], body["prompt_logprobs"], body["return_token_ids"]) == (0, 0, True)
    choice = {"prompt_token_ids": tokens, "prompt_logprobs": entries(tokens)} | fields
    return {"choices": [choice]}


def score(server: Any, *samples: Sample) -> list[Array | str]:
    async def run() -> list[Array | str]:
        scorer = HttpScorer(f"http://127.0.0.1:{server.server_port}/", tries=1)
        try:
            return await scorer.logprobs(samples)
        finally:
            await scorer.close()

    return asyncio.run(run())


def test_a_server_is_asked_for_each_conversation(stub: Any) -> None:
    stub.reply = lambda body: (200, reply_to(body))
    samples = [*samples_of(attempt(1.0), 0.0), *samples_of(attempt(0.0, turn([7], [8])), 0.0)]
    found = score(stub, *samples)
    assert [np.asarray(one).tolist() for one in found] == [[-2 / 8, -3 / 8, -4 / 8], [-1.0]]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lambda body: (200, reply_to(body, prompt_token_ids=[1])), "it reads other tokens"),
        (lambda body: (200, reply_to(body, prompt_logprobs=None)), "no log-probs in its answer"),
        (lambda body: (200, reply_to(body, prompt_logprobs=[None])), "no log-probs"),
        (lambda body: (200, {"choices": []}), "no log-probs in its answer"),
        (lambda body: (200, {"a": 1}), "no log-probs in its answer"),
        (lambda body: (200, b"<html>"), "no JSON object"),
        (lambda body: (400, {"error": {"message": "too long"}}), "too long"),
        (lambda body: (500, {"error": {"message": "dead"}}), "dead"),
    ],
)
def test_a_server_that_gives_none_says_why(stub: Any, reply: Any, said: str) -> None:
    stub.reply = reply
    (found,) = score(stub, *samples_of(attempt(1.0), 0.0))
    assert isinstance(found, str) and said in found


def test_numbers_that_are_none_leave_the_answer_out(stub: Any) -> None:
    """JSON has no NaN: null."""
    holes = [None, *({str(token): {"logprob": None}} for token in (2, 3, 4))]
    stub.reply = lambda body: (200, reply_to(body, prompt_logprobs=holes))
    (found,) = score(stub, *samples_of(attempt(1.0), 0.0))
    assert np.isnan(np.asarray(found)).all()


def test_a_server_that_is_not_there_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suzuri.rl.http_scorer.TRIES", 1)
    nobody = "http://127.0.0.1:9"
    config = small(tmp_path / "run", algorithm=Distillation(), teacher=nobody, steps=1)
    assert run_rl(config) == 1
    assert "the teacher gave no numbers for any of 6" in capsys.readouterr().err


def test_a_server_says_what_a_model_here_says(tmp_path: Path) -> None:
    """`suzuri serve`, to the bit."""
    config = EngineConfig(max_context=400, max_running=4, page_size=16, memory_gb=2.0)
    scorer = LocalScorer(load_engine("tiny", config, Tokenizer()))
    group = [attempt(1.0, turn([5, 6, 7], [200, 8, 199_999 % 997])), attempt(0.0)]
    samples = [sample for one in group for sample in samples_of(one, 0.0)]
    expected = asyncio.run(scorer.logprobs(samples))
    running = start(tmp_path / "log.txt")
    try:

        async def ask() -> list[Array | str]:
            remote = HttpScorer(running.url)
            try:
                return await remote.logprobs(samples)
            finally:
                await remote.close()

        found = asyncio.run(ask())
    finally:
        assert stop(running) == 0
    assert [np.asarray(one).tolist() for one in found] == [
        np.asarray(one).tolist() for one in expected
    ]
