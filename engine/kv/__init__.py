"""Where keys and values live: one protocol, one backend per file."""
