"""The client of a serving benchmark: requests to any OpenAI-compatible server, and what their timings say.

Names and definitions of the figures are those of vLLM's `vllm bench serve`, so results can be laid side by side.
"""
