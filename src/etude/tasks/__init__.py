"""Tasks as files: Harbor directories, read and written, and tasks made from projects (`making`)."""

from etude.tasks.harbor import read_harbor, write_harbor

__all__ = ["read_harbor", "write_harbor"]
