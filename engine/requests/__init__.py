"""Requests: what was asked for, how far it is, and what comes out."""
