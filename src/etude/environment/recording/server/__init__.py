"""The recording endpoint over HTTP. Start at `app.build_app` and `process.serve`."""

from __future__ import annotations

from etude.errors import ConfigError

try:
    import fastapi as _fastapi
    import uvicorn as _uvicorn
except ImportError as error:
    raise ConfigError(
        "the recording server needs FastAPI and uvicorn",
        field="record.serve",
        received=str(error),
        fix="pip install 'etude[serve]'",
    ) from error

from etude.environment.recording.server.app import build_app
from etude.environment.recording.server.process import DEFAULT_PORT, read_tokens, serve

__all__ = ["DEFAULT_PORT", "build_app", "read_tokens", "serve"]

del _fastapi, _uvicorn
