"""What is mapped where: slots, pages, blocks that requests share, and the pool that they come from."""
