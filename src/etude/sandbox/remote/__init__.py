"""Sandboxes of another process or host, over HTTP: the client of `etude.sandbox.server`."""

from etude.sandbox.remote.backend import RemoteBackend
from etude.sandbox.remote.sandbox import RemoteSandbox

__all__ = ["RemoteBackend", "RemoteSandbox"]
