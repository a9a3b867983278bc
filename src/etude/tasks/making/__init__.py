"""Tasks made from a project's own code."""
