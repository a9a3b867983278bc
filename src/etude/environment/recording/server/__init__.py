"""The recording endpoint over HTTP. Start at `app.build_app` and `process.serve`."""

from __future__ import annotations

from etude.environment.recording.server.app import build_app
from etude.environment.recording.server.process import serve

__all__ = ["build_app", "serve"]
