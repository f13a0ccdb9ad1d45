"""The memory of a cache: slots, pages, blocks that requests share, and the pool that pages come from."""
