"""The order of the page, and what others have published on the same questions."""

from __future__ import annotations

from dataclasses import dataclass

PAPER = "vAttention, arXiv 2405.04437 and ASPLOS '25; A100 GPUs"
CLASSIC = "a public course on inference engines; one GPU"


@dataclass(frozen=True)
class Published:
    """What a benchmark reproduces.

    Attributes:
        what: what was measured.
        result: in the words and units of its source.
    """

    what: str
    result: str
    source: str = PAPER


# Every benchmark is in one section.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Memory": ("table", "memory", "capacity", "blocks", "fragmentation", "external", "windows", "mla", "quantised"),
    "Attention": ("decode", "prefill", "kernels", "kernels_paged", "block_size"),
    "Mapping": ("overlap", "deferred", "ablation", "demand", "alloc", "step", "padded", "reserve", "admission"),
    "Serving": (
        "backends",
        "conversations",
        "offline",
        "online",
        "throughput",
        "serving",
        "batching",
        "prefix",
        "shared",
        "shared_restart",
        "shared_admission",
        "pool",
        "roles",
        "speculate",
        "threads",
        "profile",
        "simulate",
    ),
    "In other engines": ("cache", "passes", "plugin", "shared_budget"),
}

PUBLISHED: dict[str, tuple[Published, ...]] = {
    "decode": (
        Published("decode throughput at 16K tokens", "equal to the best paged kernel; 1.23 x over paged FlashInfer"),
    ),
    "prefill": (
        Published(
            "prefill throughput at 192K tokens",
            "1.24 to 1.26 x over paged FA2; 1.17 to 1.36 x over paged FlashInfer",
        ),
    ),
    "kernels_paged": (
        Published("paged against contiguous prefill kernels", "paged up to 37 % (FA2) and 42 % (FlashInfer) slower"),
        Published("instructions of paged kernels", "7 to 13 % more"),
    ),
    "block_size": (
        Published("paged decode kernel by block size", "up to 1.9 x between block sizes"),
        Published("blocks of 1, 16 and 128 tokens", "about 0, 8 and 64 tokens wasted; 8192, 512, 64 entries", CLASSIC),
    ),
    "overlap": (
        Published("decode latency without overlap", "spikes of 5 to 16 ms when blocks are crossed; with it, none"),
    ),
    "fragmentation": (
        Published(
            "block size and worst-case waste, Llama-3-8B",
            "2 MiB pages: 1024 tokens, 128 MB per request; 64 KiB: 32 tokens, 4 MB; slicing at 2 MiB: 32 tokens, 4 MB",
        ),
    ),
    "padded": (
        Published("block tables prepared by vLLM", "30 % of a decode iteration in an early version, up to 10 % later"),
    ),
    "offline": (
        Published("offline throughput, 427 long requests", "1.13 to 1.18 x over paged FA2; 1.14 to 1.23 x FlashInfer"),
    ),
    "online": (Published("online latency, 512 requests", "median latency 28 to 42 % lower than paged"),),
    "memory": (
        Published("StaticCache against DynamicCache", "69 to 79 % of 2048 reserved tokens are wasted", CLASSIC),
    ),
    "batching": (
        Published("static batching", "95 and 87 % of the steps of short answers wasted; 35.9 x for one", CLASSIC),
    ),
    "deferred": (
        Published(
            "prefill of 16K tokens over the ideal",
            "64 KiB pages mapped in the step: 1.15 x, 2 MiB: 1.03 x; with deferred reclamation: 1.00 x",
        ),
    ),
    "demand": (
        Published(
            "new KV memory by batch size up to 320", "at most 600 to 750 MB/s; throughput flattens, Yi-34B at 128"
        ),
    ),
    "alloc": (
        Published("allocation bandwidth per GPU", "7.6 GB/s in pages of 64 KiB, 35 GB/s in pages of 2 MiB"),
        Published(
            "driver calls for a page of 2 MiB",
            "reserve 2 us, create 29, map 2, set access 38, unmap 34, release 23, free 1",
        ),
    ),
    "reserve": (Published("latency of a reservation, 2 MiB pages", "2 us"),),
    "table": (Published("block table of 85 tokens, blocks of 16", "block 0 to 5 for a single sequence", CLASSIC),),
    "blocks": (Published("blocks of 128 that are reserved", "2 for a short answer, 81 for a long one", CLASSIC),),
    "backends": (Published("16 sequences in a batch", "16 times the tokens in the same time per token", CLASSIC),),
}
