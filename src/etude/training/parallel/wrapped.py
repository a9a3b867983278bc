"""Operations around others."""

from __future__ import annotations

from typing import Any

from etude.model.ops import Ops


class WrappedOps:
    """Ops of which a subclass replaces some for several ranks; all else is `inner`'s."""

    def __init__(self, inner: Ops) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet while one is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


def plain_ops(ops: Ops) -> Ops:
    """What computes in one process, without what several ranks have put around it."""
    while isinstance(ops, WrappedOps):
        ops = ops.inner
    return ops
