"""Files that reach grading from outside of the working directory: changes of the image's root, artifacts."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.environment.carrying import leads_to_no_verifier, stays_inside
from etude.environment.checking import TaskReport, check_tasks
from etude.environment.grading import Verdict
from etude.environment.origins import task_origin
from etude.environment.scripts import run_solution
from etude.environment.task_images import TaskImages
from etude.environment.verdicts import Grader
from etude.environment.wire import task_document, task_of
from etude.errors import SandboxError
from etude.records import Task
from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.gathering import IndexedRoot, Skipped
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.machine_backend import default_state_directory
from etude.sandbox.types import Resources
from etude.tasks.harbor import read_harbor
from tests.environment.host_image import save_image
from tests.sandbox.backends import with_backend
from tests.sandbox.images.image_builders import file_member, member
from tests.tasks.harbor_tasks import write_task

IMAGE = "small:1"
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
PUBLISHED = """#!/bin/sh
if grep -qx hello /logs/artifacts/greeting.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
PUBLISH = "#!/bin/sh\necho hello > /logs/artifacts/greeting.txt\n"


@pytest.fixture(autouse=True, scope="module")
def own_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Images of these tests are nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        save_image(
            IMAGE,
            file_member("data/old/a", b"old"),
            file_member("data/old/deep/b", b"old"),
            file_member("data/secret", b"s"),
            file_member("srv/tool", b"#!/bin/sh\nexit 1\n", 0o644),
            member("data/current", tarfile.SYMTYPE, link="old"),
            member("root", tarfile.DIRTYPE, 0o700),
        )
        yield


def reward_if(condition: str) -> str:
    return f"#!/bin/sh\nif {condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


async def grade(backend: SandboxBackend, task: Task, command: str | None) -> Verdict:
    sandbox = await task_origin(task, Resources()).make(backend)
    if command is None:
        assert await run_solution(task, sandbox) is None
    else:
        result = await sandbox.commands.run(command)
        assert result.exit_code == 0, result.stderr
    return await Grader(backend).grade(task, sandbox)


def play_all(
    wanted: Sequence[tuple[Path, str | None]], backend: type[LocalBackend] = LocalBackend
) -> list[Verdict]:
    """What each command earns in the task of its directory, all in one backend."""

    async def scenario(_: SandboxBackend) -> list[Verdict]:
        own, images = backend(images=default_state_directory() / "images"), TaskImages("local")
        try:
            return [await grade(own, await images.find(read_harbor(path)), one) for path, one in wanted]
        finally:
            await own.close()

    return with_backend("local", scenario)


def play(directory: Path, *commands: str | None, backend: type[LocalBackend] = LocalBackend) -> list[Verdict]:
    return play_all([(directory, command) for command in commands], backend)


def rewards(directory: Path, *commands: str | None) -> list[float | None]:
    return [verdict.reward for verdict in play(directory, *commands)]


def check(directory: Path) -> TaskReport:
    """What a task's check says."""

    async def scenario(_: SandboxBackend) -> TaskReport:
        task = await TaskImages("local").find(read_harbor(directory))
        backend = LocalBackend(images=default_state_directory() / "images")
        try:
            return (await check_tasks([task], backend))[0]
        finally:
            await backend.close()

    return with_backend("local", scenario)


def test_a_check_names_what_of_a_solution_does_not_reach_grading(tmp_path: Path) -> None:
    solve = "#!/bin/sh\nmkdir /opt /tmp/out\necho 1 > /tmp/out/answer\necho 2 > /opt/tool\necho 3 > /data/3\n"
    test = reward_if('[ "$(cat /tmp/out/answer)" = 1 ]')
    reason = check(write_task(tmp_path / "task", test, solve, image=IMAGE)).reason
    assert reason == (
        "its reference solution fails: tests/test.sh gave 0; "
        "allowed_paths keeps /opt/tool, /tmp/out/answer from grading"
    )


def test_files_anywhere_in_an_image_reach_grading(tmp_path: Path) -> None:
    """As in Harbor's own tutorial: keys in the home directory, while the working directory is elsewhere."""
    test = reward_if("[ -s ~/.ssh/id_rsa ] && [ $(stat -c %a ~/.ssh/id_rsa) = 600 ] && [ -d /app/empty ]")
    solve = "mkdir -m 700 ~/.ssh; echo key > ~/.ssh/id_rsa; chmod 600 ~/.ssh/id_rsa; mkdir -p /app/empty"
    directory = write_task(tmp_path / "task", test, f"#!/bin/sh\n{solve}\n", image=IMAGE)
    assert rewards(directory, None, "true", "mkdir ~/.ssh; echo key > ~/.ssh/id_rsa") == [1.0, 0.0, 0.0]


def test_what_an_agent_publishes_reaches_a_shared_verifier_and_leads_to_nothing_of_its_own(
    tmp_path: Path,
) -> None:
    directory = write_task(tmp_path / "task", PUBLISHED, PUBLISH, files={"tests/it": "hello\n"}, image=IMAGE)
    links = (
        "ln -s /tests/it /logs/artifacts/greeting.txt",
        "rmdir /logs/artifacts; ln -s /tests /logs/artifacts",
    )
    reward = "mkdir /logs/verifier; echo 1 > /logs/verifier/reward.json"
    assert rewards(directory, None, "true", *links, reward) == [1.0, 0.0, 0.0, 0.0, 0.0]


CHANGES = [
    ("rm /data/secret", "[ ! -e /data/secret ] && [ -e /data/old/a ]"),
    ("rm -r /data/old", "[ ! -e /data/old ]"),
    ("rm -r /data/old; mkdir /data/old; touch /data/old/c", "[ $(echo /data/old/*) = /data/old/c ]"),
    ("rm -r /data/old; echo x > /data/old", "[ -f /data/old ]"),
    ("rm -r /data/old; ln -s secret /data/old", "[ $(cat /data/old) = s ]"),
    ("rm /data/secret; mkdir /data/secret; touch /data/secret/x", "[ -f /data/secret/x ]"),
    (
        "rm /data/current; mkdir /data/current; touch /data/current/x",
        "[ -e /data/current/x ] && [ ! -e /data/old/x ]",
    ),
    ("chmod +x /srv/tool", "[ -x /srv/tool ]"),
    ("ln -sfn /srv /data/current", "[ $(readlink /data/current) = /srv ]"),
    ("mkdir -p /app/a; ln -s ../../data/secret /app/a/b", "[ $(cat /app/a/b) = s ]"),
    ("mv /data/old /data/new", "[ -f /data/new/deep/b ] && [ ! -e /data/old ]"),
    ('name="/srv/$(printf \'a\\377\')"; echo x > "$name"', "[ $(ls /srv | wc -l) = 2 ]"),
]


def test_what_became_of_an_images_files_reaches_grading(tmp_path: Path) -> None:
    wanted: list[tuple[Path, str]] = []
    for number, (command, condition) in enumerate(CHANGES):
        directory = write_task(tmp_path / str(number), reward_if(condition), None, image=IMAGE)
        wanted += [(directory, command), (directory, "true")]
    found = [verdict.reward for verdict in play_all(wanted)]
    assert dict(zip(CHANGES, zip(found[::2], found[1::2], strict=True), strict=True)) == dict.fromkeys(
        CHANGES, (1.0, 0.0)
    )


def test_what_was_changed_before_a_copy_or_a_pause_reaches_grading(tmp_path: Path) -> None:
    test = reward_if("[ ! -e /data/secret ] && [ -e /app/a ] && [ -e /app/b ] && [ ! -e /app/c ]")
    directory = write_task(tmp_path / "task", test, None, image=IMAGE)

    async def scenario(_: SandboxBackend) -> list[float | None]:
        task = await TaskImages("local").find(read_harbor(directory))
        backend = LocalBackend(images=default_state_directory() / "images")
        try:
            sandbox = await task_origin(task, Resources()).make(backend)
            await sandbox.commands.run("rm /data/secret; mkdir /app; touch /app/a /app/c")
            (copy,) = await sandbox.fork()
            assert not isinstance(copy, SandboxError)
            await copy.commands.run("rm /app/c")
            await copy.pause("filesystem")
            await copy.resume()
            await copy.commands.run("touch /app/b")
            return [(await Grader(backend).grade(task, one)).reward for one in (copy, sandbox)]
        finally:
            await backend.close()

    assert with_backend("local", scenario) == [1.0, 0.0]


READS_TOOLS = reward_if("/bin/grep -qx hello greeting.txt")
FORGE = "'#!/bin/sh\\nexit 0\\n'"


CHEATS = [
    f"rm /bin/grep; printf {FORGE} > /bin/grep; chmod +x /bin/grep",
    "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/extra.sh; exit 0",
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
    "mkdir /etc; echo 'hello() { :; }' > /etc/profile",
    "(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; done) > /dev/null 2>&1 &",
]


def test_nothing_that_a_test_runs_or_its_reward_comes_from_the_agent(tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", READS_TOOLS, image=IMAGE)
    *cheats, right = rewards(directory, *CHEATS, None)
    assert dict(zip(CHEATS, cheats, strict=True)) == dict.fromkeys(CHEATS, 0.0)
    assert right == 1.0


TOOLS = {"PATH": "/bin:/opt/env/bin:/opt/bin:/home/me/bin", "LD_LIBRARY_PATH": "/libs", "PYTHONPATH": "/deps"}


SETTINGS = [
    ("echo x > /opt/env/lib/new.py", "/opt/env/lib/new.py"),
    ("echo x > /opt/env/bin/other", "/opt/env/bin/other"),
    (
        "mv /opt/env /opt/old; mkdir -p /srv/e/bin; touch /srv/e/bin/x; ln -s /srv/e /opt/env",
        "/opt/env/bin/x",
    ),
    ("mkdir /opt/bin; echo x > /opt/bin/tool", "/opt/bin/tool"),
    ("mkdir -p /home/me/bin; echo x > /home/me/bin/tool", "/home/me/bin/tool"),
    ("mkdir /libs; echo x > /libs/libc.so", "/libs/libc.so"),
    ("mkdir -p /srv/site-packages; echo x > /srv/site-packages/a.pth", "/srv/site-packages/a.pth"),
    ("echo x > ~/.bashrc", "/root/.bashrc"),
    ("mkdir -p ~/.cache/uv; echo x > ~/.cache/uv/a", "/root/.cache/uv/a"),
    ("mkdir -p ~/.sshx; echo x > ~/.sshx/a", "/root/.sshx/a"),
    ("rm -rf /root; mkdir -p /srv/h; touch /srv/h/.profile; ln -s /srv/h /root", "/root/.profile"),
    ("echo x > /pytest.ini", "/pytest.ini"),
    ("ln -s /srv/tool /conftest.py", "/conftest.py"),
    ("mkdir -p /srv/__pycache__; echo x > /srv/__pycache__/a.pyc", "/srv/__pycache__/a.pyc"),
    ("echo x > /tmp/found", "/tmp/found"),
    ("mkdir -p /var/lib/dpkg/info; echo x > /var/lib/dpkg/info/a.postinst", "/var/lib/dpkg/info/a.postinst"),
    ("mkdir -p /srv/e/bin; echo x > /srv/e/bin/pytest", "/srv/e/bin/pytest"),
    ("mkdir /deps; echo x > /deps/a.py", "/deps/a.py"),
    ("mkdir /srv/e; echo x > /srv/e/pyvenv.cfg", "/srv/e/pyvenv.cfg"),
    ("mkdir -p /home/me/.config; echo x > /home/me/.config/a", "/home/me/.config/a"),
    ("mkdir ~/.ssh; echo x > ~/.ssh/config", "/root/.ssh/config"),
    ("rm -r /opt/env", "/opt/env/gone || [ ! -e /opt/env/bin/tool"),
]


def test_settings_and_programs_elsewhere_in_an_image_do_not_reach_grading(tmp_path: Path) -> None:
    """The control: they do where the task names them."""
    rows = (file_member("opt/env/bin/tool", b"old"), file_member("opt/env/lib/a.py", b"a"))
    root = member("root", tarfile.DIRTYPE, 0o700)
    save_image("tools:1", *rows, file_member("srv/tool", b""), root, env=TOOLS)
    wanted: list[tuple[Path, str]] = []
    for number, (command, found) in enumerate(SETTINGS):
        for named in (
            "",
            '[metadata.etude]\nallowed_paths = ["/*/**", "/root", "/pytest.ini", "/conftest.py"]\n',
        ):
            directory = tmp_path / f"{number}-{bool(named)}"
            write_task(directory, reward_if(f"[ -e {found} ]"), None, named, image="tools:1")
            wanted.append((directory, command))
    earned = [verdict.reward for verdict in play_all(wanted)]
    assert dict(zip(SETTINGS, zip(earned[::2], earned[1::2], strict=True), strict=True)) == {
        row: (0.0, 0.0 if "pycache" in row[0] else 1.0) for row in SETTINGS
    }


def test_programs_reach_grading_where_the_task_names_them(tmp_path: Path) -> None:
    """The control of the test before: what the rule keeps out would have been paid."""
    directory = write_task(tmp_path / "task", READS_TOOLS, image=IMAGE)
    with (directory / "task.toml").open("a") as file:
        file.write('[metadata.etude]\nallowed_paths = ["**", "/bin/grep"]\n')
    command = f"rm /bin/grep; printf {FORGE} > /bin/grep; chmod +x /bin/grep"
    assert rewards(directory, command, "true") == [1.0, 0.0]


def test_only_allowed_paths_reach_grading(tmp_path: Path) -> None:
    test = reward_if("[ -e /app/out/a ] && [ ! -e /app/b ] && [ ! -e c ]")
    directory = write_task(tmp_path / "task", test, None, image=IMAGE)
    with (directory / "task.toml").open("a") as file:
        file.write('[metadata.etude]\nallowed_paths = ["/app/out/**"]\n')
    assert rewards(directory, "mkdir -p /app/out; touch /app/out/a /app/b c", "touch c") == [1.0, 0.0]


LINKS = [
    "ln -s /tests/expected.json /srv/answer",
    "ln -s ../tests/expected.json /srv/answer",
    "ln -s / /srv/up; ln -s up/tests/expected.json /srv/answer",
    "ln -s /proc/self/root/tests/expected.json /srv/answer",
    "mkdir /srv/d; ln -s d/../../tests/expected.json /srv/answer",
    "ln -s /tests /srv/t; ln -s t/expected.json /srv/answer",
]


def test_no_link_outside_of_the_workspace_leads_to_the_tests(tmp_path: Path) -> None:
    test = reward_if("[ $(cat /srv/answer) = $(cat /tests/expected.json) ]")
    directory = write_task(tmp_path / "task", test, None, files={"tests/expected.json": "42\n"}, image=IMAGE)
    *found, right = rewards(directory, *LINKS, "echo 42 > /srv/right; ln -s right /srv/answer")
    assert (dict(zip(LINKS, found, strict=True)), right) == (dict.fromkeys(LINKS, 0.0), 1.0)


def test_a_link_is_judged_by_its_words() -> None:
    cases = {"a": True, "../x": True, "../../x": False, "/": False, "/logs/a": False}
    assert {one: leads_to_no_verifier("/srv/b", one) for one in cases} == cases
    inside = {"a": True, "../a": True, "../../a": False, "/w/a": True, "/wa": False, "a/../b": False}
    assert {one: stays_inside("d/b", one, "/w") for one in inside} == inside


def test_more_than_is_carried_is_the_agents_failure(tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", image=IMAGE)
    (verdict,) = play(
        directory, "mkdir /app; head -c 40000000 /dev/zero > /app/big; echo hello > greeting.txt"
    )
    assert (verdict.reward, verdict.cause) == (None, "the changes are too large to carry")


@pytest.mark.parametrize("patterns", ['["**", "/**"]', '["**", "/**", "/srv/answer.txt"]'])
def test_what_cannot_cross_counts_for_nothing(tmp_path: Path, patterns: str) -> None:
    """Caches and downloads, more than can be carried: they fail no right solution."""
    directory = write_task(tmp_path / "task", image=IMAGE)
    with (directory / "task.toml").open("a") as file:
        file.write(f"[metadata.etude]\nallowed_paths = {patterns}\n")
    many = "mkdir -p ~/.cache/many /var/cache; cd ~/.cache/many; seq 51000 | xargs touch; cd - > /dev/null"
    large = (
        "head -c 40000000 /dev/zero > /var/cache/big; cp /var/cache/big /tmp/big; echo hello > greeting.txt"
    )
    (verdict,) = play(directory, f"{many}; {large}")
    assert (verdict.reward, verdict.cause) == (1.0, None)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_record_of_the_image_that_was_changed_is_the_agents_failure(tmp_path: Path, text: str) -> None:
    index = tmp_path / "index.json"
    index.write_text(text)
    with pytest.raises(Fault, match="was changed"):
        list(IndexedRoot(str(index)).candidates(Skipped(frozenset(one.name for one in Path("/").iterdir()))))


# A verifier with a machine of its own


def separate_task(
    directory: Path, test: str = PUBLISHED, solve: str = PUBLISH, toml: str = "", **more: Any
) -> Path:
    return write_task(directory, test, solve, SEPARATE + toml, **more)


def test_only_artifacts_reach_a_separate_verifier(tmp_path: Path) -> None:
    directory = separate_task(tmp_path)
    unpublished = "echo hello > greeting.txt; mkdir -p /tmp/other; echo hello > /tmp/other/greeting.txt"
    assert rewards(directory, None, "true", unpublished) == [1.0, 0.0, 0.0]
    test = reward_if("[ ! -e greeting.txt ] && [ -e /logs/artifacts/a ]")
    separate_task(tmp_path, test)
    assert rewards(tmp_path, "echo hello > greeting.txt; touch /logs/artifacts/a") == [1.0]


def test_declared_artifacts_cross_without_what_they_exclude(tmp_path: Path) -> None:
    """The verifier's own image has the tests, and its files at an artifact's place give way."""
    toml = """[verifier.environment]
docker_image = "other:1"
[[artifacts]]
source = "/app/out"
exclude = ["*.log", "big"]
"""
    test = reward_if('[ "$(cd /app/out; echo $(find . | sort))" = ". ./a ./d ./d/b ./link" ]')
    rows = (file_member("app/out/before", b"x"), file_member("tests/test.sh", test.encode(), 0o755))
    save_image("other:1", *rows)
    directory = write_task(tmp_path / "task", test, None, toml, image=IMAGE)
    make = "mkdir -p /app/out/d /app/out/big; cd /app/out; touch a d/b x.log d/y.log big/z; ln -s d/b link"
    leads_out = "; ln -s /etc/passwd out; ln -s ../../tests/test.sh up"
    assert rewards(directory, make + leads_out, "true") == [1.0, 0.0]


def test_a_test_script_in_the_verifiers_image_runs_without_the_right_to_be_executed(tmp_path: Path) -> None:
    save_image("plain:1", file_member("tests/test.sh", PUBLISHED.encode(), 0o644))
    toml = '[verifier.environment]\ndocker_image = "plain:1"\n'
    directory = write_task(tmp_path / "task", PUBLISHED, PUBLISH, toml, image=IMAGE)
    assert rewards(directory, None, "true") == [1.0, 0.0]


def test_artifacts_of_an_image_are_there_though_nothing_was_done(tmp_path: Path) -> None:
    test = reward_if('[ "$(cat /data/old/a)" = new ]')
    solve = "#!/bin/sh\necho new > /data/old/a\n"
    toml = 'artifacts = ["/data"]\n'
    directory = write_task(tmp_path / "task", test, solve, SEPARATE, image=IMAGE)
    (directory / "task.toml").write_text(toml + (directory / "task.toml").read_text())

    report = check(directory)
    assert (report.reason, report.forgeable) == (None, ())


def test_a_shared_verifier_is_forgeable_and_a_separate_one_not(tmp_path: Path) -> None:
    def find(directory: Path) -> int:
        async def scenario(backend: SandboxBackend) -> int:
            return len((await Grader(backend).find_twins(read_harbor(directory))).open_tests)

        return with_backend("local", scenario)

    assert find(write_task(tmp_path / "shared")) == 1
    assert find(separate_task(tmp_path / "separate")) == 0


SEPARATE_CHEATS = [
    "ln -s /tests/expected /logs/artifacts/greeting.txt",
    "rm -r /logs/artifacts; ln -s /tests /logs/artifacts",
    "rm -r /logs/artifacts; ln -s /tmp/tests /logs/artifacts",
    "mkdir -p /tmp/tests /tmp/logs/verifier; echo 1 > /tmp/logs/verifier/reward.txt",
    "ln -s ../verifier/reward.txt /logs/artifacts/greeting.txt",
    "mknod /logs/artifacts/greeting.txt p || exit 0",
    "(while :; do echo 1 > /logs/verifier/reward.json; done) > /dev/null 2>&1 &",
]


def test_no_artifact_leads_to_a_separate_verifiers_own_files(tmp_path: Path) -> None:
    directory = separate_task(tmp_path, files={"tests/expected": "hello\n"})
    *found, right = rewards(directory, *SEPARATE_CHEATS, None)
    expected = dict.fromkeys(SEPARATE_CHEATS, 0.0)
    assert (dict(zip(SEPARATE_CHEATS, found, strict=True)), right) == (expected, 1.0)


class Liar(LocalBackend):
    """Answers a request for artifacts with an archive of its own making."""

    async def create(self, *arguments: Any, **named: Any) -> MachineSandbox:
        sandbox = await super().create(*arguments, **named)

        honest = sandbox.pack

        async def pack(paths: Sequence[str], *others: Any, **more: Any) -> bytes:
            if paths != ["/logs/artifacts"]:
                return await honest(paths, *others, **more)
            target = io.BytesIO()
            with tarfile.open(fileobj=target, mode="w") as archive:
                for name, kind, link in (
                    ("tests/test.sh", tarfile.REGTYPE, ""),
                    ("logs/artifacts/../../tests/test.sh", tarfile.REGTYPE, ""),
                    ("logs/artifacts/d", tarfile.SYMTYPE, "/tests"),
                    ("logs/artifacts/h", tarfile.LNKTYPE, "tests/test.sh"),
                    ("logs/artifacts/s", tarfile.SYMTYPE, "e"),
                    ("logs/artifacts/s/f", tarfile.REGTYPE, ""),
                    ("logs/artifacts/kept", tarfile.REGTYPE, ""),
                ):
                    row = tarfile.TarInfo(name)
                    row.type, row.linkname, row.mode = kind, link, 0o6755
                    archive.addfile(row)
            return target.getvalue()

        sandbox.pack = pack
        return sandbox


def test_an_archive_of_a_sandbox_that_was_taken_over_lays_nothing_but_artifacts(tmp_path: Path) -> None:
    test = reward_if("[ $(ls /logs/artifacts | wc -l) = 2 ] && [ $(stat -c %a /logs/artifacts/kept) = 755 ]")
    (verdict,) = play(separate_task(tmp_path, test), "true", backend=Liar)
    assert verdict.reward == 1.0


def test_what_collects_runs_before_artifacts_are_taken(tmp_path: Path) -> None:
    hook = '[[verifier.collect]]\ncommand = "cp greeting.txt /logs/artifacts/; false"\n'
    directory = separate_task(tmp_path, solve="#!/bin/sh\necho hello > greeting.txt\n", toml=hook)
    assert rewards(directory, None, "true") == [1.0, 0.0]


def test_a_separate_task_crosses_the_wire_whole(tmp_path: Path) -> None:
    toml = '[[verifier.collect]]\ncommand = "true"\n[environment.healthcheck]\ncommand = "true"\n'
    task = read_harbor(separate_task(tmp_path, toml=toml))
    assert task.verifier is not None and task.verifier.machine is not None and task.verifier.artifacts
    assert task_of(json.loads(json.dumps(task_document(task)))) == replace(task, directory=None)


# Health checks


def test_a_session_begins_when_its_machine_is_healthy(tmp_path: Path) -> None:
    """The third try is the first to succeed, and two failures are fewer than the retries."""
    command = "echo x >> /tmp/tries; [ $(wc -l < /tmp/tries) = 3 ]"
    toml = f'[environment.healthcheck]\ncommand = "{command}"\ninterval_sec = 0.01\n'
    directory = write_task(tmp_path, toml=toml)
    assert rewards(directory, None, "true") == [1.0, 0.0]
    for wrong in ("retries = 2\n", "timeout_sec = 0.05\nretries = 1\n"):
        slow = toml.replace("echo x", "sleep 0.5; echo x") if "timeout" in wrong else toml
        write_task(tmp_path, toml=slow + wrong)
        with pytest.raises(SandboxError, match="its health check failed"):
            play(directory, None)


def test_failures_within_the_start_period_do_not_count(tmp_path: Path) -> None:
    command = "echo x >> /tmp/tries; [ $(wc -l < /tmp/tries) = 3 ]"
    rest = "retries = 1\nstart_period_sec = 20\nstart_interval_sec = 0.01\n"
    write_task(tmp_path, toml=f'[environment.healthcheck]\ncommand = "{command}"\n{rest}')
    assert rewards(tmp_path, None) == [1.0]
