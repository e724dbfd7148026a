"""Tasks with answers that can be checked: what the small model learns from and is measured on.

Reading order: task.py (one task), graders.py (what makes an answer right), generators/ (where tasks
come from), mixture.py (an endless, resumable stream of them). Then env.py (what can be attempted),
rollout.py (how it is played), task_env.py, tool_sums.py, verifiable.py (prompts of files, graded by
checks.py), gym.py and dotted.py (problems from elsewhere). Code that may not end runs in
sandbox.py and workers.py. No torch in this room.
Other rooms may use `Task`, `draw`, `KINDS`, `Mixture`, the graders, environments and problems.
"""
