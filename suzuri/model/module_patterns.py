"""Lists of module names and patterns in quantisation files, asked about routed experts only."""

# pyright: strict

import fnmatch
import re
from collections.abc import Iterator, Sequence

PREFIXES = tuple(
    f"{model}{decoder}layers."
    for model in ("model.", "")
    for decoder in ("llm.", "language_model.", "language_model.model.", "")
)
"""How the names of decoder layers begin in the layouts in use."""
MEMBERS = (
    ("w13_weight", "w2_weight"),
    ("gate_up_proj", "down_proj"),
    ("0.gate_proj", "0.up_proj", "0.down_proj"),
    ("0.w1", "0.w2", "0.w3"),
)
"""What the experts of a layer may consist of; 0 stands for every expert."""

_ONE_EXPERT = re.compile(r"(?<!shared_)experts\\?\.\d")


class ModulePatterns:
    """Entries of one or more lists: exact names, wildcards (`*.attn*`) and, after `re:`, regular
    expressions. An exact name or wildcard that names a module names all that is inside it.

    `entries` are pairs of (name in the file, text), `label` names the lists. Raises ValueError
    naming the entry that is no regular expression or picks one expert, because those of a layer
    are stored together.
    """

    def __init__(self, label: str, entries: Sequence[tuple[str, str]]) -> None:
        self._label = label
        names: set[str] = set()
        wildcards: list[str] = []
        self._regexes: list[tuple[re.Pattern[str], bool]] = []
        for where, text in entries:
            if _ONE_EXPERT.search(text):
                raise ValueError(
                    f"{where} = {text!r} picks one expert; the experts of a layer are quantised "
                    "together or not at all"
                )
            if text.startswith("re:"):
                self._regexes.append((_compiled(where, text), "experts" in text))
            elif any(char in text for char in "*?["):
                wildcards.append(text)
            else:
                names.add(text)
        self._names = frozenset(names)
        self._wildcards = _either(wildcards)
        # A wildcard such as *gate* is meant for routers, not for a tensor gate_up_proj.
        self._member_wildcards = _either([text for text in wildcards if "experts" in text])

    def name_experts(self, layer: int) -> bool:
        """Whether the entries name the routed experts of a layer.

        Raises ValueError when they name part of them.
        """
        in_part = False
        for prefix in PREFIXES:
            module = f"{prefix}{layer}.mlp.experts"
            if self._names_module(module):
                return True
            for family in MEMBERS:
                named = [self._names_member(f"{module}.{one}") for one in family]
                if all(named):
                    return True
                in_part = in_part or any(named)
        if in_part:
            raise ValueError(
                f"{self._label} names only part of the routed experts of layer {layer}; they are "
                "quantised together or not at all"
            )
        return False

    def _names_module(self, module: str) -> bool:
        if any(regex.match(module) for regex, _ in self._regexes):
            return True
        return any(
            name in self._names or self._wildcards.match(name) for name in _enclosing(module)
        )

    def _names_member(self, name: str) -> bool:
        if name in self._names or self._member_wildcards.match(name):
            return True
        return any(experts and regex.match(name) for regex, experts in self._regexes)


def _enclosing(module: str) -> Iterator[str]:
    """The module's name and the names of all modules around it."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        yield ".".join(parts[:count])


def _either(wildcards: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, wildcards)) or "(?!)")


def _compiled(where: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{where} = {text!r}: not a regular expression: {error}") from error
