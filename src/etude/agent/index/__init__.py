"""Indexes over the code that an agent works on."""
