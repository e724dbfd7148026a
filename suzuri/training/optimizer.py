"""AdamW over fp32 masters, and a model copy that is theirs rounded once."""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's operations on lists of tensors have such names.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import fnmatch
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from suzuri.kernels.exact import at_least_fp32
from suzuri.log import get_logger
from suzuri.types import AdamParams

WATCHED = 64
"""Numbers of each parameter that are compared before and after a step."""
STILL_STEPS = 10
"""So many steps in a row that move none of these are warned of."""

log = get_logger(__name__)


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns (as of file names) is of this parameter."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Marks what is trained: every parameter but those that a pattern names and those that take no
    gradient by nature (quantised experts, selection biases). Returns the names that are trained.
    ValueError for a pattern without a match: a typing error would train what was to stay."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"frozen: no parameter is named like {pattern!r}")
    trained: list[str] = []
    for name, parameter in model.named_parameters():
        can_train = parameter.dtype.is_floating_point and not name.endswith("router.bias")
        parameter.requires_grad_(can_train and not is_named(name, patterns))
        if parameter.requires_grad:
            trained.append(name)
    return trained


class Optimizer:
    """Masters and moments of the trained parameters, in at least fp32.

    A parameter in bf16 has a master beside it, which takes the steps; the parameter is the master
    rounded to nearest even, after every step. Gradients are summed in the master's dtype.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.parameters = {name: p for name, p in named if p.requires_grad}
        if not self.parameters:
            raise ValueError("nothing to train: every parameter is frozen")
        self.masters: dict[str, Tensor] = {}
        # Of what is rounded, where anything is.
        served = min((p.dtype for p in self.parameters.values()), key=lambda one: one.itemsize)
        for name, parameter in self.parameters.items():
            wide = at_least_fp32(parameter.dtype)
            if parameter.dtype == wide:
                self.masters[name] = parameter
            else:
                parameter.grad_dtype = wide
                self.masters[name] = parameter.detach().to(wide)
        self._watched = {
            name: _some_of(p.detach()) for name, p in self.parameters.items() if p.dtype == served
        }
        self._still = 0
        # On a CPU each number is read once, not once for every operation: a quarter of the time.
        masters = list(self.masters.values())
        on_cpu = all(master.is_cpu for master in masters)
        self._adam = torch.optim.AdamW(masters, foreach=not on_cpu, fused=on_cpu)

    def step(self, params: AdamParams, weight_sum: float) -> dict[str, float]:
        """One step from the gradients of the parameters, which are cleared. Parameters without a
        gradient stay, moments included. Returns the norm of the gradient before it was clipped and
        the share of the numbers looked at, WATCHED of a parameter, that the step changed as they
        are served: in bf16 a small step changes few, though the masters take it.
        FloatingPointError where the norm is no number: then only the gradients are gone."""
        names = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        held = [(self.masters[name], self.parameters[name]) for name in names]
        watched = [self._watched[name] for name in names if name in self._watched]
        gradients = [p.grad for _, p in held if p.grad is not None]
        if params.normalise and weight_sum:
            torch._foreach_div_(gradients, weight_sum)
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        if not bool(torch.isfinite(norm)):
            self.clear()
            raise FloatingPointError(
                f"the norm of the gradient is {float(norm)}: no step was taken and no gradient is "
                "pending any more; look at the last samples, or lower the learning rate"
            )
        if params.grad_clip_norm:
            scale = (params.grad_clip_norm / norm.clamp(min=1e-30)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale)
        before = torch.cat(watched) if watched else None
        for master, parameter in held:
            if master is not parameter:
                master.grad, parameter.grad = parameter.grad, None
        for group in self._adam.param_groups:
            group["lr"], group["eps"] = params.learning_rate, params.eps
            group["betas"] = (params.beta1, params.beta2)
            group["weight_decay"] = params.weight_decay
        self._adam.step()
        # The fused step moves no version counter, by which kernels/kept.py sees that a weight is
        # not what it was.
        torch.autograd.graph.increment_version([master for master, _ in held])
        self._adam.zero_grad(set_to_none=True)
        parameters: list[Tensor] = [
            parameter for master, parameter in held if master is not parameter
        ]
        if parameters:
            masters = [master for master, parameter in held if master is not parameter]
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        found = {"grad_norm": float(norm)}
        if before is not None:
            found["moved"] = float((torch.cat(watched) != before).float().mean())
            self._warn_of_standstill(found, params.learning_rate)
        return found

    def _warn_of_standstill(self, found: dict[str, float], rate: float) -> None:
        is_still = found["moved"] == 0.0 and found["grad_norm"] > 0 and rate > 0
        self._still = self._still + 1 if is_still else 0
        if self._still == STILL_STEPS:
            log.warning(
                "the last %d steps changed none of %d weights looked at, as they are served: a "
                "learning rate of %g is far below their rounding; raise it",
                *(STILL_STEPS, WATCHED * len(self._watched), rate),
            )

    def clear(self) -> None:
        """Forgets the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Masters, moments, step counts and pending gradients by name, the tensors themselves."""
        found: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            found[f"master.{name}"] = master.detach()
            for key, value in self._adam.state.get(master, {}).items():
                found[f"adam.{key}.{name}"] = value
            gradient = self.parameters[name].grad
            if gradient is not None:
                found[f"gradient.{name}"] = gradient
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state` gave: masters, moments, step counts, gradients; parameters
        follow. Raises ValueError when other parameters were trained."""
        there = {name.removeprefix("master.") for name in state if name.startswith("master.")}
        if there != set(self.masters):
            other = sorted(there ^ set(self.masters))
            raise ValueError(
                f"the saved state trains other parameters: {', '.join(other[:3])}"
                f"{' ...' if len(other) > 3 else ''}"
            )
        with torch.no_grad():
            for name, master in self.masters.items():
                parameter = self.parameters[name]
                master.copy_(state[f"master.{name}"])
                if master is not parameter:
                    parameter.copy_(master)
                kept = {
                    key: state[f"adam.{key}.{name}"].to(
                        # A saved state is read on the CPU; AdamW counts its steps there.
                        "cpu" if key == "step" else master.device,
                        copy=True,
                    )
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"adam.{key}.{name}" in state
                }
                self._adam.state.pop(master, None)
                if kept:
                    self._adam.state[master] = kept
                gradient = state.get(f"gradient.{name}")
                parameter.grad = (
                    None if gradient is None else gradient.to(parameter.device, copy=True)
                )


def _some_of(parameter: Tensor) -> Tensor:
    """WATCHED of its numbers, from the middle, as a view: side by side, so that those of all
    parameters are gathered in one launch."""
    first = max(0, parameter.numel() - WATCHED) // 2
    return parameter.view(-1)[first : first + WATCHED]
