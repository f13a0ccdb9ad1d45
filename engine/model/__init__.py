"""A step through the model: packed rows, graphs, sampling."""
