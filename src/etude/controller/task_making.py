"""Makes tasks from a project, in the sandboxes that a run's configuration names."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

from etude.config import RunConfig
from etude.controller.backends import open_run_backend
from etude.controller.task_sets import TaskChecks
from etude.environment.making.history import find_past
from etude.environment.making.importing import ImportReport, import_rows
from etude.environment.making.pipeline import MakeSettings, TaskMaker
from etude.environment.making.projects import read_project
from etude.environment.making.reports import MakeReport
from etude.errors import ConfigError
from etude.observe import Observer
from etude.sandbox.backends import ENGINES, IMAGES
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.migration import default_state_directory


def import_task_set(
    rows: Path, repositories: Path, out: Path, config: RunConfig, image: str | None
) -> ImportReport:
    """Makes tasks of rows of solved issues. Raises as `import_rows`."""
    store = ImageStore(default_state_directory() / IMAGES)
    return asyncio.run(import_rows(rows, repositories, out, store, config.images.bases, image))


def make_task_set(
    repo: Path,
    out: Path,
    settings: MakeSettings,
    config: RunConfig,
    observer: Observer,
    releases: Sequence[Path] = (),
) -> MakeReport:
    """Makes the tasks of one project. Raises as `TaskMaker`, `read_project` and `find_past`; ConfigError for
    sandboxes that cannot run the images in which they are made."""
    if config.sandbox.backend.partition(":")[0] in ENGINES:
        raise ConfigError(
            "making tasks needs layered images, which container backends do not run",
            field="sandbox.backend",
            received=config.sandbox.backend,
            fix="use local; the finished tasks can also be played on podman",
        )
    project = read_project(repo)
    past = find_past(repo, releases, project)

    async def make() -> MakeReport:
        store = ImageStore(default_state_directory() / IMAGES)
        backend = open_run_backend(config.sandbox)
        check = functools.partial(TaskChecks(config).check_directory, backend=backend)
        try:
            given = project, out, settings, backend, store, config.images
            return await TaskMaker(*given, check, observer, past).make()
        finally:
            await backend.close()

    return asyncio.run(make())
