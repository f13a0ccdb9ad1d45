"""Measurements that need a GPU: `bench/gpu.sh`, or `python -m bench.gpu`.

Every part is a module with `run(quick) -> Report` and runs in a process of its own, so that what a kernel's fault or a
hang takes with it is one part. Without a GPU the parts run over the stub driver of the tests, to see that they run:
those that compute say that they were skipped, and times mean nothing.
"""

# In the order of worth: if time runs out, what matters most is there. Seconds are limits, not expectations.
PARTS: dict[str, tuple[str, int]] = {
    "tests": ("tests/gpu: the contract on the real driver, kernels, fences, graphs", 150),
    "tails": ("each kernel with an unmapped page, and with NaN, right after the length", 80),
    "strides": ("slots more than 100 GB apart", 40),
    "driver": ("latency of driver calls, allocation bandwidth by layout", 60),
    "attention": ("decode and prefill attention: virtual, pre-allocated and paged", 90),
    "layouts": ("decode attention by layout, against pre-allocated tensors", 60),
    "overlap": ("decode iterations that need memory, mapped ahead and on the spot", 60),
    "engine": ("whole decode steps of a model: virtual, pre-allocated and paged, with and without graphs", 90),
}

# CUDA's allocation granularity on all GPUs so far.
PAGE = 2 * 2**20
