"""Options that several `etude sandbox` commands share, and their conversion to sandbox types."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.errors import UserError

if TYPE_CHECKING:
    from etude.sandbox.template import Template
    from etude.sandbox.types import CommandResult, Network, Resources

CommandArgument = Annotated[list[str], typer.Argument(help="Command, after -- if it has options.")]
CommandTimeOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Time limit of the command in seconds.")
]
BackendOption = Annotated[
    str, typer.Option("--backend", help="Sandbox backend: local, gvisor, vm, docker or podman.")
]
DirectoryOption = Annotated[
    Path | None, typer.Option("--dir", help="Directory whose files are copied into the workspace.")
]
ImageOption = Annotated[
    str | None, typer.Option("--image", help="Root file system, as `etude sandbox image list` shows it.")
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="HOST[:PORT]", help="Host that the sandbox may reach. Repeatable."),
]
AllowPrivateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-private", metavar="IP:PORT", help="Private address that allowed hosts may have. Repeatable."
    ),
]
MemoryOption = Annotated[int, typer.Option("--memory-mb", min=16, help="Memory limit in MB.")]
DiskOption = Annotated[int, typer.Option("--disk-mb", min=1, help="Disk limit in MB.")]
StateOption = Annotated[
    Path | None,
    typer.Option("--state", help="Directory of snapshots and images. Default: ~/.local/state/etude."),
]


def make_template(directory: Path | None, image: str | None, state: Path | None) -> Template:
    """The template of the sandbox. Raises UserError for a directory or image that does not exist."""
    from etude.sandbox.backends import IMAGES
    from etude.sandbox.images.image_store import ImageStore
    from etude.sandbox.machine_backend import default_state_directory
    from etude.sandbox.template import Template

    root = None
    if image is not None:
        root = ImageStore((state or default_state_directory()) / IMAGES).load(image)
    if directory is None:
        return Template({}, image or "empty", root)
    return Template.from_directory(directory, root)


def make_resources(memory_mb: int, disk_mb: int) -> Resources:
    """The resource limits of the sandbox."""
    from etude.sandbox.types import Resources

    return Resources(
        memory_bytes=memory_mb << 20,
        disk_bytes=disk_mb << 20,
        file_bytes=disk_mb << 20,
        num_processes=256,
        open_files=1024,
        cpu_s=24 * 3600,
    )


def make_network(allow: list[str] | None) -> Network:
    """The hosts that the sandbox may reach."""
    from etude.sandbox.types import Network

    return Network(tuple(allow or ()))


def shell_command(words: list[str]) -> str:
    """Joins the words of a command line to one shell command. Raises UserError if there are none."""
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise UserError("is missing", field="COMMAND", fix="add a command, for example: -- ls -l")
    return words[0] if len(words) == 1 else shlex.join(words)


def forward_output(stream: int, data: bytes) -> None:
    """Writes a command's output to our own, as it arrives."""
    target = sys.stdout if stream == 1 else sys.stderr
    target.buffer.write(data)
    target.buffer.flush()


def exit_code(result: CommandResult) -> int:
    """Our exit code after a command: its own, 128 + the signal, or 124 at the timeout."""
    if result.timed_out:
        return 124
    return result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
