"""OpenAI's and Anthropic's APIs over any `Sampler`. Start at `app.build_app` and `process.serve`."""

from __future__ import annotations

from etude.inference.server.app import build_app
from etude.inference.server.chat import ServedModel
from etude.inference.server.limits import KeyLimits, Keys, read_keys
from etude.inference.server.process import DEFAULT_PORT, check_address, serve
from etude.inference.server.state import EngineView, ServerLimits, ServerState

__all__ = [
    "DEFAULT_PORT",
    "EngineView",
    "KeyLimits",
    "Keys",
    "ServedModel",
    "ServerLimits",
    "ServerState",
    "build_app",
    "check_address",
    "read_keys",
    "serve",
]
