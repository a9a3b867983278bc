"""Sandboxes in containers of docker or podman, by their command line."""
