"""The pool: physical pages of one device, the calls that move them, and what caches and block windows have in common.

It knows no slots, tokens or blocks.
"""
