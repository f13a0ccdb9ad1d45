"""Measurements that need a GPU: `bench/gpu.sh`, or `python -m bench.gpu`.

Every part is a file in `bench/gpu/parts/` and runs in a process of its own, so that a kernel's fault or a hang costs
one part only. Without a GPU they run over the stub driver, and compute on the CPU in sizes as small as possible, to see
that they run: times mean nothing.
"""

# CUDA's allocation granularity on all GPUs so far.
PAGE = 2 * 2**20
