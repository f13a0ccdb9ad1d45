"""Prefill and decode in different processes: one engine computes prompts, others continue them in the same memory."""
