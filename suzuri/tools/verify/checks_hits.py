"""Checks of the prefix cache: resumed sequences, and that they did resume."""

import hashlib

import torch

from suzuri.engine.request import Request
from suzuri.tools.verify.lab import Item, Lab, NotTested, Serving

ROOM = 64
"""Tokens behind the longer prompts that checks may need."""


def new(page: int) -> int:
    """Tokens to generate so that, behind Lab.before_page, they fill a page to its end."""
    return page + 3 if page <= 16 else 12


def other(lab: Lab, token: int) -> int:
    """A row that is not `token`."""
    return (token + 1) % lab.vocabulary


def tail(lab: Lab, first_not: int, count: int, stream: int) -> list[int]:
    """Random rows that do not begin with `first_not`."""
    ids = lab.ids(count, stream)
    return [other(lab, first_not) if ids[0] == first_not else ids[0], *ids[1:]]


def prefix_hit(lab: Lab, page: int) -> None:
    """Three tails behind one prompt, at once; then behind the generated turn.

    The last chunk of the first prompt is a single token, which must leave a point all the same.
    """
    base = lab.before_page(page)
    prompt = lab.ids(base)
    serving = lab.serving(page=page, context=lab.long + ROOM, max_chunk=base - 1)
    first = serving.serve(prompt, max_tokens=new(page))
    answer = first.sequences[0].tokens
    tails = [tail(lab, answer[base], 6 + i * 3, 10 + i) for i in range(3)]
    requests = [serving.add(prompt + t, max_tokens=5, seed=i) for i, t in enumerate(tails)]
    turn = answer[:-1]
    requests.append(serving.add(turn + tail(lab, answer[-1], 9, 20), max_tokens=5))
    requests.append(serving.add(answer + lab.ids(4, 21), max_tokens=5))
    serving.run()
    for request in requests[:3]:
        serving.expect_cached(request, base)
    for request in requests[3:]:
        serving.expect_cached(request, len(turn))
    serving.compare()


def identical(lab: Lab, page: int) -> None:
    """A prompt again: all but its last token come from the cache, whatever its length."""
    lengths = sorted({1, 2, 3, lab.taps, lab.taps + 1, page, page + 1, 2 * page - 1, lab.long})
    serving = lab.serving(page=page, context=max(*lengths, lab.long) + 8)
    first = [serving.add(lab.ids(n, n), max_tokens=2, seed=n) for n in lengths]
    serving.run()
    again = [serving.add(lab.ids(n, n), max_tokens=4, seed=n + 1) for n in lengths]
    serving.run()
    for request, n in zip(again, lengths, strict=True):
        serving.expect_cached(request, n - 1)
    for request in first:
        serving.expect_cached(request, 0)
    # A prompt that differs in its last token alone resumes where the other one's point lies, too.
    other_last = [*lab.ids(lab.long, lab.long)[:-1], other(lab, lab.ids(lab.long, lab.long)[-1])]
    serving.expect_cached(serving.serve(other_last), lab.long - 1)
    serving.compare()


def branch(lab: Lab, page: int) -> None:
    """Two prompts that part ways teach the place; the third and the fourth resume there."""
    shared = lab.ids(lab.long - 3)
    serving = lab.serving(page=page, context=lab.long + 16, max_chunk=page + 1)
    requests: list[Request] = []
    for i in range(4):
        rest = [(lab.ids(1, 30)[0] + i) % lab.vocabulary, *lab.ids(4 + i, 31 + i)]
        requests.append(serving.serve(shared + rest, max_tokens=4, seed=i))
    for request, length in zip(requests, (0, 0, len(shared), len(shared)), strict=True):
        serving.expect_cached(request, length)
    serving.compare()


def copy_on_write(lab: Lab, page: int) -> None:
    """Continuations of one partial page at the same time, the first owner still writing there."""
    base = lab.long // page * page + page // 2 + 1
    prompt = lab.ids(base)
    serving = lab.serving(page=page, context=base + ROOM)
    owner = serving.add(prompt, max_tokens=new(page) + 3)
    while not owner.sequences[0].tokens[base:]:
        serving.step()
    after = owner.sequences[0].tokens[base]
    requests = [
        serving.add(prompt + tail(lab, after, 3, 40 + i), max_tokens=new(page), seed=i)
        for i in range(2)
    ]
    requests.append(serving.add(prompt, max_tokens=new(page), seed=9))
    serving.step()
    serving.step()
    running = {sequence.request.id for sequence in serving.engine.scheduler.running}
    serving.run()
    if len(running) != 4:
        raise NotTested(f"{len(running)} instead of 4 sequences shared the page at one time")
    for request, length in zip(requests, (base, base, base - 1), strict=True):
        serving.expect_cached(request, length)
    serving.compare()


def stopped_turn(lab: Lab, page: int) -> None:
    """A turn that ends by a stop token has run one token too many: its point must not see it."""
    prompt, most = lab.ids(lab.before_page(page), 50), new(page) + 6
    probe = lab.serving(page=page, context=lab.long + ROOM)
    drawn = probe.serve(prompt, max_tokens=most).sequences[0].tokens[len(prompt) :]
    # A token that comes for the first time, so that nothing before it ends the turn; if possible
    # where the window behind the point begins with the last token of a page.
    places = [i for i in range(1, most - 4) if drawn[i] not in drawn[:i]]
    ends = [i for i in places if (len(prompt) + i - lab.window + 1) % page == 0]
    place = (ends or places)[-1]
    serving = lab.serving(page=page, context=lab.long + ROOM)
    stopped = serving.serve(prompt, max_tokens=most, stop_token_ids=[drawn[place]])
    tokens = stopped.sequences[0].tokens
    if stopped.sequences[0].finish != "stop":
        raise NotTested(f"the turn ended by {stopped.sequences[0].finish}, not by its stop token")
    turn = tokens[:-1]
    again = serving.add(turn, max_tokens=4)
    onward = serving.add(turn + tail(lab, tokens[-1], 3, 51), max_tokens=4)
    serving.run()
    serving.expect_cached(again, len(turn) - 1)
    serving.expect_cached(onward, len(turn))
    computed = {row.position for row in serving.recorder.rows[stopped.sequences[0]]}
    if serving.settings.overlap and len(turn) not in computed:
        raise NotTested("no token too many was run behind the stop token")
    serving.compare()


def stride(lab: Lab, page: int) -> None:
    """Resume points at every few tokens: prompts that part ways anywhere resume just before."""
    prompt = lab.ids(lab.long, 60)
    serving = lab.serving(
        page=page,
        context=lab.long + 16,
        resume_stride=5,
        min_branch_gain=10**6,
        snapshots=lab.long // 5 + 32,  # none must go
    )
    serving.serve(prompt, max_tokens=1)
    shared = (5, 9, lab.long // 2, lab.long - 2)
    requests = [
        serving.add(prompt[:n] + tail(lab, prompt[n], 4, 61 + n), max_tokens=3, seed=n)
        for n in shared
    ]
    serving.run()
    for request, n in zip(requests, shared, strict=True):
        # A point one token past the divergence serves as well.
        serving.expect_cached(request, n if (n + 1) % 5 == 0 else n // 5 * 5)
    serving.compare()


def eviction(lab: Lab, page: int) -> None:
    """Conversations in turn over pools that cannot keep them all: a hit, or an honest miss."""
    context = lab.long + 24
    pools = lab.tight(page, context, spare=context // page, windows=4, snapshots=3)
    serving = lab.serving(page=page, context=context, max_running=2, **pools)
    histories = [lab.ids(lab.long // 2, 70 + i) for i in range(3)]
    for turn in range(3):
        for i in (0, 0, 1, 2) if turn else (0, 1, 2):
            request = serving.serve(histories[i], max_tokens=3, seed=turn)
            if i or not turn:
                histories[i] = request.sequences[0].tokens + lab.ids(3, 80 + turn)
    stats = serving.engine.cache.stats
    if not stats.hits or not stats.evictions.total():
        raise NotTested(f"{stats.hits} hits and {stats.evictions.total()} evictions")
    serving.compare()


def salted(lab: Lab, page: int) -> None:
    """What one tenant left is never another's hit."""
    prompt = lab.ids(lab.long)
    serving = lab.serving(page=page, context=lab.long + 4)
    for salt, length in (("a", 0), ("b", 0), ("a", lab.long - 1), ("b", lab.long - 1)):
        serving.expect_cached(serving.serve(prompt, salt=salt), length)
    serving.compare()


def media(lab: Lab, page: int) -> None:
    """Pictures or clips in prompts: cut by chunks, shared by content, never taken for another."""
    items = [_clip(lab, stream) for stream in (1, 2)]
    count = items[0].features.shape[0]
    prompt = [*lab.ids(items[0].index), *[0] * count, *lab.ids(lab.long // 2, 90)]
    serving = lab.serving(page=page, context=len(prompt) + 8, max_chunk=3)
    for which in (0, 1, 0, 1):
        serving.serve(prompt, items=[items[which]])
    most = len(prompt) - 1
    for request, length in zip(serving.requests, (0, 0, most, most), strict=True):
        serving.expect_cached(request, length)
    serving.compare()


def has_tower(lab: Lab) -> bool:
    return lab.model.audio is not None or lab.model.vision is not None


def _clip(lab: Lab, stream: int) -> Item:
    """Random input of the audio tower, or else of the vision tower."""
    generator = torch.Generator().manual_seed(lab.config.seed + stream)
    audio, vision = lab.model.config.audio, lab.model.config.vision
    if lab.model.audio is not None and audio is not None:
        kind, tower = "audio", lab.model.audio
        inputs = torch.randint(audio.mel_vocab_size, (7, audio.n_mel_bins), generator=generator)
    else:
        assert lab.model.vision is not None and vision is not None
        kind, tower, side = "image", lab.model.vision, vision.patch_size
        shape = (5, vision.temporal_patch_size, side, side, vision.n_channels)
        inputs = torch.randn(shape, generator=generator).to(lab.model.decoder.norm.weight.dtype)
    with torch.no_grad():
        features = tower(inputs.to(lab.reference.device))
    digest = hashlib.sha256(inputs.float().numpy().tobytes()).digest()
    return Item(index=4, kind=kind, digest=digest, inputs=inputs, features=features)


def samples(lab: Lab, page: int) -> None:
    """n samples of one prompt: one prefill, each sample its own noise; without the cache too."""
    for shares in (True, False):
        serving = lab.serving(page=page, context=lab.long + ROOM, prefix_cache=shares, max_chunk=9)
        request = serving.add(lab.ids(lab.long), n=4, max_tokens=new(page))
        beside = serving.add(lab.ids(lab.long // 2, 1), n=2, max_tokens=6, seed=5)
        serving.run()
        _expect_one_prefill(serving, request)
        _expect_one_prefill(serving, beside)
        serving.compare()


def _expect_one_prefill(serving: Serving, request: Request) -> None:
    length = len(request.prompt)
    for sample in range(1, len(request.sequences)):
        serving.expect_cached(request, length - 1, sample=sample)
    if len({tuple(s.tokens) for s in request.sequences}) == 1:
        raise NotTested(f"all samples of {request.id} are alike")
