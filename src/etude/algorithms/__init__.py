"""Advantages, losses, corrections and divergences as pure functions, one idea per file."""
