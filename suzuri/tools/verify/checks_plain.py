"""Checks without any sharing: packed, in chunks, one by one, in ragged batches, other threads."""

import torch

from suzuri.model.batch import pack
from suzuri.tools.verify.lab import Lab, Mismatch, NotTested


def packed(lab: Lab) -> None:
    """Sequences packed into one forward without a cache, as in training."""
    lengths = (1, lab.taps, lab.long // 2, lab.long, 2)
    prompts = [lab.ids(length, i) for i, length in enumerate(lengths)]
    reference = lab.reference
    with torch.no_grad():
        hidden_ND = lab.model.decoder(pack(prompts, device=reference.device))
    hidden_N, logits_N = reference.digest(hidden_ND).cpu(), reference.logits_digest(hidden_ND)
    start = 0
    for i, prompt in enumerate(prompts):
        rows = slice(start, start + len(prompt))
        start += len(prompt)
        expected = reference.of(prompt)
        for name, got, wanted in (
            ("hidden row", hidden_N[rows], expected.hidden_T),
            ("logits", logits_N[rows], expected.logits_T),
        ):
            if not torch.equal(got, wanted):
                token = int(got.ne(wanted).nonzero()[0])
                raise Mismatch(f"{name} of sequence {i}, token {token}")
        lab.rows += len(prompt)


def threads(lab: Lab) -> None:
    """Another number of CPU threads, for the plain forward and for a served request."""
    prompt = lab.ids(lab.long, 3)
    lab.reference.of(prompt)  # with the usual number, kept
    usual = torch.get_num_threads()
    torch.set_num_threads(1 if usual > 1 else 2)
    try:
        serving = lab.serving(page=16, context=lab.long + 3, max_chunk=7)
        serving.serve(prompt)
        serving.serve(prompt[: lab.long // 2], max_tokens=1)
    finally:
        torch.set_num_threads(usual)
    serving.compare()


def chunks(lab: Lab, page: int, sizes: tuple[int, ...]) -> None:
    """One prompt in chunks of each size (0: in one), then a few tokens."""
    length = lab.long
    for size in sizes:
        serving = lab.serving(page=page, context=length + 3, max_chunk=size or length)
        serving.serve(lab.ids(length))
        serving.compare()
        most = max(max(counts) for counts in serving.recorder.counts)
        if most != (size or length):
            raise NotTested(f"the largest chunk had {most} rows instead of {size or length}")


def decode(lab: Lab, page: int) -> None:
    """From prompts of 1, 2 and as many tokens as the convs see, every other token decoded."""
    new = lab.long
    serving = lab.serving(page=page, context=lab.taps + 1 + new)
    for i, length in enumerate((1, 2, lab.taps, lab.taps + 1)):
        serving.add(lab.ids(length, i), max_tokens=new, seed=i, temperature=(1.0, 0.0, 0.7, 1.3)[i])
    serving.run()
    serving.compare()


def ragged(lab: Lab, page: int) -> None:
    """Sequences of many lengths arrive one after the other: prefills run beside decodes."""
    lengths = [lab.long, 1, page - 1, 2, page, lab.long // 2, page + 1, lab.taps, lab.long]
    lengths = [min(max(length, 1), lab.long + 8) for length in lengths]
    serving = lab.serving(
        page=page, context=lab.long + 30, max_running=7, token_budget=24, max_chunk=16
    )
    for i, length in enumerate(lengths):
        new = (4, 14, 9)[i % 3]
        serving.add(lab.ids(length, i), max_tokens=new, seed=i, temperature=(1.0, 0.0, 0.8)[i % 3])
        serving.step()
    serving.run()
    serving.compare()
    if not any(max(counts) > 1 and counts.count(1) > 1 for counts in serving.recorder.counts):
        raise NotTested("no step had a prefill beside decodes")
