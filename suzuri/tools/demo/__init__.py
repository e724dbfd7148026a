"""The small model of this package answers four questions that it was never trained on.

Reading order: config.py, run.py, questions.py (what is asked and when an answer is right), tools.py
(tools that run here), pixels.py (pictures in a terminal). Public: DemoConfig, run_demo.
"""
