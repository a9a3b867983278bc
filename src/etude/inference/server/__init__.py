"""OpenAI's and Anthropic's APIs over any `Sampler`. Start at `app.build_app` and `app.serve`."""

from __future__ import annotations

from etude.inference.server.app import build_app as build_app
from etude.inference.server.app import check_address as check_address
from etude.inference.server.app import serve as serve
from etude.inference.server.chat import ServedModel as ServedModel
from etude.inference.server.limits import KeyLimits as KeyLimits
from etude.inference.server.limits import Keys as Keys
from etude.inference.server.limits import read_keys as read_keys
from etude.inference.server.state import ServerLimits as ServerLimits
from etude.inference.server.state import ServerState as ServerState
