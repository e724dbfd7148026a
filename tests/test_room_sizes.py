"""scripts/room_sizes.py counts what it says, on a small package made for the purpose."""

from pathlib import Path

from scripts.room_sizes import TOP, oversize_files, oversize_functions, rooms


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def function(name: str, lines: int, decorator: str = "") -> str:
    return decorator + f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def test_files_are_counted_in_their_room(tmp_path: Path):
    package = tmp_path / "suzuri"
    write(package / "cli.py", "")
    write(package / "model" / "deep" / "a.py", "")
    write(package / "new_room" / "a.py", "")
    counts = {room: len(paths) for room, paths in rooms(package).items()}
    assert counts[TOP] == counts["model"] == counts["new_room"] == 1
    assert counts["engine"] == 0


def test_limits(tmp_path: Path):
    package = tmp_path / "suzuri"
    write(package / "kernels" / "op" / "kernel.py", "x = 1\n" * 600)
    write(package / "kernels" / "op" / "reference.py", "x = 1\n" * 501)
    write(package / "a.py", function("f", 80) + function("g", 81))
    write(package / "b.py", function("step", 41) + function("k", 99, "@triton.jit\n"))
    assert [(o.place, o.lines) for o in oversize_files(package)] == [
        ("suzuri/kernels/op/reference.py", 501)
    ]
    assert [(o.place, o.lines) for o in oversize_functions(package)] == [
        ("suzuri/a.py:81 g", 81),
        ("suzuri/b.py:1 step", 41),
    ]
