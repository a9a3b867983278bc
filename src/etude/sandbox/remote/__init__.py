"""The client of the sandbox server (`etude.sandbox.server`): sandboxes of another process or host by HTTP."""

from etude.sandbox.remote.backend import RemoteBackend, RemoteSandbox

__all__ = ["RemoteBackend", "RemoteSandbox"]
