"""`python -m suzuri` is the command `suzuri`."""

from suzuri.cli import main

main()
