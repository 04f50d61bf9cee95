"""Which backend to use, with which options, and how locks of decorated functions are named."""
