"""The device that a test of this room runs on."""

from collections.abc import Iterator

import pytest

from suzuri.kernels import dispatch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """ "cpu", and with `-m gpu` "cuda" with the references forced."""
    if request.param == "cpu":
        yield "cpu"
        return
    with dispatch.force("reference"):
        yield "cuda"
