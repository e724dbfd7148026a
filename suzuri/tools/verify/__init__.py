"""Exactness on the user's own machine and checkpoint: every way of serving against one forward.

Reading order: config.py, run.py, lab.py (one serving run and its comparison), reference.py,
record.py; checks_*.py hold the matrix, matrix.py lists it. Public: VerifyConfig, run_verify.
"""
