"""Starts vLLM's OpenAI server so that none of its processes outlives its parent.

Run by vLLM's own interpreter, with the server's arguments. Standard input is a pipe from the parent: when it
closes, because the parent closed it or died, every process of this session is killed.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading


def _end_with_the_starter() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Runs the server in this process."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
