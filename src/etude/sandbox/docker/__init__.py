"""Sandboxes in containers of a Docker engine, or of podman through its compatible API."""
