"""Fetching a model from the hub: resumed, checked, complete or the reason why not.

Reading order: config.py, run.py, choice.py (which files), places.py (where to), fetch.py (one
file), workers.py (several at once). Public: PullConfig, run_pull.
"""
