"""Packed training batches: nothing crosses a sequence border, forward or backward."""

import pytest
import torch
from torch import Tensor

from suzuri.model.batch import Batch, pack
from suzuri.model.inkling import Inkling
from tests.kernels.compare import assert_same_bits
from tests.model.models import golden_model, random_ids, random_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["base", "odd", "wide"])
def test_c16_a_sequence_does_not_see_the_end_of_the_one_before(
    case: str, dtype: torch.dtype
) -> None:
    model = golden_model(case, dtype)
    a, b = random_ids(model, 7, seed=1), random_ids(model, 9, seed=2)
    before_ND = model.decoder(pack([a, b]))
    changed_ND = model.decoder(pack([[*a[:-1], a[-1] ^ 1], b]))
    assert_same_bits(changed_ND[7:], before_ND[7:])
    assert not torch.equal(changed_ND[6], before_ND[6])
    assert_same_bits(before_ND[7:], model.decoder(pack([b])))


def gradients(model: Inkling, batches: list[tuple[Batch, Tensor]]) -> dict[str, Tensor]:
    """Gradients of sum(weight * hidden) over some batches."""
    model.zero_grad()
    for batch, weight_ND in batches:
        (model.decoder(batch) * weight_ND).sum().backward()
    return {n: p.grad for n, p in model.decoder.named_parameters() if p.grad is not None}


def test_c17_gradients_of_a_pack_are_the_sums_of_one_by_one() -> None:
    model = random_model(dtype=torch.float64)
    sequences = [random_ids(model, n, seed=n) for n in (7, 1, 12, 3)]
    hidden = model.config.text.hidden_size
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(len(s), hidden, generator=generator, dtype=torch.float64) for s in sequences
    ]
    packed = gradients(model, [(pack(sequences), torch.cat(weights))])
    alone = gradients(model, [(pack([s]), w) for s, w in zip(sequences, weights, strict=True)])
    assert packed.keys() == alone.keys()
    assert any(name.endswith("_conv.weight") for name in packed)
    for name, grad in packed.items():
        torch.testing.assert_close(grad, alone[name], rtol=1e-10, atol=1e-12, msg=name)


def test_m19_media_do_not_cut_the_gradient_to_text_embeddings() -> None:
    """Rows of text tokens get the gradient that they get without the picture's own gradient path;
    the placeholders' row gets none."""
    model = random_model(dtype=torch.float64)
    assert model.vision is not None
    config = model.config.vision
    assert config is not None
    side = config.patch_size
    patches = torch.randn(2, config.temporal_patch_size, side, side, 3, dtype=torch.float64)
    ids = [3, 5, 7, 11, 11, 13, 3]
    grads: list[Tensor] = []
    for detached in (False, True):
        model.zero_grad()
        features_MD = model.vision(patches)
        features_MD = features_MD.detach() if detached else features_MD
        model.decoder(pack([ids], media=[(0, 3, features_MD)])).pow(2).sum().backward()
        grad = model.decoder.embed.weight.grad
        assert grad is not None
        grads.append(grad.clone())
        tower = model.vision.get_parameter("linears.0.weight").grad
        assert (tower is None or not tower.any()) == detached
    assert torch.equal(grads[0], grads[1])
    assert all(bool(grads[0][t].any()) for t in (3, 5, 7, 13))
    assert not grads[0][11].any()


def test_m20_media_go_to_their_own_sequence() -> None:
    model = golden_model("base")
    assert model.vision is not None and model.audio is not None
    vision, audio = model.config.vision, model.config.audio
    assert vision is not None and audio is not None
    generator = torch.Generator().manual_seed(3)
    side = vision.patch_size
    pictures = [torch.randn(n, 2, side, side, 3, generator=generator) for n in (2, 1, 3, 2, 4)]
    clip = torch.randint(audio.mel_vocab_size, (5, audio.n_mel_bins), generator=generator)
    features = [model.vision(p) for p in pictures]
    sequences = [random_ids(model, n, seed=n) for n in (6, 9, 5, 21, 17)]
    media = [
        (1, 2, features[0]),
        (3, 1, features[1]),
        (3, 4, features[2]),
        (3, 12, features[3]),
        (4, 9, features[4]),
        (4, 1, model.audio(clip)),
    ]
    packed_ND = model.decoder(pack(sequences, media=media))
    alone_ND = torch.cat(
        [
            model.decoder(pack([ids], media=[(0, i, f) for s, i, f in media if s == n]))
            for n, ids in enumerate(sequences)
        ]
    )
    assert_same_bits(packed_ND, alone_ND)
    with pytest.raises(ValueError, match="do not fit into sequence 0"):
        pack(sequences, media=[(0, 5, features[0])])
    with pytest.raises(ValueError, match="overlap"):
        pack(sequences, media=[(3, 1, features[0]), (3, 2, features[1])])


def test_the_same_token_twice_sums_its_gradient() -> None:
    model = random_model(dtype=torch.float64)
    (model.decoder.embedded(pack([[4, 4, 9]]))).sum().backward()
    grad = model.decoder.embed.weight.grad
    assert grad is not None
    once = torch.zeros_like(grad)
    model.zero_grad()
    (model.decoder.embedded(pack([[4, 9]]))).sum().backward()
    assert model.decoder.embed.weight.grad is not None
    once.copy_(model.decoder.embed.weight.grad)
    torch.testing.assert_close(grad[4], 2 * once[4])
    torch.testing.assert_close(grad[9], once[9])


def test_input_that_cannot_be_right_is_refused() -> None:
    model = random_model()
    assert model.audio is not None
    text = model.config.text
    with pytest.raises(IndexError, match=f"id {text.unpadded_vocab_size} is not in"):
        model.decoder.embedded(pack([[text.unpadded_vocab_size]]))
    with pytest.raises(IndexError, match="id -1 is not in"):
        model.decoder.embedded(pack([[-1]]))
    with pytest.raises(ValueError, match="token ids must be integers"):
        pack([[1.5]])  # pyright: ignore[reportArgumentType]
    for sequence in (-2, 5):
        with pytest.raises(ValueError, match=f"media for sequence {sequence} of 1"):
            pack([[1, 2, 3]], media=[(sequence, 0, torch.ones(1, text.hidden_size))])
    with pytest.raises(ValueError, match="media features are 3 wide"):
        model.decoder.embedded(pack([[1, 2]], media=[(0, 0, torch.ones(1, 3))]))
    for level in (-1, 16):
        with pytest.raises(ValueError, match=r"must be in 0\.\.15"):
            model.audio(torch.full((2, 80), level))
    with pytest.raises(ValueError, match="79 mel bands given"):
        model.audio(torch.zeros(2, 79, dtype=torch.int64))
    with pytest.raises(ValueError, match="dtype"):
        Inkling(model.config, dtype=torch.float16)
    with pytest.raises(ValueError, match="there are"):
        Inkling(model.config, parts=frozenset({"x"}))
