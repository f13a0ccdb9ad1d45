"""The demo: a small language model that the project trains itself, and what is shown with it."""
