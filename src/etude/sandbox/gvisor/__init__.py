"""Sandboxes under gVisor: each on a kernel of its own that runs as a plain process."""
