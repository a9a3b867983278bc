"""A server that speaks as vLLM does."""

from tests.fakes.vllm.server import FakeServer

__all__ = ["FakeServer"]
