"""A shop that sells seats."""
