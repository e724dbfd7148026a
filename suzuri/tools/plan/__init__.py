"""`suzuri plan`: whether and how a model runs on some hardware, without a GPU and the weights.

Reading order: config.py (what can be asked), hardware.py and families.py (the cards), card.py (the
card that is meant), request.py and verdict.py (the sum and yes or no, from model/sizes.py),
exchanges.py and floors.py (the least time of a step), changes.py (what would turn no into yes),
report.py, run.py; suggest.py (a setup that fits, for hints elsewhere).
Public: PlanConfig, run_plan, suggestion.
"""
