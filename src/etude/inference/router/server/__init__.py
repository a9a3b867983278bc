"""The router as a server: an OpenAI-compatible proxy over replicas, with health checks and drain."""

from etude.inference.router.server.app import build_app as build_app
from etude.inference.router.server.app import serve as serve
from etude.inference.router.server.proxy import Proxy as Proxy
from etude.inference.router.server.proxy import ReplicaAddress as ReplicaAddress
