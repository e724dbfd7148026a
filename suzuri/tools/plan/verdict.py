"""The plan: one sum per GPU, limits from the same inequality, floors, yes or no."""

import dataclasses

from suzuri.model.config import ModelConfig
from suzuri.model.sizes import MAX_CONCURRENCY, Line, Sizes
from suzuri.model.sizes_state import SequenceState, StateSizes
from suzuri.tools.plan.floors import DraftFloor, Floor, Floors
from suzuri.tools.plan.request import Request, layout_of

GIB = 2**30
GROUPS = ("weights", "state", "workspace", "reserve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits and how fast it can be at best. `lines` are for one GPU; all hold the same."""

    model: str
    request: Request
    lines: tuple[Line, ...]
    state: StateSizes
    sequence: SequenceState
    resume_point: int
    model_limit: int
    """The longest context that the model itself allows."""
    largest_context: int
    largest_concurrency: int
    """Over all copies. MAX_CONCURRENCY means that many or more."""
    decode: Floor
    """A step of the fullest copy."""
    tokens_per_second: float
    """Of all copies together at their decode floors; copies do not wait for each other."""
    prefill: Floor
    draft: DraftFloor | None

    @property
    def total(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def memory(self) -> int:
        return self.request.gpu.memory_bytes

    @property
    def fits(self) -> bool:
        return self.total <= self.memory

    @property
    def groups(self) -> dict[str, int]:
        """Bytes of weights, state, workspace and reserve."""
        return {
            group: sum(line.num_bytes for line in self.lines if line.group == group)
            for group in GROUPS
        }

    @property
    def sum_in_words(self) -> str:
        """The sum that decides, for one GPU."""
        parts = " + ".join(f"{group} {gib(n)}" for group, n in self.groups.items())
        sign = "<=" if self.fits else ">"
        return f"{parts} = {gib(self.total)} {sign} {gib(self.memory)} GiB per GPU"


def sizes_of(config: ModelConfig, request: Request) -> Sizes:
    """The sizes of one rank of a request."""
    gpu = request.gpu
    return Sizes(
        config, layout_of(config, request), gpu.memory_bytes, system_bytes=gpu.system_bytes
    )


def fits(config: ModelConfig, request: Request) -> bool:
    """Whether a request fits: the same sum as in `make_plan`, without the rest."""
    return sizes_of(config, request).fits(request.context, request.per_copy)


def make_plan(model: str, config: ModelConfig, request: Request) -> Plan:
    """Compute everything. Raises ValueError when the model cannot be cut as asked."""
    sizes = sizes_of(config, request)
    floors = Floors(
        config, layout_of(config, request), request.gpu, any_experts=request.any_experts
    )
    steps = {n: floors.decode(n, request.context).seconds for n in request.spread}
    per_copy = sizes.largest_concurrency(request.context)
    return Plan(
        model=model,
        request=request,
        lines=sizes.lines(request.context, request.per_copy),
        state=sizes.state,
        sequence=sizes.state.sequence(request.context),
        resume_point=sizes.state.resume_point(request.context),
        model_limit=config.text.model_max_length,
        largest_context=sizes.largest_context(request.per_copy),
        largest_concurrency=min(per_copy * request.copies, MAX_CONCURRENCY),
        tokens_per_second=sum(
            copies * number / steps[number] for number, copies in request.spread.items()
        ),
        decode=floors.decode(request.per_copy, request.context),
        prefill=floors.prefill(1, request.context),
        draft=floors.draft_and_verify(request.per_copy, request.context),
    )


def gib(num_bytes: float) -> str:
    """Bytes in GiB with two decimals, the unit left to the caller."""
    return f"{num_bytes / GIB:.2f}"


def amount(num_bytes: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
