"""Who computes how much in the next step."""
