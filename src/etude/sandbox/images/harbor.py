"""A template from a Harbor task's `environment/`: its Dockerfile, or the image that `task.toml` names.

    task.toml                  [environment] docker_image = "..." (optional)
    environment/Dockerfile     built with `environment/` as its context

Of `task.toml` no more is read here; tasks as such are the business of `etude.tasks`.
"""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import find_base
from etude.sandbox.images.bases import HOST
from etude.sandbox.images.building import BuildOptions, build_image
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Template


async def template_from_environment(
    directory: Path, store: ImageStore, options: BuildOptions | None = None
) -> Template:
    """The template whose image is the task's environment; its files are part of the image.

    `directory` is the task's or its `environment/`. A Dockerfile comes first, else `docker_image`: an image
    of the store, a base that is made on demand, or `host`. Raises TemplateError if neither is there, and as
    `build_image` does.
    """
    environment = directory if directory.name == "environment" else directory / "environment"
    task = environment.parent
    name = f"harbor/{task.resolve().name}"
    if (environment / "Dockerfile").is_file():
        return Template({}, name, await build_image(environment, name, store, options=options))
    wanted = await asyncio.to_thread(_docker_image, task / "task.toml")
    if wanted is None:
        raise TemplateError(
            "the task has neither environment/Dockerfile nor docker_image", field="template",
            received=str(directory), fix="add environment/Dockerfile",
        )  # fmt: skip
    if wanted == HOST:
        return Template({}, name)
    return Template({}, name, await find_base(wanted, store, options.bases if options else None))


def _docker_image(path: Path) -> str | None:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TemplateError(f"cannot be read: {error}", field="task.toml", received=str(path)) from error
    environment = table.get("environment", {})
    value = environment.get("docker_image") if isinstance(environment, dict) else None
    if value is not None and not (isinstance(value, str) and value):
        raise TemplateError("must be the name of an image", field="task.toml: environment.docker_image",
                            received=value, fix='for example "debian:bookworm"')  # fmt: skip
    return value
