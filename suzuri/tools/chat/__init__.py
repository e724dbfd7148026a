"""A conversation in the terminal, with a server or with a model in this process.

Reading order: config.py, run.py, loop.py (lines, commands, turns), conversation.py (what the model
is sent), backend.py (what answers: remote.py over http.py, or local.py), display.py and lines.py
(the terminal). Only local.py needs torch. Public: ChatConfig, run_chat.
"""
