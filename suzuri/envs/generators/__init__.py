"""Generators of tasks, one file per kind, all text and media made here.

Each file has VARIANTS (name to the difficulty from which it is asked) and `make(rng, difficulty,
variant=None)`. kinds.py lists them; words.py and wording.py are what they share.
"""
