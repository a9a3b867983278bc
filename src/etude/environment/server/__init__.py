"""HTTP server of environment sessions. Start at `process.build_app` and `process.serve`."""

from __future__ import annotations

from etude.environment.server.host import HostLimits, SessionHost
from etude.environment.server.process import build_app, serve
from etude.serving.token_files import read_tenants

__all__ = ["HostLimits", "SessionHost", "build_app", "read_tenants", "serve"]
