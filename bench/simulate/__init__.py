"""A serving engine without its model: the real allocator and scheduler under a simulated clock.

provider.cpp     driver calls that make no memory, and add up what they would take
provider.py      the same for Python: a pool of such pages, and the clocks that its calls advance
stores.py        the backends: vattn's cache over that pool, and the paged backend's blocks
gpus.py          a stand-in for the time of a step: published figures of A100 and H100, or a fit to a real run
traces.py        requests: log-normal lengths, turns of conversations, long contexts
replay.py        the engine's loop, under these clocks
"""
