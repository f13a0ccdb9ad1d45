"""transformers: `VirtualCache`, the cache of `generate()`."""

from vattn.hf.virtual_cache import VirtualCache

__all__ = ["VirtualCache"]
