"""What is in a checkpoint, by part, and whether it is complete; headers and the few
numbers that go with NVFP4 tensors; no torch.

Reading order: config.py, run.py, folder.py, parts.py, report.py. Public: InspectConfig,
run_inspect.
"""
