"""Serving one model to many requests: continuous batching over exact caches.

docs/engine.md first. Reading order: engine.py (the step), scheduler.py, runner.py, sampler.py;
state: pages.py, prefix_cache.py, cache.py, routing.py; request.py and sampling_params.py. Public:
EngineConfig, Engine, SamplingParams, LLM.
"""
