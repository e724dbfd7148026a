"""The five verbs: what they compute, that they repeat, and that they agree with the engine."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.sampling_params import SamplingParams
from suzuri.kernels.token_logprobs import token_logprobs
from suzuri.model.batch import pack
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.weights import load_weights
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.training.checkpoint import content_hash
from suzuri.training.config import TrainingConfig
from suzuri.training.packing import SampleError, micro_batches
from suzuri.training.trainer import LocalTrainer
from suzuri.types import AdamParams, MediaInput, Sample
from tests.model.models import CASES, golden_model, random_model
from tests.training.samples import policy_samples, samples, trainer

DTYPES = ("float32", "bfloat16")
STEP = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)


def gradients(subject: LocalTrainer) -> dict[str, Tensor]:
    return {
        name: p.grad.clone()
        for name, p in subject.optimizer.parameters.items()
        if p.grad is not None
    }


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in one.items())


def engine_logprobs(model: Inkling, dtype: str, sample: Sample, start: int) -> list[float]:
    """Log-probs of a sample's targets from `start` on, each from its own decode step."""
    reach = model.config.text.model_max_length
    config = EngineConfig(
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        max_context=min(200, reach),
        max_running=2,
        global_pages=40,
        local_pages=40,
        snapshots=4,
        page_size=16,
    )
    engine = Engine(model, config, memory_bytes=2**62, vocabulary=FullVocabulary())
    found: list[float] = []
    tokens = list(sample.tokens)
    for end in range(start, len(tokens)):
        # A bias that leaves one id makes the engine draw the target; its raw log-prob is asked for.
        target = int(np.asarray(sample.inputs["target_tokens"])[end])
        wanted = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            allowed_token_ids=[target],
            ignore_eos=True,
            detokenize=False,
        )
        engine.add(str(end), tokens[: end + 1], wanted)
        (event,) = [e for e in engine.run() if e.token is not None]
        assert event.token == target
        assert event.logprobs is not None
        assert event.logprobs.raw is not None
        found.append(event.logprobs.raw)
    return found


GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_those_of_the_engine_bit_for_bit(dtype: str, device: str) -> None:
    subject = trainer(dtype, token_budget=40, device=device)
    given = samples((24, 12))
    for output in (
        subject.forward(given, "cross_entropy"),
        subject.forward_backward(given, "cross_entropy"),
    ):
        for one, logprobs in zip(given, output.logprobs, strict=True):
            wanted = engine_logprobs(subject.model, dtype, one, 3)
            assert (
                np.asarray(logprobs, np.float32).tolist()[3:]
                == np.asarray(wanted, np.float32).tolist()
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["nano", *CASES])
def test_nano_and_golden_models_agree_with_the_engine_too(case: str, dtype: str) -> None:
    width = getattr(torch, dtype)
    is_nano = case == "nano"
    model = random_model("inkling-nano", width) if is_nano else deepcopy(golden_model(case, width))
    rows = model.config.text.unpadded_vocab_size
    generator = np.random.default_rng(2)
    ids = generator.integers(0, rows - 1, 20)
    one = Sample(
        tokens=ids[:-1].tolist(),
        inputs={"target_tokens": ids[1:], "weights": np.ones(19, np.float32)},
    )
    subject = LocalTrainer(model, TrainingConfig(), FullVocabulary())
    (logprobs,) = subject.forward_backward([one], "cross_entropy").logprobs
    wanted = engine_logprobs(model, dtype, one, 5)
    assert np.asarray(logprobs, np.float32)[5:].tolist() == np.asarray(wanted, np.float32).tolist()


def test_the_loss_is_what_its_logprobs_say() -> None:
    subject, given = trainer(), samples()
    output = subject.forward(given, "cross_entropy")
    weights = [np.asarray(one.inputs["weights"]) for one in given]
    wanted = -sum(float((w * p).sum()) for w, p in zip(weights, output.logprobs, strict=True))
    assert output.loss_sum == pytest.approx(wanted, rel=1e-6)
    assert output.weight_sum == sum(float(w.sum()) for w in weights)
    assert output.metrics["loss:sum"] == output.loss_sum


def test_targets_may_be_several_per_token() -> None:
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 900, 13)
    targets = np.stack([ids[1:], (ids[1:] + 7) % 900], 1)
    weights = np.stack([np.full(12, 0.75), np.full(12, 0.25)], 1).astype(np.float32)
    both = Sample(tokens=ids[:-1].tolist(), inputs={"target_tokens": targets, "weights": weights})
    singles = [
        Sample(
            tokens=ids[:-1].tolist(),
            inputs={"target_tokens": targets[:, k], "weights": weights[:, k]},
        )
        for k in range(2)
    ]
    subject = trainer()
    together, apart = subject.forward([both], "cross_entropy"), []
    apart = subject.forward(singles, "cross_entropy")
    assert together.logprobs[0].T.tolist() == [x.tolist() for x in apart.logprobs]
    assert together.loss_sum == pytest.approx(apart.loss_sum)


@DEVICES
def test_gradients_repeat_and_add_up(device: str) -> None:
    subject, given = trainer(token_budget=25, device=device), samples()
    subject.forward_backward(given, "cross_entropy")
    first = gradients(subject)
    assert all(bool((x != 0).any()) for name, x in first.items() if "experts" not in name)
    subject.optimizer.clear()
    subject.forward_backward(given, "cross_entropy")
    assert equal(gradients(subject), first)
    subject.optimizer.clear()
    for half in (given[:2], given[2:]):
        subject.forward_backward(half, "cross_entropy")
    for name, x in gradients(subject).items():
        assert torch.allclose(x, first[name], rtol=1e-4, atol=1e-6 * float(first[name].abs().max()))


def test_what_a_sample_is_packed_with_does_not_change_its_gradient() -> None:
    """Relative to its size, less than 1e-6 in fp32: alone, first, and last of four. (A scale's own
    gradient is a sum of a million terms that nearly cancel: it may move by more of itself.)"""
    given = samples((17, 9, 21, 5))
    found: list[dict[str, Tensor]] = []
    silent = [
        Sample(tokens=one.tokens, inputs={**one.inputs, "weights": np.zeros(one.num_tokens)})
        for one in given
    ]
    for batch in ([given[0]], [given[0], *silent[1:]], [*silent[1:], given[0]]):
        subject = trainer()
        subject.forward_backward(batch, "cross_entropy")
        found.append(gradients(subject))
    size = math.sqrt(sum(float((x**2).sum()) for x in found[0].values()))
    for other in found[1:]:
        apart = {name: float((other[name] - x).norm()) for name, x in found[0].items()}
        assert math.sqrt(sum(x**2 for x in apart.values())) < 1e-6 * size
        for name, x in found[0].items():
            assert apart[name] <= 1e-5 * max(float(x.norm()), 1e-6), name


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputed_layers_give_the_same_bits(dtype: str, device: str) -> None:
    found = []
    for recompute in (False, True):
        subject = trainer(dtype, recompute=recompute, bias_rate=0.1, device=device)
        output = subject.forward_backward(samples(), "cross_entropy")
        found.append((gradients(subject), output.loss_sum, dict(subject.loads.counts)))
    assert equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert equal(found[0][2], found[1][2]), "a layer that ran twice counted twice"


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "dro", "importance_sampling"])
def test_policy_losses_run_with_a_divergence_and_entropy(name: str) -> None:
    subject = trainer(token_budget=30)
    settings = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    output = subject.forward_backward(policy_samples(), name, settings)
    assert math.isfinite(output.loss_sum)
    assert {"kl_reference:mean", "entropy:mean", "ratio:max"} <= output.metrics.keys()
    assert 0 < output.metrics["entropy:mean"] < math.log(1000)
    assert subject.optim_step(STEP)["grad_norm"] > 0


def test_a_gradient_of_the_whole_model_is_its_slope() -> None:
    """Along the gradient itself, in fp64, all parameters at once, towers and drafts aside."""
    subject, given = trainer("float64"), samples((7, 12))
    subject.forward_backward(given, "cross_entropy")
    found = gradients(subject)
    size = math.sqrt(sum(float((x**2).sum()) for x in found.values()))
    step, losses = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for name, x in found.items():
                subject.optimizer.parameters[name].add_(x, alpha=sign * step / size)
        losses.append(subject.forward(given, "cross_entropy").loss_sum)
        with torch.no_grad():
            for name, x in found.items():
                subject.optimizer.parameters[name].sub_(x, alpha=sign * step / size)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(size, rel=1e-5)


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_lower_the_loss_and_the_copy_is_the_master_rounded(dtype: str, device: str) -> None:
    subject, given = trainer(dtype, device=device), samples((12, 8))
    before = subject.forward(given, "cross_entropy").loss_sum
    for _ in range(4):
        subject.forward_backward(given, "cross_entropy")
        subject.optim_step(AdamParams(learning_rate=3e-3))
    assert subject.forward(given, "cross_entropy").loss_sum < 0.9 * before
    for name, parameter in subject.optimizer.parameters.items():
        master = subject.optimizer.masters[name]
        assert master.dtype == torch.float32
        assert torch.equal(parameter.detach(), master.to(parameter.dtype)), name


def test_a_step_is_that_of_adamw_by_hand() -> None:
    subject, given = trainer(), samples((6,))
    subject.forward_backward(given, "cross_entropy")
    name = "decoder.norm.weight"
    parameter = subject.optimizer.parameters[name]
    assert parameter.grad is not None
    old, gradient = parameter.detach().clone(), parameter.grad.clone() / subject.weight_sum
    params = AdamParams(learning_rate=0.01, weight_decay=0.1, eps=1e-8)
    subject.optim_step(params)
    # The first step: both moments are the gradient's own once their bias is taken out.
    wanted = old * (1 - 0.01 * 0.1) - 0.01 * gradient / (gradient.abs() + 1e-8)
    assert torch.allclose(parameter.detach(), wanted, rtol=1e-5, atol=1e-7)


def test_clipping_bounds_the_norm_of_all_gradients_together() -> None:
    found = []
    for clip in (0.0, 1e-3):
        subject = trainer()
        subject.forward_backward(samples(), "cross_entropy")
        found.append(subject.optim_step(AdamParams(grad_clip_norm=clip))["grad_norm"])
        state = subject.optimizer.state()
        size = sum(
            float((x.double() ** 2).sum())
            for n, x in state.items()
            if n.startswith("adam.exp_avg.")
        )
        wanted = found[0] if clip == 0 else clip
        assert math.sqrt(size) / 0.1 == pytest.approx(wanted, rel=1e-4)
    assert found[0] == found[1], "what is reported is the norm before"


def test_frozen_parameters_stay() -> None:
    subject = trainer(frozen=("*.attn.*", "decoder.embed.weight"))
    before = {n: p.detach().clone() for n, p in subject.model.named_parameters()}
    subject.forward_backward(samples(), "cross_entropy")
    subject.optim_step(STEP)
    for name, parameter in subject.model.named_parameters():
        is_frozen = ".attn." in name or name == "decoder.embed.weight"
        if is_frozen:
            assert torch.equal(parameter, before[name]), name
    assert not torch.equal(subject.model.decoder.norm.weight, before["decoder.norm.weight"])
    with pytest.raises(ValueError, match=r"no parameter is named like 'decoder\.attention"):
        trainer(frozen=("decoder.attention.*",))


def test_selection_biases_move_towards_the_mean_load() -> None:
    subject = trainer(bias_rate=0.01)
    output = subject.forward_backward(samples(), "cross_entropy")
    counts = {n: c.clone() for n, c in subject.loads.counts.items()}
    parameters = dict(subject.model.named_parameters())
    biases = {n: p.detach().clone() for n, p in parameters.items() if "router.bias" in n}
    subject.optim_step(STEP)
    assert counts
    for name, count in counts.items():
        moved = parameters[f"{name}.bias"] - biases[f"{name}.bias"]
        assert torch.allclose(moved, 0.01 * torch.sign(count.mean() - count), atol=1e-6)
        assert int(count.sum()) == 2 * sum(one.num_tokens for one in samples())
    assert 0 < output.metrics["e_frac_with_tokens:mean"] <= 1
    assert output.metrics["e_max_violation:max"] >= output.metrics["e_max_violation:mean"] > 0


def test_draft_depths_learn_and_leave_the_trunk_alone() -> None:
    plain, given = trainer(), samples((12, 2, 9, 1))
    plain.forward_backward(given, "cross_entropy")
    subject = trainer(draft_loss_weight=0.5)
    output = subject.forward_backward(given, "cross_entropy")
    alone, with_drafts = gradients(plain), gradients(subject)
    drafts = {name for name in with_drafts if name.startswith("draft.")}
    assert drafts
    assert alone.keys() == with_drafts.keys() - drafts
    assert all(torch.equal(x, with_drafts[name]) for name, x in alone.items())
    assert all(bool((with_drafts[name] != 0).any()) for name in drafts if "norm" in name)
    assert output.metrics["draft_loss:sum"] > 0
    joined = trainer(draft_loss_weight=0.5, draft_detached=False)
    joined.forward_backward(given, "cross_entropy")
    assert not torch.equal(gradients(joined)["decoder.norm.weight"], alone["decoder.norm.weight"])


def test_draft_logprobs_are_those_of_the_depths_as_served() -> None:
    """Depth 0 of the last sample by hand: row j reads token j + 1 and is held against the target
    there."""
    subject = trainer(draft_loss_weight=1.0)
    model, one = subject.model, samples((14,))[0]
    assert model.draft is not None
    tokens, targets = list(one.tokens), np.asarray(one.inputs["target_tokens"])
    weights = torch.as_tensor(np.asarray(one.inputs["weights"]))
    with torch.no_grad():
        batch = pack([tokens])
        previous_ND, embedded_ND = model.decoder(batch), model.decoder.embedded(batch)
        total = 0.0
        for depth in range(len(model.draft.depths)):
            count = len(tokens) - depth - 1
            previous_ND = model.draft(
                depth, previous_ND[:count], embedded_ND[depth + 1 :], pack([[0] * count])
            )
            found_N = token_logprobs(
                previous_ND,
                model.decoder.unembed.weight[: model.config.text.unpadded_vocab_size],
                torch.tensor(targets[depth + 1 :]),
                scale=model.decoder.logit_scale,
            )
            total -= float((found_N * weights[depth + 1 :]).sum()) / len(model.draft.depths)
    output = subject.forward([one], "cross_entropy")
    assert output.metrics["draft_loss:sum"] == pytest.approx(total, rel=1e-6)


def test_rows_without_weight_may_skip_the_head() -> None:
    plain, subject = trainer(), trainer(skip_unweighted=True)
    outputs = [t.forward_backward(samples(), "cross_entropy") for t in (plain, subject)]
    assert outputs[0].loss_sum == pytest.approx(outputs[1].loss_sum, rel=1e-6)
    for one, all_of, some in zip(samples(), outputs[0].logprobs, outputs[1].logprobs, strict=True):
        used = np.asarray(one.inputs["weights"]) != 0
        assert some[used].tolist() == all_of[used].tolist()
        assert np.isnan(some[~used]).all()
    for name, x in gradients(plain).items():
        size = float(x.norm())
        assert float((gradients(subject)[name] - x).norm()) <= 1e-5 * max(size, 1e-6), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pending", [False, True])
def test_a_loaded_state_goes_on_with_the_same_bits(
    dtype: str, pending: bool, tmp_path: Path
) -> None:
    def steps(subject: LocalTrainer, first: int, last: int) -> None:
        for number in range(first, last):
            subject.forward_backward(samples(seed=number), "cross_entropy")
            subject.optim_step(STEP)

    options: dict[str, Any] = {"bias_rate": 0.01, "frozen": ("decoder.embed.weight",)}
    subject = trainer(dtype, **options)
    steps(subject, 0, 2)
    if pending:
        subject.forward_backward(samples(seed=90), "cross_entropy")
    subject.save_state(tmp_path / "state", wait=False)
    steps(subject, 2, 4)
    subject.finish()
    other = trainer(dtype, **options)
    other.load_state(tmp_path / "state")
    assert other.num_steps == 2
    steps(other, 2, 4)
    assert content_hash(other.model) == content_hash(subject.model)
    assert equal(other.optimizer.state(), subject.optimizer.state())
    assert other.num_steps == subject.num_steps == 4


def test_states_of_other_models_are_refused(tmp_path: Path) -> None:
    subject = trainer()
    subject.save_state(tmp_path / "state")
    with pytest.raises(ValueError, match="trains other parameters"):
        trainer(frozen=("*.attn.*",)).load_state(tmp_path / "state")
    with pytest.raises(FileNotFoundError, match="no saved state"):
        subject.load_state(tmp_path / "nothing")


def test_published_weights_are_what_a_sampler_loads(tmp_path: Path) -> None:
    subject = trainer("bfloat16")
    subject.forward_backward(samples(), "cross_entropy")
    subject.optim_step(STEP)
    digest = subject.publish_weights(tmp_path / "weights")
    model = Inkling(subject.model.config, dtype=torch.bfloat16)
    load_weights(model, tmp_path / "weights", want=PARTS)
    assert content_hash(model) == digest == content_hash(subject.model)
    with torch.no_grad():
        model.decoder.norm.weight.view(torch.int16)[0] += 1
    assert content_hash(model) != digest


def test_micro_batches_keep_to_the_budget() -> None:
    assert micro_batches([5, 5, 5], 10) == [[0, 1], [2]]
    assert micro_batches([3, 30, 4, 3], 10) == [[0, 2, 3], [1]]
    assert micro_batches([], 10) == []
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 60, 200).tolist()
    groups = micro_batches(lengths, 64)
    assert sorted(i for group in groups for i in group) == list(range(200))
    assert all(sum(lengths[i] for i in group) <= 64 for group in groups)
    assert len(groups) <= 1.1 * sum(lengths) / 64 + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, r"sample 1: 0 tokens; need 1 to"),
        ({"tokens": [1] * 5000}, r"sample 1: 5000 tokens; need 1 to 4096"),
        ({"tokens": [1, 2, 300000]}, r"sample 1: .*300000"),
        ({"target_tokens": np.array([1, 2])}, r"sample 1: loss cross_entropy: weights is \[3\]"),
        ({"target_tokens": np.array([1.0, 2.0, 3.0])}, r"sample 1: target_tokens are float64"),
        ({"target_tokens": np.array([1, 2, -4])}, r"sample 1: .*-4"),
        ({"weights": np.array([1.0, np.nan, 0.0])}, r"sample 1: weights: must be finite"),
        ({"weights": None}, r"sample 1: loss cross_entropy: needs weights"),
        ({"mask": np.ones(3)}, r"sample 1: loss cross_entropy: does not take mask"),
    ],
)
def test_bad_samples_are_named_before_anything_is_computed(
    change: dict[str, Any], message: str
) -> None:
    subject = trainer()
    good = samples((5,))[0]
    fields: dict[str, Any] = {
        "target_tokens": np.array([1, 2, 3]),
        "weights": np.ones(3, np.float32),
    }
    tokens = change.get("tokens", [1, 2, 3])
    fields |= {name: value for name, value in change.items() if name != "tokens"}
    if len(tokens) != 3:
        fields = {
            "target_tokens": np.ones(len(tokens), np.int64),
            "weights": np.ones(len(tokens), np.float32),
        }
    bad = Sample(tokens=tokens, inputs={n: v for n, v in fields.items() if v is not None})
    with pytest.raises(SampleError, match=message) as raised:
        subject.forward_backward([good, bad], "cross_entropy")
    assert raised.value.index == 1
    assert not gradients(subject)


def test_a_loss_that_is_no_number_leaves_no_gradient() -> None:
    subject = trainer()
    subject.forward_backward(samples(), "cross_entropy")
    with torch.no_grad():
        subject.model.decoder.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="no gradient is pending"):
        subject.forward_backward(samples(), "cross_entropy")
    assert not gradients(subject)
    assert subject.weight_sum == 0


def test_a_gradient_that_is_no_number_changes_nothing() -> None:
    subject = trainer()
    subject.forward_backward(samples(), "cross_entropy")
    before = content_hash(subject.model)
    gradient = subject.optimizer.parameters["decoder.norm.weight"].grad
    assert gradient is not None
    gradient[0] = float("nan")
    with pytest.raises(FloatingPointError, match="no step was taken"):
        subject.optim_step(STEP)
    assert content_hash(subject.model) == before
    assert not gradients(subject)
    subject.forward_backward(samples(), "cross_entropy")
    assert subject.optim_step(STEP)["grad_norm"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["cross_entropy", "ppo"])
def test_gradients_on_a_gpu_are_those_of_the_cpu(name: str) -> None:
    """In fp32, but for the order of sums; every parameter has one."""
    given = samples() if name == "cross_entropy" else policy_samples()
    found: list[dict[str, Tensor]] = []
    for device in ("cpu", "cuda"):
        subject = trainer(device=device, draft_loss_weight=0.5 if name == "cross_entropy" else 0.0)
        subject.forward_backward(given, name)
        found.append({n: x.cpu() for n, x in gradients(subject).items()})
    cpu, gpu = found
    assert cpu.keys() == gpu.keys()
    size = math.sqrt(sum(float((x**2).sum()) for x in cpu.values()))
    apart = {n: float((gpu[n] - x).norm()) for n, x in cpu.items()}
    assert math.sqrt(sum(x**2 for x in apart.values())) < 1e-4 * size
    for n, x in cpu.items():
        assert apart[n] <= 1e-3 * max(float(x.norm()), 1e-3 * size), n


def test_a_forward_alone_counts_no_expert_rows() -> None:
    subject = trainer(bias_rate=0.1)
    subject.forward_backward(samples(), "cross_entropy")
    before = {name: counts.clone() for name, counts in subject.loads.counts.items()}
    subject.forward(samples(seed=8), "cross_entropy")
    assert equal(dict(subject.loads.counts), before)


def test_media_without_a_tower_are_refused_before_anything_is_computed() -> None:
    subject = trainer(token_budget=8)
    subject.model.vision = None
    subject = LocalTrainer(subject.model, subject.config, FullVocabulary())
    bad = samples((6,))[0]
    picture = MediaInput(kind="image", index=0, inputs=np.zeros((1, 2, 40, 40, 3), np.float32))
    bad = Sample(tokens=bad.tokens, inputs=bad.inputs, media=(picture,))
    with pytest.raises(SampleError, match=r"sample 1: .* no tower"):
        subject.forward_backward([*samples((7,)), bad], "cross_entropy")
    assert not gradients(subject)
