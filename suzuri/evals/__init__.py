"""How good a model is: generated tasks that it never trained on, answered by the engine, graded.

Reading order: config.py, run.py, exchange.py (a task's turns), report.py; draft_length.py. Public:
`EvalConfig`, `run_eval`.
"""
