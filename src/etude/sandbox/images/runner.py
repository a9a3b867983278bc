"""What the builder needs of a sandbox: run one command over an image, and hand back what it changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from etude.sandbox.template import Image


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a RUN ended."""

    exit_code: int
    output: str
    """Its stdout and stderr, or the end of them."""
    layer_tar: Path | None
    """The changes of the root file system as an OCI layer; None: there are none. The builder deletes it."""
    timed_out: bool = False


class LayerRunner(Protocol):
    """Runs RUN instructions, each in a fresh sandbox over the image so far."""

    async def run(
        self,
        image: Image,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        user: str,
        timeout_s: float,
    ) -> RunResult:
        """Runs `argv` with `image` as root file system, writable, and exactly `env` as environment.

        `cwd` is absolute and exists. A command that fails or runs out of time is a result; SandboxError
        is for a sandbox that failed. Leaves nothing behind but `layer_tar`.
        """
        ...
