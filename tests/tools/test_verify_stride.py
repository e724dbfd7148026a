"""The check of resume strides finds its points however long the prompt is."""

import torch

from suzuri.tools.verify.checks_hits import stride
from suzuri.tools.verify.config import VerifyConfig
from suzuri.tools.verify.lab import Lab
from suzuri.tools.verify.reference import Reference
from tests.model.models import random_model


def test_long_prompts_keep_all_their_points() -> None:
    model = random_model("tiny", torch.float32).requires_grad_(False)
    lab = Lab(model, VerifyConfig(model="", dtype="float32"), Reference(model), long=400)
    stride(lab, 4)
    assert lab.rows > 400
