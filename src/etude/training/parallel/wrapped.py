"""Ops that delegate to other Ops."""

from __future__ import annotations

from typing import Any

from etude.model.ops import Ops


class WrappedOps:
    """Delegates all operations to `inner`; subclasses override some for several ranks."""

    def __init__(self, inner: Ops) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet while being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


def plain_ops(ops: Ops) -> Ops:
    """The innermost Ops, for one process, without the wrappers for several ranks."""
    while isinstance(ops, WrappedOps):
        ops = ops.inner
    return ops
