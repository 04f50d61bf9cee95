"""Sells tickets, and nobody two for one seat."""
