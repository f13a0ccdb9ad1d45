"""Benchmarks: each reproduces a published result, or shows one of vattn's own, as ratios within one run.

    python -m bench NAME [--quick] [--json FILE]
    python -m bench.harness.plot [--check]

A benchmark is a module with `run(quick) -> Report`. What `--json` writes is committed as
`bench/results/<machine>/<name>.json`; plots and tables in the documents are made from those files only.
"""

BENCHMARKS = {
    "step": "time of step() with 256 running requests, against filling a padded block table",
    "admission": "time to admit, step and free a short request, by the number of slots",
    "overlap": "latency of decode iterations that need new memory, mapped ahead and mapped on the spot",
    "fragmentation": "physical over live bytes: static, paged, and virtual by layout and page size",
    "decode": "attention and whole decode steps, virtual against paged",
    "profile": "where the time of an engine's step goes",
    "prefix": "what a prefix cache saves: shared prompts, chats, trees; paged and virtual",
    "speculate": "decoding with prompt-lookup drafts: tokens per step and speed-up, by how often drafts are right",
    "throughput": "offline throughput of every backend, of transformers and of vLLM",
    "batching": "static against continuous batching: waste per request, latency of short ones behind long ones",
    "memory": "memory of each kind of cache for the same requests, by how many run at a time",
    "blocks": "blocks that each request uses, of those that a reservation would take",
    "windows": "bytes per request against context where layers have sliding windows",
    "mla": "latents in place of keys and values: bytes per token, and the time of attention over them",
    "quantised": "keys and values in 8 bits: bytes per token, error of logits and tokens, time of a decode step",
    "capacity": "sequences that fit a memory budget, by backend",
    "backends": "decode steps of all four backends, by batch size",
    "cache": "transformers' caches: decode steps and memory of dynamic, static and virtual",
    "block_size": "what a larger block wastes, and what a smaller one costs",
}
