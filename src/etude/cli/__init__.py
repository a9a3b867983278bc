"""The command line: `etude train`, `eval`, `agent`, `trajectory`, `tasks`, `config`, `sandbox`, ...

Heavy libraries are imported inside the command functions, so that `--help` answers at once.
"""

from etude.cli.app import app, main

__all__ = ["app", "main"]
