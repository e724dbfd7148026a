"""What is in a checkpoint, by part, and whether it is complete; headers only, no torch.

Reading order: config.py, run.py, folder.py, parts.py, report.py. Public: InspectConfig,
run_inspect.
"""
