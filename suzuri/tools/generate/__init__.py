"""Completing many prompts at once: from a file or stdin, JSON lines out.

Reading order: config.py, run.py, lines.py (what a line of input means), source.py (where lines come
from), report.py (what a line of output holds). Public: GenerateConfig, run_generate.
"""
