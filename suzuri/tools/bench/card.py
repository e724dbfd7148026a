"""Whose limits figures are held against. No torch here."""

from suzuri.tools.plan.card import match
from suzuri.tools.plan.hardware import Gpu

ON_A_CPU = "h200"


def card_for(asked: str | None, gpu_name: str | None) -> Gpu | None:
    """The card that was named, else the one that runs (its name as the driver tells it); None for
    a GPU that the catalog does not have. Raises ValueError for an unknown --card."""
    if asked is not None:
        try:
            return match(asked)
        except ValueError as error:
            raise ValueError(str(error).replace("--gpu", "--card")) from None
    if gpu_name is None:
        return match(ON_A_CPU)
    try:
        return match(gpu_name)
    except ValueError:
        return None


def limits(card: Gpu) -> dict[str, object]:
    """Of a result file: what floors were computed with."""
    return {
        "card": card.name,
        "bytes_per_second": card.floor_bandwidth,
        "flops_per_second": card.floor_bf16,
    }
