"""The backends, one module per algorithm. Nothing here is imported before its URL scheme is asked for."""
