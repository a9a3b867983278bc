"""The router as a server: an OpenAI-compatible proxy over replicas, with health checks and drain."""

from etude.inference.router.server.app import build_app
from etude.inference.router.server.process import serve
from etude.inference.router.server.proxy import Proxy, ReplicaAddress

__all__ = ["Proxy", "ReplicaAddress", "build_app", "serve"]
