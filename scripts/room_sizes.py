"""Lines per room against the aims of docs/style.md section 2, and what outgrew the limits there.

Reported, not enforced. Run with `make sizes`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGE = Path(__file__).resolve().parents[1] / "suzuri"

TOP = "config, types, log, interrupts, cli"
AIMS = {
    TOP: 950,
    "kernels": 9_000,
    "distributed": 1_000,
    "model": 7_000,
    "processing": 3_500,
    "engine": 7_000,
    "training": 3_000,
    "envs": 5_000,
    "server": 4_000,
    "rl": 1_500,
    "evals": 800,
    "tools": 7_500,
}
FILE_LINES = 500
KERNEL_FILE_LINES = 600
FUNCTION_LINES = 80
STEP_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Oversize:
    """A file or function above its limit."""

    place: str
    lines: int
    limit: int


def rooms(package: Path) -> dict[str, list[Path]]:
    """Files by room, in the order of AIMS; a room without an aim comes last."""
    found: dict[str, list[Path]] = {room: [] for room in AIMS}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        found.setdefault(parts[0] if len(parts) > 1 else TOP, []).append(path)
    return found


def count_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def oversize_files(package: Path) -> Iterator[Oversize]:
    for path in sorted(package.rglob("*.py")):
        limit = KERNEL_FILE_LINES if path.name == "kernel.py" else FILE_LINES
        if (lines := count_lines(path)) > limit:
            yield Oversize(place=str(path.relative_to(package.parent)), lines=lines, limit=limit)


def oversize_functions(package: Path) -> Iterator[Oversize]:
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_gpu_code(node):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                limit = STEP_LINES if node.name == "step" else FUNCTION_LINES
                if lines > limit:
                    place = f"{path.relative_to(package.parent)}:{node.lineno} {node.name}"
                    yield Oversize(place=place, lines=lines, limit=limit)


def is_gpu_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton kernels may be long: their decorators include `jit`."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def room_table(package: Path) -> Table:
    table = Table("room", "files", "lines", "aim", "share of aim", title="Lines per room")
    for column in table.columns[1:]:
        column.justify = "right"
    total = 0
    for room, paths in rooms(package).items():
        lines = sum(map(count_lines, paths))
        total += lines
        aim = AIMS.get(room)
        share = f"{lines / aim:.0%}" if aim else "no aim"
        style = "red" if not aim or lines > aim else "dim" if not lines else None
        table.add_row(room, str(len(paths)), f"{lines:,}", f"{aim or 0:,}", share, style=style)
    table.add_section()
    aims = sum(AIMS.values())
    table.add_row("all", "", f"{total:,}", f"{aims:,}", f"{total / aims:.0%}", style="bold")
    return table


def oversize_table(title: str, rows: list[Oversize]) -> Table:
    table = Table("place", "lines", "limit", title=title, title_justify="left")
    for row in rows:
        table.add_row(row.place, str(row.lines), str(row.limit))
    return table


def main() -> None:
    console = Console()
    console.print(room_table(PACKAGE))
    for title, rows in (
        ("Files over their limit", list(oversize_files(PACKAGE))),
        ("Functions over their limit", list(oversize_functions(PACKAGE))),
    ):
        console.print(oversize_table(title, rows) if rows else f"{title}: none")


if __name__ == "__main__":
    main()
