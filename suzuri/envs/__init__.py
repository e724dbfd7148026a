"""Tasks with answers that can be checked: what the small model learns from and is measured on.

Reading order: task.py (one task), graders.py (what makes an answer right), generators/ (where tasks
come from), mixture.py (an endless, resumable stream of them). No torch in this room. Other rooms
may use `Task`, `draw`, `KINDS`, `Mixture` and the graders.
"""
