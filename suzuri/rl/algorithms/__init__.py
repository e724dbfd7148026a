"""From the attempts at one problem to samples with per-token weights; one file per algorithm.

Read group.py first: what every algorithm is. No torch here.
"""
