"""Proofs and answers for the user, each a subcommand of the cli.

Reading order: trace_config.py, trace.py (what is traced, table and verdict), golden.py (what a
golden folder asks of a model), media_trace.py (preprocessing), self_trace.py (no expected numbers);
rows.py (comparing) and loading.py (reading) serve them. Public: TraceConfig, run_trace.
"""
