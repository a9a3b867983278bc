"""Environment sessions for other processes and hosts. Start at `app.build_app` and `process.serve`."""

from __future__ import annotations

from etude.errors import ConfigError

try:
    import fastapi as _fastapi
    import uvicorn as _uvicorn
except ImportError as error:
    raise ConfigError(
        "the environment server needs FastAPI and uvicorn",
        field="environment.server",
        received=str(error),
        fix="pip install 'etude[serve]'",
    ) from error

from etude.environment.server.app import build_app
from etude.environment.server.host import HostLimits, SessionHost, TenantLimits
from etude.environment.server.process import read_tenants, serve

__all__ = ["HostLimits", "SessionHost", "TenantLimits", "build_app", "read_tenants", "serve"]

del _fastapi, _uvicorn
