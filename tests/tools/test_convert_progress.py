"""What `suzuri convert` shows while it writes."""

import io

from rich.console import Console

from suzuri.tools.convert_progress import shown


def test_lines_come_every_thirty_seconds_with_the_speed_of_this_run() -> None:
    text = io.StringIO()
    now = [100.0]
    total, kept = 500_000_000_000, 100_000_000_000
    with shown(Console(file=text), total, kept, clock=lambda: now[0]) as progress:
        for seconds in range(1, 100):
            now[0] += 1
            progress(kept + seconds * 1_000_000_000)
    assert text.getvalue().splitlines() == [
        "writing: 130.0 of 500.0 GB (26%), 1000.0 MB/s, about 6 min left",
        "writing: 160.0 of 500.0 GB (32%), 1000.0 MB/s, about 6 min left",
        "writing: 190.0 of 500.0 GB (38%), 1000.0 MB/s, about 5 min left",
    ]


def test_hours_left_and_no_speed_yet() -> None:
    text = io.StringIO()
    now = [0.0]
    with shown(Console(file=text), 10**12, 0, clock=lambda: now[0]) as progress:
        now[0] = 40
        progress(0)
        now[0] = 80
        progress(10**10)
    assert text.getvalue().splitlines() == [
        "writing: 0.0 of 1000.0 GB (0%), 0.0 MB/s",
        "writing: 10.0 of 1000.0 GB (1%), 125.0 MB/s, about 2 h 12 min left",
    ]


def test_a_terminal_gets_a_bar() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with shown(console, 2_000_000, 0) as progress:
        progress(1_000_000)
        progress(2_000_000)
    assert "writing" in text.getvalue() and "2.0/2.0 MB" in text.getvalue()
