"""`VirtualCache`: a cache for transformers' `generate()`."""

from vattn.hf.virtual_cache import VirtualCache

__all__ = ["VirtualCache"]
