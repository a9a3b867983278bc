"""Images of tasks: by a map, by the store, by a Dockerfile; and tasks that are played in them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from etude.config import RunConfig
from etude.config.images import ImagesConfig
from etude.controller.task_sets import check_task_set
from etude.environment import task_images
from etude.environment.origins import task_template
from etude.environment.task_images import TaskImages
from etude.errors import TaskError
from etude.records import Task
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.built import BuildOptions
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.oci import export_image
from etude.sandbox.template import Image
from etude.sandbox.types import Network
from etude.tasks.harbor import read_harbor
from tests.sandbox.containers.python_image import ensure_image, podman
from tests.sandbox.images.image_builders import add_files
from tests.tasks.harbor_tasks import KINDS, write_task

BASE = "ubuntu:24.04"
DOCKERFILE = f"FROM {BASE}\nENV COLOUR=green\nWORKDIR /app\nCOPY seed.txt /app/\n"
SEEDED = """#!/bin/sh
found="$(cat seed.txt greeting.txt | tr '\\n' ' ') $COLOUR $MODE $(pwd)"
if [ "$found" = "seed hello  green fast /app" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images and reports of these tests are nobody else's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/etude/images"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An OCI archive of an image with one file."""
    store = ImageStore(tmp_path / "elsewhere")
    image = Image(BASE, (add_files(store.layers, {"etc/name": b"x"}),), {"A": "1"}, "/srv", "root")
    store.save(image)
    export_image(image, store, tmp_path / "base.tar")
    return tmp_path / "base.tar"


def find(task: Task, bases: dict[str, str], backend: str = "local") -> Task:
    return asyncio.run(TaskImages(backend, ImagesConfig(bases=bases)).find(task))


def test_a_name_in_the_map_is_an_image_of_the_store_once_it_was_imported(
    tmp_path: Path, archive: Path
) -> None:
    task = read_harbor(write_task(tmp_path / "task", image=BASE, toml='env = { A = "2", B = "3" }\n'))
    with pytest.raises(TaskError, match="image is not available"):
        task_template(task)
    found = find(task, {BASE: f"oci-archive:{archive}"})
    template = task_template(found, user="1001")
    assert template.image is not None and template.workspace == "/srv"
    assert (len(template.image.layers), template.image.user) == (1, "1001")
    assert template.image.env == {"HOME": "/tmp", "A": "2", "B": "3"}
    assert find(task, {}) == found, "of the store, by its name"


def test_an_image_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    task = read_harbor(write_task(tmp_path / "task", image="nobody/has-it:1"))
    with pytest.raises(TemplateError, match="no such base image"):
        find(task, {})
    with pytest.raises(TaskError, match="cannot run task images"):
        find(task, {}, "vm")
    assert find(read_harbor(write_task(tmp_path / "host")), {}, "vm").machine is not None


def test_a_dockerfile_gets_the_network_and_files_that_the_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[BuildOptions] = []

    async def note(*_: object, options: BuildOptions) -> Image:
        given.append(options)
        return Image("x", ("layer",))

    monkeypatch.setattr(task_images, "build_image", note)
    write_task(tmp_path / "task", files={"environment/Dockerfile": DOCKERFILE})
    (tmp_path / "task/task.toml").write_text("[environment]\nbuild_timeout_sec = 77\n")
    volumes = {"/etc/pip.conf": "/srv/pip.conf"}
    settings = {"bases": {BASE: "oci:/a"}, "allow": ["pypi.org"], "volumes": volumes}
    images = TaskImages("local", ImagesConfig.model_validate(settings))
    asyncio.run(images.find(read_harbor(tmp_path / "task")))
    assert given == [
        BuildOptions(
            {BASE: "oci:/a"},
            Network(("pypi.org",)),
            volumes={"/etc/pip.conf": Path("/srv/pip.conf")},
            deadline_s=77.0,
        )
    ]


def test_an_image_of_an_engine_is_the_one_that_had_the_name_when_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/podman"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/shown\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    task = read_harbor(write_task(tmp_path / "task", image="theirs:1"))
    found: list[Task] = []
    for one in ("1" * 64, "2" * 64):
        (tmp_path / "shown").write_text(json.dumps([{"Id": one, "Config": {"Env": ["A=b"]}}]))
        found.append(find(task, {}, "podman"))
        machine = found[-1].machine
        assert machine is not None and machine.image is not None
        assert (machine.image.name, machine.image.env) == (one, {"A": "b"})
    assert found[0] != found[1]


def test_an_engine_is_given_an_image_of_the_store_once(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/podman"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        'case "$1" in load) echo >> loads;; *) [ -e loads ] || { echo image not known >&2; exit 125; }\n'
        """echo '[{"Id": "1"}]';; esac\n"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    task = read_harbor(write_task(tmp_path / "task", image=BASE))
    bases = {BASE: f"oci-archive:{archive}"}
    assert find(task, bases, "podman") == find(task, bases, "podman")
    assert (tmp_path / "loads").read_text() == "\n"


def seeded_task(directory: Path) -> None:
    """A task whose image is built from a Dockerfile, with a file in its working directory."""
    files: dict[str, str | bytes] = {"environment/Dockerfile": DOCKERFILE, "environment/seed.txt": "seed\n"}
    write_task(directory, SEEDED, files=files)
    (directory / "task.toml").write_text('[environment]\nenv = { MODE = "fast" }\n')


def elsewhere_task(directory: Path) -> None:
    """A task whose solution makes, changes and removes files outside of the working directory."""
    test = "[ -s ~/.ssh/id_a ] && [ ! -e /srv/old ] && [ -x /srv/tool ] && [ ! -e /srv/up ]"
    solve = "mkdir ~/.ssh; echo a > ~/.ssh/id_a; rm -r /srv/old; chmod +x /srv/tool; ln -s /tests /srv/up"
    setup = "RUN mkdir -p /srv/old/deep && touch /srv/old/deep/a /srv/tool\n"
    files: dict[str, str | bytes] = {"environment/Dockerfile": f"FROM {BASE}\n{setup}WORKDIR /app\n"}
    script = f"#!/bin/sh\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    write_task(directory, script, f"#!/bin/sh\n{solve}\n", files=files)
    (directory / "task.toml").write_text("")


def separate_task(directory: Path) -> None:
    """A task whose verifier has an image of its own, with the tests in it."""
    test = "[ $(cat /app/out/a) = right ] && [ ! -e /app/out/before ] && [ ! -e /app/out/b.log ]"
    solve = "mkdir out; echo right > out/a; touch out/b.log"
    setup = "RUN mkdir -p /app/out && touch /app/out/before\nCOPY . /tests\n"
    files: dict[str, str | bytes] = {
        "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\n",
        "tests/Dockerfile": f"FROM {BASE}\n{setup}",
    }
    script = f"#!/bin/sh\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    write_task(directory, script, f"#!/bin/sh\n{solve}\n", files=files)
    (directory / "tests/test.sh").chmod(0o755)
    artifacts = 'artifacts = [{ source = "/app/out", exclude = ["*.log"] }]\n'
    (directory / "task.toml").write_text(artifacts + '[verifier]\nenvironment_mode = "separate"\n')


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize("backend", ["local", "podman"])
def test_tasks_are_played_in_their_images(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, backend: str
) -> None:
    image = ensure_image(tmp_path_factory.mktemp("podman"))
    podman("save", "--quiet", "--format=oci-archive", f"--output={tmp_path / 'base.tar'}", image)
    for name in ("python", "links", "binary", "background"):
        KINDS[name](tmp_path / "tasks" / name, BASE)
    seeded_task(tmp_path / "tasks/seeded")
    elsewhere_task(tmp_path / "tasks/elsewhere")
    separate_task(tmp_path / "tasks/separate")
    bases = {BASE: f"oci-archive:{tmp_path}/base.tar"}
    values = {"sandbox": {"backend": backend}, "images": {"bases": bases}}
    found = check_task_set(tmp_path / "tasks", "DIR", RunConfig.model_validate(values))
    assert {one.name: one.report.reason for one in found} == dict.fromkeys(one.name for one in found)
