"""Sandboxes for other processes and hosts, by HTTP. Start at `app.build_app` and `app.serve`."""

from __future__ import annotations

from etude.sandbox.server.app import build_app, serve
from etude.sandbox.server.state import Limits
from etude.serving.token_files import read_token

__all__ = ["Limits", "build_app", "read_token", "serve"]
