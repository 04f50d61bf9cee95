"""Chooses the backend and its options, and names the locks of decorated functions."""
