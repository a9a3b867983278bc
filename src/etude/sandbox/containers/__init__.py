"""Sandboxes in containers of docker or podman."""
