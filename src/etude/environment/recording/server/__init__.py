"""The recording endpoint over HTTP. Start at `app.build_app` and `app.serve`."""

from etude.environment.recording.server.app import build_app as build_app
from etude.environment.recording.server.app import serve as serve
