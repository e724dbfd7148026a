"""How `suzuri inspect` shows what it found: tables and a verdict, or JSON."""

import dataclasses
import fnmatch
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from suzuri import __version__
from suzuri.model.checkpoint_files import TensorEntry
from suzuri.model.config import ModelConfig
from suzuri.model.tensor_table import Storage
from suzuri.tools.doctor.report import WIDTH, printable
from suzuri.tools.inspect.folder import StoredFile
from suzuri.tools.inspect.parts import Experts, Group, experts, groups, ranges
from suzuri.tools.plan.suggest import suggestion

MAX_FILES = 100
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
EXPERT_NAMES = {"modelopt": "ModelOpt names", "compressed-tensors": "compressed-tensors names"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What is known of a model. `folder` is None for a shape without files."""

    name: str
    folder: Path | None
    layout: str
    config: ModelConfig | None
    tensors: Mapping[str, TensorEntry]
    files: Sequence[StoredFile] = ()
    faults: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def num_faults(self) -> int:
        """How many faults there are; a loader that found many lists the first and counts on."""
        more = [re.fullmatch(r"and (\d+) more", fault) for fault in self.faults]
        return sum(int(found[1]) if found else 1 for found in more)

    @property
    def verdict(self) -> str:
        """The last line of the report."""
        if self.faults:
            first = self.faults[0].splitlines()[0]
            return f"INCOMPLETE or faulty: {self.num_faults} fault(s), first {first}"
        amount = f"{len(self.tensors)} tensors, {size(self.num_bytes)}"
        if self.folder is None:
            return f"OK: a shape without files, {amount}"
        return f"OK: complete, {amount}"


def size(count: int) -> str:
    """Bytes as a reader writes them, in powers of ten."""
    for unit, factor in UNITS:
        if count >= factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count} bytes"


def chosen(tensors: Mapping[str, TensorEntry], patterns: Sequence[str]) -> dict[str, TensorEntry]:
    """The tensors that a user wants listed: all for no pattern."""
    return {
        name: entry
        for name, entry in tensors.items()
        if not patterns
        or any(_fits(one, pattern) for one in (name, entry.stored_name) for pattern in patterns)
    }


def _fits(name: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def show_tables(found: Findings, wanted: Mapping[str, TensorEntry] | None) -> None:
    """Print everything, single tensors where they are wanted; the last line is the verdict."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in {"model": found.name, **format_facts(found), **config_facts(found)}.items():
        facts.add_row(name, printable(value))
    console.print(facts)
    console.print(_group_table(groups(found.tensors)))
    if found.files:
        console.print(_file_table(found.files))
    for name, entry in (wanted or {}).items():
        shape = "x".join(map(str, entry.shape)) or "scalar"
        print(printable(f"{entry.dtype:<8} {shape:<18} {size(entry.nbytes):>12}  {name}"))
    if wanted is not None and not wanted:
        print("nothing matched --tensors: no name has these words or fits these patterns")
    for note in found.notes:
        print(printable(f"note: {note}"))
    for fault in found.faults:
        print(printable(f"fault: {fault}"))
    if found.config is not None:
        where = shlex.quote(str(found.folder or found.name))
        flags = suggestion(found.config, stored_as(found))
        print(printable(f"what it runs on: suzuri plan {where} {flags}"))
    print(printable(found.verdict))


def stored_as(found: Findings) -> Storage:
    """How the tensors keep the model, which may be otherwise than the config says."""
    layers = {layer for held in experts(found.tensors).nvfp4.values() for layer in held}
    return Storage(nvfp4_layers=tuple(sorted(layers)))


def format_facts(found: Findings) -> dict[str, str]:
    """Layout, experts and size, as name to text."""
    held = found.num_bytes
    drafts = sum(group.num_bytes for group in groups(found.tensors) if group.part == "mtp")
    facts = {"layout": found.layout, "experts": _experts_text(experts(found.tensors))}
    facts["weights"] = f"{size(held)} in memory as stored" + (
        f", of it {size(drafts)} draft depths" if drafts else ""
    )
    return facts


def _experts_text(stored: Experts) -> str:
    texts = [
        f"NVFP4 ({EXPERT_NAMES.get(names, names)}) in layers {ranges(layers)}"
        for names, layers in stored.nvfp4.items()
    ]
    texts += [f"{dtype} in layers {ranges(layers)}" for dtype, layers in stored.plain.items()]
    if stored.num_quantised:
        have, all_of = stored.num_activation_scales, stored.num_quantised
        texts.append(
            "with activation scales"
            if have == all_of
            else "weight-only (no activation scales)"
            if not have
            else f"activation scales for {have} of {all_of} tensors"
        )
    return "; ".join(texts) or "none"


def config_facts(found: Findings) -> dict[str, str]:
    """The config as name to text; nothing where it cannot be read."""
    config = found.config
    if config is None:
        return {}
    text = config.text
    local, dense = len(text.local_layer_ids), min(text.dense_mlp_idx, text.num_hidden_layers)
    window = f" (window {text.sliding_window_size})" if local else ""
    sparse = text.num_hidden_layers - dense
    facts = {
        "layers": f"{text.num_hidden_layers}: {local} local{window}, "
        f"{text.num_hidden_layers - local} global; {dense} dense, {sparse} with experts",
        "hidden": f"{text.hidden_size}; dense MLP {text.dense_intermediate_size}",
        "heads": f"global {text.num_attention_heads} / {text.num_key_value_heads} KV of "
        f"{text.head_dim}, local {text.swa_num_attention_heads} / "
        f"{text.swa_num_key_value_heads} KV of {text.swa_head_dim}",
    }
    if sparse:
        facts["mixture"] = (
            f"{text.n_routed_experts} experts of width {text.intermediate_size}, "
            f"{text.num_experts_per_tok} per token; {text.n_shared_experts} shared"
        )
    kept = config.kept_vocabulary
    facts["vocabulary"] = f"{text.unpadded_vocab_size} of {text.vocab_size} rows" + (
        "" if kept is None else f"; a kept vocabulary of {len(kept)} tokenizer ids"
    )
    facts["context"] = f"{text.model_max_length} tokens"
    towers = {"vision": config.vision, "audio": config.audio}
    facts["towers"] = ", ".join(name for name, tower in towers.items() if tower) or "none"
    facts["draft depths"] = str(config.mtp_depths)
    if config.quantization is not None:
        said = config.quantization
        facts["quantization"] = f"the config says NVFP4 in layers {ranges(said.layers)}"
    if config.unknown_keys:
        facts["ignored keys"] = ", ".join(config.unknown_keys)
    return facts


def _group_table(found: Sequence[Group]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("part", "of it"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tensors", "parameters", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("dtypes", overflow="fold")
    part = ""
    for group in found:
        table.add_row(
            group.part if group.part != part else "",
            group.name if group.name != group.part else "",
            f"{group.num_tensors:,}",
            f"{group.num_values:,}",
            size(group.num_bytes),
            " ".join(group.dtypes),
        )
        part = group.part
    table.add_section()
    table.add_row(
        "all",
        "",
        f"{sum(group.num_tensors for group in found):,}",
        f"{sum(group.num_values for group in found):,}",
        size(sum(group.num_bytes for group in found)),
        "",
    )
    return table


def _file_table(files: Sequence[StoredFile]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("file", overflow="fold")
    for heading in ("size", "tensors"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for file in files[:MAX_FILES]:
        amount = "cannot be opened" if file.num_bytes is None else size(file.num_bytes)
        tensors = str(file.num_tensors) if file.state else ""
        table.add_row(printable(file.name), amount, tensors, file.state)
    if len(files) > MAX_FILES:
        table.add_row(f"and {len(files) - MAX_FILES} more", "", "", "")
    return table


def as_document(found: Findings, wanted: Mapping[str, TensorEntry] | None) -> dict[str, Any]:
    """Everything as plain JSON values; "tensors" is there only where single ones are wanted."""
    summary = groups(found.tensors)
    stored = experts(found.tensors)
    document: dict[str, Any] = {
        "suzuri": __version__,
        "model": found.name,
        "folder": None if found.folder is None else str(found.folder),
        "verdict": found.verdict,
        "complete": not found.faults and found.folder is not None,
        "faults": list(found.faults),
        "notes": list(found.notes),
        "layout": found.layout,
        "bytes": found.num_bytes,
        "parameters": sum(group.num_values for group in summary),
        "experts": dataclasses.asdict(stored),
        "config": None if found.config is None else config_facts(found),
        "parts": [dataclasses.asdict(group) for group in summary],
        "files": [dataclasses.asdict(file) for file in found.files],
    }
    if wanted is not None:
        document["tensors"] = [
            {
                "name": name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "file": entry.file,
            }
            for name, entry in wanted.items()
        ]
    return document


def show_json(found: Findings, wanted: Mapping[str, TensorEntry] | None) -> None:
    """Print one JSON object, in plain ASCII."""
    print(json.dumps(as_document(found, wanted), indent=1))
