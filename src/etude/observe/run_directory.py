"""The directory of one run: its configuration, log and results, in files that people can read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config import RunConfig, drop_key, dump_config, load_config, parse_config, read_toml
from etude.errors import EtudeError, ResourceError, RunDirectoryError
from etude.kit.durable import DRAFTS, make_directory, warn_if_full, whole_directory, write_json, write_text
from etude.kit.leftovers import sweep
from etude.kit.locks import locked
from etude.observe.machine import available_memory_bytes, commit, describe_machine, versions
from etude.observe.metrics import JsonlSink

MIN_FREE_DISK_BYTES = 1 << 30
MIN_FREE_MEMORY_BYTES = 2 << 30


class RunDirectory:
    """Paths and files of a run directory; a new one appears complete or not at all.

    Any number of processes may read a run; only the one that holds `lock()` writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        """The resolved configuration."""
        self.environment_file = path / "environment.json"
        """Machine, versions, commit, threads, seed."""
        self.metrics_file = path / "metrics.jsonl"
        """One row per step and kind."""
        self.trajectories = path / "trajectories"
        """The trajectory log."""
        self.checkpoints = path / "checkpoints"
        self.plots = path / "plots"
        """The report's figures as PNG files."""
        self.report_file = path / "report.json"
        """The run's results."""
        self.examples_file = path / "examples.json"
        """Sessions before and after training, for people."""
        self.html_file = path / "report.html"
        """The results as one self-contained page."""
        self.lock_file = path / "lock"
        """Held by the process that writes the run."""

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Creates `<runs_directory>/<name>` with its configuration and environment.

        Raises RunDirectoryError if it exists or cannot be created, ResourceError if disk or memory would not
        suffice.
        """
        parent, path = Path(config.runs_directory), Path(config.runs_directory) / config.name
        if path.exists():
            raise _exists(path)
        try:
            make_directory(parent)
            check_resources(parent)
            sweep(parent, DRAFTS)
            with whole_directory(path) as draft:
                cls(draft)._fill(config)
        except OSError as error:
            raise (_exists(path) if path.exists() else _cannot_make(path, error)) from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Opens an existing run. Raises RunDirectoryError if `path` is none."""
        run = cls(path)
        if not path.is_dir():
            raise RunDirectoryError(
                "no such directory", field="run", received=str(path), fix="name a directory under runs/"
            )
        if not run.config_file.is_file():
            raise RunDirectoryError(
                "is not a run directory: it has no config.toml",
                field="run",
                received=str(path),
                fix="name the directory of a run that `etude train` started",
            )
        return run

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.resolve().name

    @property
    def config(self) -> RunConfig:
        """The stored configuration. Raises ConfigError where it is damaged."""
        return load_config(self.config_file)

    def drop_keys(self, keys: Sequence[str]) -> None:
        """Removes keys that this version does not know from the stored configuration, with a row of metrics
        for each; the previous file is kept as `config-before.toml`.

        Raises ConfigError for a known key and if other unknown keys remain, RunDirectoryError if another
        process writes the run.
        """
        tree = read_toml(self.config_file)
        dropped = {key: value for key in keys if (value := drop_key(tree, key)) is not None}
        if not dropped:
            return
        config = parse_config(tree)
        with self.lock():
            shutil.copyfile(self.config_file, self.path / "config-before.toml")
            self.replace_config(config)
            with JsonlSink(self.metrics_file) as metrics:
                for key, value in dropped.items():
                    metrics.write("dropped_key", 0, {"name": key, "value": repr(value)})

    def replace_config(self, config: RunConfig) -> None:
        """Replaces the stored configuration. The caller holds `lock()`."""
        write_text(self.config_file, dump_config(config))

    @contextlib.contextmanager
    def removed_if_refused(self) -> Iterator[None]:
        """Context in which a new run is started: removes the directory if that fails before any output."""
        try:
            yield
        except EtudeError:
            if self._is_untouched:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    @property
    def _is_untouched(self) -> bool:
        """Whether it contains only the files of a new run."""
        made = {self.config_file, self.environment_file, self.lock_file, self.metrics_file}
        files = {path for path in self.path.rglob("*") if not path.is_dir()}
        return files <= made and not (self.metrics_file.exists() and self.metrics_file.stat().st_size)

    @property
    def environment(self) -> dict[str, Any]:
        """The stored environment; empty where it is missing."""
        return self.read_json(self.environment_file) or {}

    @property
    def origin(self) -> dict[str, Any]:
        """The part of the environment that reports include: machine, versions, commit."""
        environment = self.environment
        return {
            "machine": environment.get("machine", {}),
            "versions": environment.get("versions", {}),
            "commit": environment.get("commit", ""),
        }

    def update_environment(self, values: Mapping[str, Any]) -> None:
        """Adds values to the stored environment, known only later, such as the probed thread count."""
        write_json(self.environment_file, {**self.environment, **values})

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Replaces the report. A full disk causes a warning only: the next report is complete."""
        with warn_if_full("the report is"):
            write_json(self.report_file, dict(report))

    def read_json(self, path: Path) -> Any:
        """Content of one of the run's JSON files; None if it does not exist (yet).

        Raises RunDirectoryError if it is damaged.
        """
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunDirectoryError(
                f"is not valid JSON: {error}",
                field=path.name,
                received=str(path),
                fix="remove the file and run `etude report` or `etude train --resume` again",
            ) from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run for writing. The lock is released when the process ends, however that happens.

        Raises RunDirectoryError if another process holds it.
        """
        self.lock_file.touch(0o644)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.lock_file, wait=False))
            except BlockingIOError:
                raise RunDirectoryError(
                    "another process is writing this run",
                    field="run",
                    received=str(self.path),
                    fix="wait until it ends, or train under another name with --name NAME",
                ) from None
            yield

    def _fill(self, config: RunConfig) -> None:
        for directory in (self.trajectories, self.checkpoints, self.plots):
            directory.mkdir()
        write_text(self.config_file, dump_config(config))
        environment = {
            "machine": describe_machine(),
            "versions": versions(),
            "commit": commit(),
            "threads": config.num_threads,
            "seed": config.seed,
        }
        write_json(self.environment_file, environment)


def check_resources(directory: Path) -> None:
    """Raises ResourceError if a run would soon run out of disk or memory."""
    free_disk = shutil.disk_usage(directory).free
    if free_disk < MIN_FREE_DISK_BYTES:
        raise ResourceError(
            f"a run needs {MIN_FREE_DISK_BYTES >> 20} MiB of free disk",
            field="runs_directory",
            received=f"{free_disk >> 20} MiB free",
            fix="free some space, or --set runs_directory=...",
        )
    free_memory = available_memory_bytes()
    if free_memory < MIN_FREE_MEMORY_BYTES:
        raise ResourceError(
            f"a run needs {MIN_FREE_MEMORY_BYTES >> 20} MiB of free memory",
            field="memory",
            received=f"{free_memory >> 20} MiB free",
            fix="stop other programs, or use a machine with more memory",
        )


def _cannot_make(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot be created: {error.strerror}",
        field="runs_directory",
        received=str(path),
        fix="choose a directory that you can write to with --set runs_directory=...",
    )


def _exists(path: Path) -> RunDirectoryError:
    run = RunDirectory(path)
    if os.access(run.lock_file, os.W_OK):
        try:
            with run.lock():
                pass
        except RunDirectoryError as error:
            return error  # it is in progress
    return RunDirectoryError(
        "already exists",
        field="name",
        received=str(path),
        fix="continue it with --resume, start another with --name NAME, or remove the directory",
    )
