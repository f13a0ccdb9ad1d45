"""The policy of `KVCache`: slots, what is mapped under them, blocks that requests share, and who gets which pages."""
