"""`etude sandbox image`: guest images, images from Dockerfiles, import and export of OCI archives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.exits import error_console
from etude.cli.output import JsonOption, print_json
from etude.cli.sandbox_options import AllowOption, AllowPrivateOption, StateOption
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
    file: Annotated[str, typer.Option(help="The Dockerfile's path in DIRECTORY.")] = "Dockerfile",
    build_arg: Annotated[
        list[str] | None,
        typer.Option("--build-arg", metavar="NAME=VALUE", help="Value of an ARG. Repeatable."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Stage to build. Default: the last.")] = None,
    base: Annotated[
        list[str] | None,
        typer.Option("--base", metavar="NAME=PLACE", help="Where a base image is, such as oci:DIRECTORY."),
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume", metavar="HOST:INSIDE", help="Show a file to RUN, and keep it out of the image."
        ),
    ] = None,
    allow: AllowOption = None,
    allow_private: AllowPrivateOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for the build.")] = 1800,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run every instruction again.")] = False,
    state: StateOption = None,
) -> None:
    """Build an image from a Dockerfile, by buildah, without rights to this machine.

    Without a directory it builds the guest image of the vm backend from Debian packages.
    """
    from etude.sandbox.images.building import build_image
    from etude.sandbox.images.built import BuildOptions
    from etude.sandbox.machine_backend import default_state_directory
    from etude.sandbox.types import Network

    if context is None:
        from etude.sandbox.vm.image import build_image as build_guest_image

        typer.echo(asyncio.run(build_guest_image(state or default_state_directory())).digest)
        return
    if not context.is_dir():
        raise UserError("is not a directory", field="CONTEXT", received=str(context), fix="name a directory")
    hosts = (word.rpartition(":") for word in volume or ())
    options = BuildOptions(
        bases=_pairs("--base", base),
        network=Network(tuple(allow or ())),
        allow_private=tuple(allow_private or ()),
        volumes={inside: Path(host) for host, _, inside in hosts},
        deadline_s=timeout_s,
        fresh=fresh,
    )
    say = error_console()
    image = asyncio.run(
        build_image(
            context,
            name or context.resolve().name,
            _store(state),
            dockerfile=file,
            args=_pairs("--build-arg", build_arg),
            target=target,
            options=options,
            on_line=lambda line: say.print(line, markup=False),
        )
    )
    typer.echo(image.digest)


@image_app.command("prune")
def prune_command(state: StateOption = None) -> None:
    """Remove the build cache. The images stay."""
    from etude.sandbox.images.buildah import remove_storage
    from etude.sandbox.images.building import BUILDAH

    asyncio.run(remove_storage(_store(state).layers.root / BUILDAH))


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
    tag: Annotated[
        str | None, typer.Option("--tag", help="Which of several images in PATH, by its name there.")
    ] = None,
    state: StateOption = None,
) -> None:
    """Import an image that another tool wrote."""
    from etude.sandbox.images.oci import import_image

    typer.echo(import_image(path, _store(state), name, tag).digest)


@image_app.command("export")
def export_command(
    name: Annotated[str, typer.Argument(help="Name of the image.")],
    path: Annotated[Path, typer.Argument(help="OCI archive to write.")],
    state: StateOption = None,
) -> None:
    """Write an image as an OCI archive for other tools."""
    from etude.sandbox.images.oci import export_image

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


def _pairs(option: str, words: list[str] | None) -> dict[str, str]:
    """Parses NAME=VALUE words. Raises UserError."""
    pairs = [word.partition("=") for word in words or ()]
    for key, equals, value in pairs:
        if not key or not equals:
            raise UserError(
                "must be NAME=VALUE", field=option, received=key + value, fix=f"write {option} NAME=VALUE"
            )
    return {key: value for key, _, value in pairs}
