"""The matrix: which checks run, with which sizes. A later kind of serving adds its lines here."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from suzuri.tools.verify import checks_drafts as drafts
from suzuri.tools.verify import checks_hits as hits
from suzuri.tools.verify import checks_load as load
from suzuri.tools.verify import checks_plain as plain
from suzuri.tools.verify.lab import Lab

PAGES = (4, 16, 128)
FAST_PAGES = (4,)
LARGE = 128
"""Pages as they are served: prompts are then made longer than one."""
ODD = ("decode one by one", "prefix hit", "identical prompt", "stopped turn", "interleavings")
"""What runs with pages of `odd_page` as well."""
FAST_ODD = ("decode one by one", "stopped turn")
FAR = 532
"""Beyond the boundaries at which attention merges partial results."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A line of the table. `run` raises Mismatch, NotTested or AssertionError; its longer prompts
    have at least `long` tokens."""

    name: str
    run: Callable[[Lab], None]
    long: int = 0


def checks(lab: Lab) -> list[Check]:
    """All checks that apply to the model, in the order in which they run."""
    fast = lab.config.fast
    found = [Check(name="packed = alone", run=plain.packed)]
    if lab.reference.device.type == "cpu":
        found.append(Check(name="other thread count", run=plain.threads))
    far = partial(plain.chunks, page=16, sizes=(100,))
    found.append(Check(name=f"{FAR} tokens in chunks of 100", run=far, long=FAR))
    for page in FAST_PAGES if fast else PAGES:
        long = page + 12 if page == LARGE else 0
        found += [
            Check(name=f"{name}, pages of {page}", run=run, long=long)
            for name, run in _lines(lab, page)
        ]
    page = odd_page(lab.window)
    wanted = FAST_ODD if fast else ODD
    found += [
        Check(name=f"{name}, pages of {page}", run=run)
        for name, run in _lines(lab, page)
        if name in wanted
    ]
    if fast:
        large = partial(plain.chunks, page=LARGE, sizes=(LARGE - 1,))
        name = f"chunks of {LARGE - 1}, pages of {LARGE}"
        found.append(Check(name=name, run=large, long=LARGE + 12))
    return found


def odd_page(window: int) -> int:
    """Tokens of a page such that a window that ends with a page begins with the last token of one:
    there a page dropped too early is one still needed."""
    return next((size for size in range(5, 12) if (window - 1) % size == 0), 3)


def _lines(lab: Lab, page: int) -> Iterator[tuple[str, Callable[[Lab], None]]]:
    fast = lab.config.fast
    sizes = (1, 3, page + 1, 0) if fast else (1, 2, 3, 7, page - 1, page, page + 1, 0)
    for size in dict.fromkeys(sizes):
        what = f"chunks of {size}" if size else "one chunk"
        yield what, partial(plain.chunks, page=page, sizes=(size,))
    yield "decode one by one", partial(plain.decode, page=page)
    yield "ragged batch", partial(plain.ragged, page=page)
    yield "prefix hit", partial(hits.prefix_hit, page=page)
    yield "identical prompt", partial(hits.identical, page=page)
    yield "learned branch", partial(hits.branch, page=page)
    yield "copy on write", partial(hits.copy_on_write, page=page)
    yield "stopped turn", partial(hits.stopped_turn, page=page)
    yield "resume stride", partial(hits.stride, page=page)
    yield "tenants apart", partial(hits.salted, page=page)
    yield "n samples", partial(hits.samples, page=page)
    if hits.has_tower(lab):
        yield "media", partial(hits.media, page=page)
    if drafts.has_drafts(lab):
        yield "draft state", partial(drafts.draft_state, page=page)
    yield "overlap on = off", partial(load.overlapped, page=page)
    yield "prompt log-probs = decode", partial(load.prompt_logprobs, page=page)
    yield "neighbours abort", partial(load.aborts, page=page)
    yield "eviction", partial(hits.eviction, page=page)
    yield "preemption", partial(load.preemption, page=page)
    yield "sampling = alone", partial(load.sampling, page=page)
    yield "interleavings", partial(load.interleavings, page=page, seeds=3 if fast else 6)
