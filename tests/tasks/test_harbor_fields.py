"""Each field of Harbor's `task.toml` is honoured, or refused by its name."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from etude.errors import TaskError
from etude.records import Artifact, CollectCommand, HealthCheck, Task, TaskMachine
from etude.tasks.harbor import read_harbor
from etude.tasks.harbor_fields import REFUSED, TaskTable
from tests.tasks.harbor_tasks import write_task
from tests.tasks.list_harbor_fields import models_in

HERE = Path(__file__).parent
FIELDS = (HERE / "harbor_0_25_fields.txt").read_text().split()
"""Of Harbor 0.25.0, schema 1.4: what `list_harbor_fields.py` printed."""
DOCS = HERE.parents[1] / "docs/harbor.md"


SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'


def read_with(directory: Path, toml: str, **options: Any) -> Task:
    return read_harbor(write_task(directory, toml=toml, **options))


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_harbor_is_honoured_or_refused(field: str) -> None:
    parents = field.split(".")
    if any(".".join(parents[:length]) in REFUSED for length in range(1, len(parents) + 1)):
        return
    model: Any = TaskTable
    for name in parents:
        if model is None:
            return  # below a table of facts that nothing depends on, such as an author's name
        assert name in model.model_fields, f"{field} is neither honoured nor refused"
        kinds = list(models_in(model.model_fields[name].annotation))
        model = kinds[0] if kinds else None


def test_the_page_lists_each_field() -> None:
    page = DOCS.read_text(encoding="utf-8")
    tops = {field for field in FIELDS if field.count(".") <= 1 and not field.startswith("artifacts.")}
    tables = {"agent", "environment", "solution", "task", "verifier"}
    names = {field for field in tops - tables if not field.startswith("task.")}
    assert [field for field in sorted(names) if f"`{field}`" not in page] == []


VALUES: dict[str, str] = {
    "environment.gpus": "gpus = 1",
    "environment.gpu_types": 'gpu_types = ["H100"]',
    "environment.tpu": 'tpu = { type = "v4", topology = "2x2x1" }',
    "environment.mcp_servers": '[[environment.mcp_servers]]\nname = "a"\nurl = "http://a"',
    "environment.skills_dir": 'skills_dir = "/skills"',
    "verifier.environment.gpus": "[verifier.environment]\ngpus = 1",
    "verifier.environment.gpu_types": '[verifier.environment]\ngpu_types = ["H100"]',
    "verifier.environment.tpu": '[verifier.environment]\ntpu = { type = "v4", topology = "2x2x1" }',
    "verifier.environment.mcp_servers": '[[verifier.environment.mcp_servers]]\nname = "a"\nurl = "http://a"',
    "verifier.environment.skills_dir": '[verifier.environment]\nskills_dir = "/skills"',
    "verifier.environment.healthcheck": '[verifier.environment.healthcheck]\ncommand = "true"',
}
STEP = '[[steps]]\nname = "one"\n'
VALUES |= {
    f"steps.{field}": STEP + toml.replace("verifier", "steps.verifier", 1)
    for field, toml in VALUES.items()
    if field.startswith("verifier.")
}
VALUES |= {
    "steps.agent.user": f"{STEP}[steps.agent]\nuser = 1",
    "steps.agent.network_mode": f'{STEP}[steps.agent]\nnetwork_mode = "public"',
    "steps.agent.allowed_hosts": f'{STEP}[steps.agent]\nallowed_hosts = ["a.b"]',
}


def test_a_value_is_tried_for_each_refused_field() -> None:
    assert set(VALUES) == set(REFUSED)


@pytest.mark.parametrize("field", VALUES)
def test_a_refused_field_is_named_with_its_value(tmp_path: Path, field: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_with(tmp_path, VALUES[field])
    assert (caught.value.field, caught.value.fix) == (f"task.toml: {field}", REFUSED[field])
    assert caught.value.received


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        ('os = "windows"', "environment.os"),
        ("cpus = -1", "environment.cpus"),
        ('memory_mb = "2G"', "environment.memory_mb"),
        ('memory = "lots"', "environment.memory"),
        ('memory = "2G"\nmemory_mb = 1', "environment.memory"),
        ('workdir = "app"', "environment.workdir"),
        ('network_mode = "allowlist"\nallowed_hosts = ["10.0.0.0/8"]', "environment.allowed_hosts"),
        ('network_mode = "allowlist"\nallowed_hosts = ["192.0.2.1"]', "environment.allowed_hosts"),
        ('allowed_hosts = ["example.com"]', "environment.allowed_hosts"),
        ('env = { KEY = "${ETUDE_TESTS_UNSET}" }', "environment.env.KEY"),
        ("build_timeout_sec = 0", "environment.build_timeout_sec"),
        ("colour = 3", "environment.colour"),
        ("[agent]\ntimeout_sec = inf", "agent.timeout_sec"),
        ('[agent]\nallowed_hosts = ["a.b"]', "agent.allowed_hosts"),
        ("[agent]\nuser = -1", "agent.user"),
        (
            '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1',
            "verifier.environment_mode",
        ),
        ('[verifier]\nenvironment_mode = "apart"', "verifier.environment_mode"),
        (f'{SEPARATE}[[artifacts]]\nsource = "app"', "artifacts.source"),
        (f'{SEPARATE}[[artifacts]]\nsource = "/app/../x"', "artifacts.source"),
        (f'{SEPARATE}[[artifacts]]\nsource = "/"', "artifacts.source"),
        (f'{SEPARATE}[[artifacts]]\nsource = "/logs"', "artifacts.source"),
        (f'{SEPARATE}[[artifacts]]\nsource = "/tests/x"', "artifacts.source"),
        (f'{SEPARATE}[[artifacts]]\nsource = "/tmp"', "artifacts.source"),
        (f'{SEPARATE}[[artifacts]]\nsource = "/app"\nservice = "db"', "artifacts.0"),
        (
            f'{SEPARATE}[[artifacts]]\nsource = "/a"\ndestination = "x"\n[[artifacts]]\nsource = "/x/b"',
            "artifacts.destination",
        ),
        ('[[verifier.collect]]\ncommand = "true"\nuser = "db"', "verifier.collect.user"),
        ('[[verifier.collect]]\ncommand = "true"\nservice = "db"', "verifier.collect.0.service"),
        ('[environment.healthcheck]\ncommand = "true"\nretries = 0', "environment.healthcheck.retries"),
        ('[verifier.environment]\nmemory = "lots"', "verifier.environment.memory"),
        ('[verifier.environment]\nallowed_hosts = ["a.b"]', "verifier.environment.allowed_hosts"),
        ("[verifier.environment]\nenv = { A = '1' }", "verifier.environment.env"),
        ('[metadata.etude]\nallowed_paths = ["/app/**"]', "metadata.etude.allowed_paths"),
        ("[solution]\nenv = { A = 1 }", "solution.env.A"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_its_field(
    tmp_path: Path, toml: str, field: str
) -> None:
    with pytest.raises(TaskError) as caught:
        read_with(tmp_path, toml)
    assert caught.value.field is not None and caught.value.field.startswith(f"task.toml: {field}")


def test_artifacts_of_a_shared_verifier_change_nothing(tmp_path: Path) -> None:
    """Harbor keeps them beside the results, and grades where they lie."""
    listed = '[[artifacts]]\nsource = "/tmp/out"\ndestination = "out"\n'
    with_artifacts, without = (read_with(tmp_path / name, toml) for name, toml in (("a", listed), ("b", "")))
    assert with_artifacts.verifier == without.verifier
    with pytest.raises(TaskError, match=r"artifacts\.0\."):
        read_with(tmp_path / "c", f'{listed}service = "db"\n')


@pytest.mark.parametrize("value", ["${ETUDE_TESTS_SECRET}", "${ETUDE_TESTS_SECRET:-plain}"])
@pytest.mark.parametrize("table", ["environment", "verifier", "solution"])
def test_a_variable_of_this_process_is_read_only_where_the_run_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, value: str
) -> None:
    toml = f'{"" if table == "environment" else f"[{table}]"}\nenv = {{ KEY = "{value}" }}\n'
    monkeypatch.setenv("ETUDE_TESTS_SECRET", "hunter2")
    with pytest.raises(TaskError) as caught:
        read_with(tmp_path, toml, image="ubuntu:24.04")
    assert caught.value.field == f"task.toml: {table}.env.KEY"
    assert caught.value.fix == 'set tasks.host_env = ["ETUDE_TESTS_SECRET"]'
    assert value in str(caught.value) and "hunter2" not in str(caught.value)
    task = read_harbor(tmp_path, ["ETUDE_TESTS_SECRET"])
    part = {"environment": task.machine, "verifier": task.verifier, "solution": task.solution}[table]
    assert part is not None and part.env == {"KEY": "hunter2"}


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        ('docker_image = "ubuntu:24.04"', "environment.docker_image"),
        ('workdir = "/app"', "environment.workdir"),
        ("env = { A = '1' }", "environment.env"),
        ('network_mode = "public"', "environment.network_mode"),
        ("allow_internet = true", "environment.allow_internet"),
        ("colour = 3", "environment.colour"),
        ("[agent]\nuser = 0", "agent.user"),
        ('[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]', "verifier.network_mode"),
        ("[verifier.env]\nA = '1'", "verifier.env"),
        ("[solution.env]\nA = '1'", "solution.env"),
    ],
)
def test_what_needs_a_script_is_refused_where_values_are_graded(
    tmp_path: Path, toml: str, field: str
) -> None:
    write_task(tmp_path)
    ours = '[metadata.etude]\ngrading = "values"\n[environment]\n'
    (tmp_path / "task.toml").write_text(ours + 'memory_mb = 512\nnetwork_mode = "no-network"\n')
    assert read_harbor(tmp_path).machine is None
    (tmp_path / "task.toml").write_text(ours + toml + "\n")
    with pytest.raises(TaskError) as caught:
        read_harbor(tmp_path)
    assert caught.value.field == f"task.toml: {field}"
    if "colour" not in field:
        assert caught.value.fix == 'set metadata.etude.grading = "test_sh"'


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "tests/a").symlink_to("b")
    (tmp_path / "tests/b").symlink_to("a")
    with pytest.raises(TaskError, match=r"tests/a: .*or to nothing"):
        read_harbor(tmp_path)


def test_an_unknown_schema_and_unsupported_files_are_refused(tmp_path: Path) -> None:
    (write_task(tmp_path / "a") / "task.toml").write_text('schema_version = "2.0"\n')
    with pytest.raises(TaskError, match="schema_version"):
        read_harbor(tmp_path / "a")
    for name in (
        "trajectory.json",
        "tests/.harborignore",
        "environment/data/.harborignore",
        "environment/docker-compose.yaml",
    ):
        with pytest.raises(TaskError, match="is not supported"):
            read_with(tmp_path / "b" / name.replace("/", "-"), "", files={name: "x"})
    (write_task(tmp_path / "c") / "task.toml").write_text("")
    with pytest.raises(TaskError, match="names no image"):
        read_harbor(tmp_path / "c")


def test_what_a_task_asks_for_is_read(tmp_path: Path) -> None:
    task = read_with(
        tmp_path,
        """cpus = 2
memory = "2G"
storage_mb = 300
workdir = "/app"
network_mode = "allowlist"
allowed_hosts = ["PyPI.example", "*.files.example"]
env = { MODE = "${ETUDE_TESTS_UNSET:-fast}", PLAIN = "x" }
[agent]
timeout_sec = 90
user = 1001
[verifier]
timeout_sec = 70.5
user = "checker"
network_mode = "no-network"
""",
        image="ubuntu:24.04",
    )
    machine, verifier = task.machine, task.verifier
    assert machine is not None and verifier is not None
    assert (machine.docker_image, machine.cpus, machine.workdir) == ("ubuntu:24.04", 2.0, "/app")
    assert (machine.memory_bytes, machine.disk_bytes) == (2 << 30, 300 << 20)
    assert (machine.agent_s, machine.user, machine.env) == (90.0, "1001", {"MODE": "fast", "PLAIN": "x"})
    assert machine.hosts == (
        "pypi.example:443",
        "pypi.example:80",
        "*.files.example:443",
        "*.files.example:80",
    )
    assert (verifier.timeout_s, verifier.user, verifier.hosts) == (70.5, "checker", ())
    assert task.files == {} and task.instruction == "Write hello into greeting.txt."


def test_what_a_separate_verifier_asks_for_is_read(tmp_path: Path) -> None:
    toml = """network_mode = "no-network"
[environment.healthcheck]
command = "true"
timeout_sec = 7
[verifier]
user = "checker"
[verifier.environment]
memory_mb = 300
network_mode = "allowlist"
allowed_hosts = ["a.example"]
[[artifacts]]
source = "/app/out/"
exclude = ["*.log"]
destination = "out"
[[verifier.collect]]
command = "dump"
timeout_sec = 5
"""
    task = read_with(tmp_path, toml, image="ubuntu:24.04")
    machine, verifier = task.machine, task.verifier
    assert machine is not None and machine.health == HealthCheck("true", timeout_s=7.0)
    assert verifier is not None and verifier.hosts == ("a.example:443", "a.example:80")
    assert verifier.artifacts == (Artifact("/logs/artifacts"), Artifact("/app/out", ("*.log",)))
    assert verifier.collect == (CollectCommand("dump", 5.0),)
    own = verifier.machine
    assert own == TaskMachine("ubuntu:24.04", memory_bytes=300 << 20, user="checker", hosts=())
    assert verifier.archive, "the tests are laid into the task's own image"
    (tmp_path / "tests/Dockerfile").write_text("FROM ubuntu:24.04\nCOPY . /tests\n")
    built = read_harbor(tmp_path).verifier
    assert built is not None and built.machine is not None and built.archive == b""
    assert (built.machine.docker_image, built.machine.context) == ("", "tests")
    named = toml.replace("memory_mb = 300", 'docker_image = "checker:1"')
    verifier = read_with(tmp_path, named, image="ubuntu:24.04").verifier
    assert verifier is not None and verifier.machine is not None
    assert (verifier.machine.docker_image, verifier.archive) == ("checker:1", b"")


@pytest.mark.parametrize(
    ("toml", "paths"),
    [
        ("", ("**", "/**")),
        ('[metadata.etude]\nallowed_paths = ["src/**", "/app/**"]', ("src/**", "/app/**")),
    ],
)
def test_changes_anywhere_in_an_image_are_allowed_unless_the_task_says_otherwise(
    tmp_path: Path, toml: str, paths: tuple[str, ...]
) -> None:
    assert read_with(tmp_path, toml, image="ubuntu:24.04").allowed_paths == paths
    assert read_harbor(write_task(tmp_path)).allowed_paths == ("**",)


@pytest.mark.parametrize(
    ("toml", "hosts"),
    [
        ("", None),
        ('network_mode = "public"', None),
        ("allow_internet = false", ()),
        ("allow_internet = true", None),
    ],
)
def test_a_public_network_is_what_the_run_allows(
    tmp_path: Path, toml: str, hosts: tuple[str, ...] | None
) -> None:
    task = read_with(tmp_path, toml)
    assert task.machine is not None and task.verifier is not None
    assert (task.machine.hosts, task.verifier.hosts) == (hosts, hosts)


def test_directories_keep_bytes_links_and_modes(tmp_path: Path) -> None:
    write_task(tmp_path, files={"tests/data.bin": b"\xff\0", "tests/lib/a.sh": "true\n"})
    (tmp_path / "tests/lib/a.sh").chmod(0o700)
    (tmp_path / "tests/a").symlink_to("lib/a.sh")
    task = read_harbor(tmp_path)
    assert task == read_harbor(tmp_path)
    assert task.verifier is not None
    with tarfile.open(fileobj=io.BytesIO(task.verifier.archive)) as archive:
        rows = {row.name: row for row in archive}
        data = archive.extractfile("data.bin")
        assert data is not None and data.read() == b"\xff\0"
    assert (rows["a"].linkname, rows["lib/a.sh"].mode, rows["test.sh"].mode & 0o111) == (
        "lib/a.sh",
        0o700,
        0o111,
    )
    (tmp_path / "tests/out").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="outside of tests"):
        read_harbor(tmp_path)


@pytest.mark.slow
@pytest.mark.foreign
def test_the_frozen_fields_are_those_of_harbors_own_package(tmp_path: Path) -> None:
    options = [
        "--python-version",
        "3.12",
        "--only-binary=:all:",
        "--no-deps",
        "--quiet",
        "--dest",
        str(tmp_path),
    ]
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "harbor==0.25.0"], capture_output=True, text=True
    )
    if fetched.returncode:
        pytest.skip(f"the package cannot be fetched: {fetched.stderr[-200:]}")
    (wheel,) = tmp_path.glob("harbor-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "package")
    (tmp_path / "package/toml.py").write_text("")  # it writes files with it, and is not asked to
    printed = subprocess.run(
        [sys.executable, HERE / "list_harbor_fields.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "package")},
    )
    assert printed.stdout.split() == FIELDS, printed.stderr
