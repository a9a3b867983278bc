"""A run's messages for errors raised by Ray."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.core.generated.common_pb2 import ActorDiedErrorContext  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import ActorDiedError, RayTaskError

from etude.config import ClusterConfig
from etude.controller.ray import RayExecutor, describe_ray_error
from etude.errors import SamplerError


def raised(cause: Exception) -> RayTaskError:
    """An error of a method in an actor's process, as Ray hands it on."""
    trace = "ray::etude-engine.call()\n  File engine.py, line 1\nValueError: x"
    return RayTaskError("call", trace, cause, proctitle="ray::etude-engine", pid=7, ip="127.0.0.1")


def test_an_error_of_a_method_is_told_by_its_cause() -> None:
    cause = SamplerError("the engine has failed", received="a page fault")
    for error in (raised(cause), raised(raised(cause)), raised(cause).as_instanceof_cause()):
        assert describe_ray_error(error) == "SamplerError: the engine has failed; received 'a page fault'"


def test_of_a_process_that_died_it_is_told_what_ray_knows() -> None:
    words = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    context = ActorDiedErrorContext(
        class_name="etude-engine", actor_id=bytes(16), pid=7, error_message=f"{words}\n\tat 127.0.0.1"
    )
    told = describe_ray_error(ActorDiedError(context))
    assert told == f"ActorDiedError: The actor died unexpectedly before finishing this task. {words}"


def test_long_words_are_cut() -> None:
    assert len(describe_ray_error(raised(ValueError("x" * 10_000)))) < 600


def test_a_ray_that_does_not_start_leaves_no_directory_nor_does_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray-etude-killed" / "session").mkdir(parents=True)

    def fail(**named: Any) -> None:
        raise RuntimeError("no port is free")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(RuntimeError, match="no port"), RayExecutor(ClusterConfig()):
        raise AssertionError("it began")
    assert not list(tmp_path.iterdir())


def test_rays_own_directory_leaves_room_for_the_names_of_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of a socket has at most 107 bytes, of which Ray needs many for a time and a process id."""
    directories: list[str] = []

    def fail(**named: Any) -> None:
        directories.append(named["_temp_dir"])
        raise RuntimeError("no port is free")

    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(RuntimeError, match="no port"), RayExecutor(ClusterConfig()):
        raise AssertionError("it began")
    (directory,) = directories
    assert len(f"{directory}/session_2026-11-24_16-41-10_108086_4194304/sockets/plasma_store") <= 107
