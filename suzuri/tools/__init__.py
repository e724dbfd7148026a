"""Proofs and answers for the user, each a subcommand of the cli.

plan/, pull/, inspect/ and doctor/ need no torch. convert.py rewrites checkpoints. Of the trace:
trace_config.py, trace.py (what is traced, table and verdict), golden.py (what a golden folder asks
of a model), media_trace.py (preprocessing), self_trace.py (no expected numbers), rows.py
(comparing), loading.py (reading). Public: one config and one run function per command.
"""
