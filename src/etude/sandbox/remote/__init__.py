"""Sandboxes of another process or host, over HTTP: the client of `etude.sandbox.server`."""

from __future__ import annotations

from etude.errors import ConfigError

try:
    import httpx as _httpx
except ImportError as error:
    raise ConfigError(
        "remote sandboxes need httpx",
        field="sandbox.backend",
        received=str(error),
        fix="pip install 'etude[serve]'",
    ) from error

from etude.sandbox.remote.backend import RemoteBackend
from etude.sandbox.remote.sandbox import RemoteSandbox

__all__ = ["RemoteBackend", "RemoteSandbox"]

del _httpx
