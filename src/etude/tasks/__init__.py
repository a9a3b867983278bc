"""Reading and writing tasks as Harbor directories, and generating tasks from projects (`making`)."""

from etude.tasks.harbor import read_harbor, write_harbor

__all__ = ["read_harbor", "write_harbor"]
