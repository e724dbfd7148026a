"""HTTP in front of an engine: OpenAI's completions and chat completions, health and metrics.

It knows HTTP and text; the engine, in a process of its own, knows tokens. Torch-free: rendering and
encoding are done in further processes (text_worker.py), because their library loads torch.

Read in this order: run.py (start and end of the processes), app.py (the routes), chat.py and
completions.py (one request from JSON to tokens and back), streaming.py; then schema.py (what may be
asked), text_client.py, service.py (what all requests share), metrics.py, errors.py. For RL:
native.py (ids to ids), weights.py (other weights). What stands between a client and the routes:
protocol.py (one connection), limits.py (keys, sizes, times), bodies.py (JSON).
"""
