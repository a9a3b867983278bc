"""A server that speaks as vLLM does, shipped for tests."""

from etude.inference.vllm.fake.server import FakeServer

__all__ = ["FakeServer"]
