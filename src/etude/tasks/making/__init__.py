"""Generates tasks from a project's own code."""
