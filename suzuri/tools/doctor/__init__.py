"""One report on the machine, to paste into an issue.

Reading order: config.py, run.py, report.py (a line and how it prints), host.py (asking programs
with a time limit); then what is looked at: system.py, resources.py, nvidia.py (reads), gpus.py
(judges), pytorch.py, packages.py. Public: DoctorConfig, run_doctor.
"""
