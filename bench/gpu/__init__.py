"""Measurements that need a GPU: `bench/gpu.sh`, or `python -m bench.gpu`.

Every part is a file in `bench/gpu/parts/` and runs in a process of its own, so that a kernel's fault or a hang costs
one part only. Without a GPU the parts run over the stub driver of the tests, to see that they run: those that compute
are recorded as skipped, and times mean nothing.
"""

# CUDA's allocation granularity on all GPUs so far.
PAGE = 2 * 2**20
