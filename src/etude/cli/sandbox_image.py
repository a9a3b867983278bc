"""`etude sandbox image`: guest images, images from Dockerfiles, OCI archives in and out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.exits import error_console
from etude.cli.output import print_json
from etude.cli.sandbox_options import AllowOption, JsonOption, StateOption, run
from etude.errors import UserError

if TYPE_CHECKING:
    from etude.sandbox.images.image_store import ImageStore

image_app = typer.Typer(name="image", help="Manage root file systems.", no_args_is_help=True)


@image_app.command("build")
def build_command(
    context: Annotated[
        Path | None,
        typer.Argument(help="Directory with a Dockerfile. Default: build the guest image."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the image. Default: that of DIRECTORY.")] = None,
    allow: AllowOption = None,
    allow_private: Annotated[
        list[str] | None,
        typer.Option("--allow-private", metavar="IP:PORT", help="Allow private addresses, too."),
    ] = None,
    state: StateOption = None,
) -> None:
    """Build an image from a Dockerfile, with each RUN in a sandbox.

    Without a directory it builds the guest image of the vm backend from Debian packages.
    """
    from etude.sandbox.machine_backend import default_state_directory

    root = state or default_state_directory()
    if context is None:
        typer.echo(run(_build_guest(root)))
        return
    if not context.is_dir():
        raise UserError("is not a directory", field="CONTEXT", received=str(context), fix="name a directory")
    typer.echo(run(_build_image(context, name or context.resolve().name, allow, allow_private, root)))


@image_app.command("list")
def list_command(as_json: JsonOption = False, state: StateOption = None) -> None:
    """List the images that sandboxes can start from."""
    store = _store(state)
    names = store.list()
    if as_json:
        print_json([{"name": name, "digest": store.load(name).digest} for name in names])
        return
    for name in names:
        typer.echo(name)


@image_app.command("import")
def import_command(
    path: Annotated[Path, typer.Argument(help="OCI layout, OCI archive or archive made by `docker save`.")],
    name: Annotated[str, typer.Argument(help="Name of the image, for FROM and --image.")],
    state: StateOption = None,
) -> None:
    """Import an image that another tool wrote."""
    from etude.sandbox.images.oci import import_image

    typer.echo(import_image(path, _store(state), name).digest)


@image_app.command("export")
def export_command(
    name: Annotated[str, typer.Argument(help="Name of the image.")],
    path: Annotated[Path, typer.Argument(help="OCI archive to write.")],
    state: StateOption = None,
) -> None:
    """Write an image as an OCI archive for other tools."""
    from etude.sandbox.images.oci_export import export_image

    store = _store(state)
    typer.echo(export_image(store.load(name), store, path))


@image_app.command("remove")
def remove_command(
    name: Annotated[str, typer.Argument(help="Name of the image.")], state: StateOption = None
) -> None:
    """Remove an image. Layers that other images use are kept."""
    _store(state).remove(name)


def _store(state: Path | None) -> ImageStore:
    from etude.sandbox.backends import IMAGES
    from etude.sandbox.images.image_store import ImageStore
    from etude.sandbox.machine_backend import default_state_directory

    return ImageStore((state or default_state_directory()) / IMAGES)


async def _build_guest(state: Path) -> str:
    from etude.sandbox.vm.image import build_image

    image = await build_image(state)
    return image.digest


async def _build_image(
    context: Path, name: str, allow: list[str] | None, allow_private: list[str] | None, state: Path
) -> str:
    from etude.sandbox.backends import IMAGES
    from etude.sandbox.images.bases import DebianBases
    from etude.sandbox.images.builder import Builder
    from etude.sandbox.images.image_store import ImageStore
    from etude.sandbox.local.backend import LocalBackend
    from etude.sandbox.local.runner import SandboxRunner
    from etude.sandbox.types import Network

    store = ImageStore(state / IMAGES)
    backend = LocalBackend(state, state / IMAGES)
    backend.allow_private = tuple(allow_private or ())
    say = error_console()
    try:
        runner = SandboxRunner(backend, network=Network(tuple(allow or ())))
        builder = Builder(
            store, runner, DebianBases(store), on_step=lambda step: say.print(step, markup=False)
        )
        build = await builder.build(context, name)
    finally:
        await backend.close()
    for note in build.notes:
        say.print(f"note: {note}", markup=False)
    return build.image.digest
