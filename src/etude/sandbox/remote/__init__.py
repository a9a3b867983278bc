"""Sandboxes of another process or host, over HTTP: the client of `etude.sandbox.server`."""

from etude.sandbox.remote.backend import RemoteBackend, RemoteSandbox

__all__ = ["RemoteBackend", "RemoteSandbox"]
