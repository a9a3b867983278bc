"""A fake of vLLM's server."""

from tests.fakes.vllm.server import FakeServer

__all__ = ["FakeServer"]
