"""Dockerfiles built over a fake runner: what each instruction does, what is cached, what is refused."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from etude.errors import SandboxError
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.builder import Build, Builder
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.runner import RunResult
from etude.sandbox.images.stage import DEFAULT_PATH, architecture
from etude.sandbox.local.runner import SandboxRunner
from etude.sandbox.template import Image
from tests.fakes.layer_runner import Call, Changes, FakeLayerRunner
from tests.sandbox.images.image_builders import (
    add,
    file_member,
    leftovers,
    member,
    read_image,
    tree,
    write_tree,
)


class Bench:
    """A store with one base image, a fake runner and a build context."""

    def __init__(self, folder: Path) -> None:
        self.store = ImageStore(folder / "store")
        self.context = folder / "context"
        self.context.mkdir()
        self.tars = folder / "tars"
        self.tars.mkdir()
        self.runner = FakeLayerRunner(self.script, self.tars)
        self.builder = Builder(self.store, self.runner, run_timeout_s=5.0)
        self.changes: dict[str, Changes | RunResult | BaseException] = {}
        layer = add(
            self.store.layers,
            member("usr/bin", tarfile.DIRTYPE, 0o755),
            member("bin", tarfile.SYMTYPE, link="usr/bin"),
            file_member("etc/name", b"base"),
            member("tmp", tarfile.DIRTYPE, 0o1777),
        )
        self.base = Image("base", (layer,), {"BASE": "1"}, "/")
        self.store.save(self.base)

    def script(self, call: Call) -> Changes | RunResult | BaseException:
        return self.changes.get(call.argv[-1], {})

    def build(self, text: str, files: Mapping[str, str | bytes] | None = None, **options: object) -> Build:
        write_tree(self.context, {"Dockerfile": text, **(files or {})})
        return asyncio.run(self.builder.build(self.context, "built", **options))  # type: ignore[arg-type]

    def read(self, build: Build, path: str) -> bytes | None:
        return read_image(self.store, build.image, path)

    def names(self, build: Build) -> list[str]:
        found = self.store.view(build.image).walk(())
        return [b"/".join(one.parts).decode() for one in found if one.parts]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_whole_dockerfile(bench: Bench) -> None:
    bench.changes["make all"] = {"out/result": b"made"}
    build = bench.build(
        """
        ARG VERSION=1
        FROM base
        ARG VERSION
        ENV GREETING="hello $VERSION" OTHER=$BASE
        WORKDIR /app
        COPY src/ lib/
        RUN make all
        WORKDIR sub
        USER agent
        LABEL a=b
        CMD ["x"]
        """,
        {"src/a.py": "a", "src/deep/b.py": "b"},
    )
    assert build.image == bench.store.load("built")
    assert build.image.env == {"BASE": "1", "GREETING": "hello 1", "OTHER": "1"}
    assert (build.image.workdir, build.image.user) == ("/app/sub", "agent")
    assert bench.read(build, "/app/lib/deep/b.py") == b"b"
    assert bench.read(build, "/out/result") == b"made"
    assert "app/sub" in bench.names(build)
    (call,) = bench.runner.calls
    assert call.argv == ("/bin/sh", "-c", "make all")
    assert call.cwd == "/app"
    variables = {"BASE": "1", "GREETING": "hello 1", "OTHER": "1", "VERSION": "1"}
    assert call.env == {"PATH": DEFAULT_PATH, "HOME": "/root", **variables}
    assert [note.split(":")[0] for note in build.notes] == ["Dockerfile, line 12"]
    assert list(bench.tars.iterdir()) == []
    assert leftovers(bench.store.layers) == []


def test_a_second_build_runs_nothing_and_gives_the_same_image(bench: Bench) -> None:
    bench.changes["b"] = {"x": b"1"}
    text = "FROM base\nCOPY f /f\nRUN a\nRUN b"
    first = bench.build(text, {"f": "1"})
    write_tree(bench.context, {"f": "1"})  # newer, but equal
    second = bench.build(text)
    assert (first.num_run, first.num_cached, second.num_run, second.num_cached) == (2, 0, 0, 2)
    assert second.image == first.image
    assert len(bench.runner.calls) == 2


@pytest.mark.parametrize(
    ("text", "files", "arguments"),
    [
        ("FROM base\nARG V=1\nCOPY f /f\nRUN a", {"f": "2"}, {}),
        ("FROM base\nARG V=1\nCOPY f /f\nRUN a", {}, {"V": "2"}),
        ("FROM base\nARG V=1\nCOPY f /f\nRUN b", {}, {}),
        ("FROM base\nARG V=1\nCOPY f /f\nENV X=y\nRUN a", {}, {}),
        ("FROM base\nARG V=1\nCOPY f /f\nWORKDIR /else\nRUN a", {}, {}),
        ("FROM base\nARG V=1\nCOPY f /f\nUSER x\nRUN a", {}, {}),
    ],
)
def test_whatever_a_command_may_see_makes_it_run_again(
    bench: Bench, text: str, files: dict[str, str], arguments: dict[str, str]
) -> None:
    bench.build("FROM base\nARG V=1\nCOPY f /f\nRUN a", {"f": "1"})
    assert bench.build(text, files, arguments=arguments).num_run == 1


def test_fresh_runs_again_and_a_lost_layer_too(bench: Bench) -> None:
    bench.changes["a"] = {"x": b"1"}
    first = bench.build("FROM base\nRUN a")
    assert bench.build("FROM base\nRUN a", fresh=True).num_run == 1
    bench.store.layers.remove(first.image.layers[1])
    assert bench.build("FROM base\nRUN a").num_run == 1


def test_equal_steps_at_once_are_made_once(bench: Bench) -> None:
    bench.changes["a"] = {"x": b"1"}
    write_tree(bench.context, {"Dockerfile": "FROM base\nRUN a"})

    async def both() -> list[Build]:
        return await asyncio.gather(
            *(bench.builder.build(bench.context, f"n{number}") for number in range(5))
        )

    builds = asyncio.run(both())
    assert len(bench.runner.calls) == 1
    assert len({build.image.digest for build in builds}) == 1


def test_a_failing_command_names_its_line_and_output(bench: Bench) -> None:
    bench.changes["make"] = RunResult(2, "x" * 10_000 + "undefined symbol", None)
    with pytest.raises(TemplateError) as caught:
        bench.build("FROM base\n\nRUN make")
    text = str(caught.value)
    assert "Dockerfile, line 3: RUN" in text
    assert "exit code 2" in text
    assert "undefined symbol" in text
    assert len(text) < 4000
    assert bench.store.list() == ["base"]
    # A failure is not remembered.
    bench.changes["make"] = {"x": b"1"}
    assert bench.build("FROM base\n\nRUN make").num_run == 1


def test_a_command_out_of_time_says_so_and_its_changes_go(bench: Bench) -> None:
    tar = bench.tars / "partial.tar"
    tar.write_bytes(b"partial")
    bench.changes["slow"] = RunResult(-9, "", tar, timed_out=True)
    with pytest.raises(TemplateError, match="longer than 5 s"):
        bench.build("FROM base\nRUN slow")
    assert not tar.exists()


def test_a_torn_layer_of_the_runner_is_an_error_and_is_deleted(bench: Bench) -> None:
    tar = bench.tars / "torn.tar"
    tar.write_bytes(b"torn")
    bench.changes["a"] = RunResult(0, "", tar)
    with pytest.raises(TemplateError):
        bench.build("FROM base\nRUN a")
    assert not tar.exists()


def test_an_error_of_the_sandbox_is_no_template_error(bench: Bench) -> None:
    bench.changes["a"] = SandboxError("died")
    with pytest.raises(SandboxError, match="died"):
        bench.build("FROM base\nRUN a")


def test_a_runner_that_hangs_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeLayerRunner):
        async def run(self, *arguments: object, **options: object) -> RunResult:  # type: ignore[override]
            await asyncio.sleep(60)
            raise AssertionError

    monkeypatch.setattr("etude.sandbox.images.builder.RUN_GRACE_S", 0.0)
    bench.builder = Builder(bench.store, Hanging(), run_timeout_s=0.05)
    with pytest.raises(SandboxError, match="does not answer"):
        bench.build("FROM base\nRUN a")


def test_shells_and_the_json_form(bench: Bench) -> None:
    bench.build('FROM base\nRUN ["a", "$BASE"]\nSHELL ["/bin/bash", "-ec"]\nRUN x "$Y"')
    assert [call.argv for call in bench.runner.calls] == [("a", "$BASE"), ("/bin/bash", "-ec", 'x "$Y"')]


COPIES = [
    ("COPY a /x", ["x"]),
    ("COPY a /x/", ["x", "x/a"]),
    ("COPY a /etc", ["etc/a"]),
    ("COPY a .", ["a"]),
    ("COPY d /x", ["x", "x/e", "x/e/g", "x/f"]),
    ("COPY d/ /x/", ["x", "x/e", "x/e/g", "x/f"]),
    ("COPY a d/f /x/", ["x", "x/a", "x/f"]),
    ("COPY d/* /x/", ["x", "x/f", "x/g"]),
    ("COPY ? /x/", ["x", "x/a", "x/e", "x/e/g", "x/f", "x/l"]),
    ("COPY a /bin/tool", ["usr/bin/tool"]),
    ("COPY root/ /", ["usr/bin/r"]),
    ("COPY ['a', '/y z']".replace("'", '"'), ["y z"]),
    ("WORKDIR /w\nCOPY a b/", ["w", "w/b", "w/b/a"]),
    ("ENV T=/x\nCOPY a $T", ["x"]),
    ("ADD a /x", ["x"]),
    ("COPY l /x", ["x"]),
    ("COPY . /x/", ["x", *(f"x/{name}" for name in (
        "Dockerfile", "a", "d", "d/e", "d/e/g", "d/f", "l", "root", "root/bin", "root/bin/r"))]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("body", "new"), COPIES)
def test_copy_goes_where_docker_puts_it(bench: Bench, body: str, new: list[str]) -> None:
    (bench.context / "l").symlink_to("a")
    files = {"a": "A", "d/f": "F", "d/e/g": "G", "root/bin/r": "R"}
    build = bench.build(f"FROM base\n{body}", files)
    before = {"bin", "etc", "etc/name", "tmp", "usr", "usr/bin", "workspace"}
    assert sorted(set(bench.names(build)) - before) == sorted(new)


def test_copied_files_keep_modes_and_lose_times_and_owners(bench: Bench) -> None:
    write_tree(bench.context, {"tool": "#!"})
    (bench.context / "tool").chmod(0o4755)
    build = bench.build("FROM base\nCOPY tool /a\nCOPY --chmod=600 --chown=me tool /b")
    view = bench.store.view(build.image)
    found = {name: view.find(f"/{name}") for name in "ab"}
    modes = {name: one.status.st_mode & 0o7777 for name, one in found.items() if one is not None}
    assert modes == {"a": 0o755, "b": 0o600}
    assert {one.status.st_mtime for one in found.values() if one is not None} == {946684800.0}
    assert any("--chown is ignored" in note for note in build.notes)


def test_directories_of_the_image_keep_their_modes(bench: Bench) -> None:
    build = bench.build("FROM base\nCOPY a /tmp/a", {"a": "1"})
    found = bench.store.view(build.image).find("/tmp")
    assert found is not None
    assert found.status.st_mode & 0o7777 == 0o1777


def test_links_are_copied_as_links_and_never_followed_out(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (bench.context / "d").mkdir()
    (bench.context / "d/out").symlink_to(tmp_path / "secret")
    build = bench.build("FROM base\nCOPY d /d")
    found = bench.store.view(build.image).find("/d/out", follow=False)
    assert found is not None
    assert Path(found.path.decode()).is_symlink()
    with pytest.raises(TemplateError, match=r"line 2: COPY.*leads out"):
        bench.build("FROM base\nCOPY d/out /x")


def test_dockerignore_is_honoured(bench: Bench) -> None:
    files = {
        ".dockerignore": "**/*.log\nd\n!d/keep",
        "a.log": "",
        "b": "",
        "d/x": "",
        "d/keep": "",
        "e/c.log": "",
    }
    build = bench.build("FROM base\nCOPY . /x/", files)
    found = sorted(name for name in bench.names(build) if name.startswith("x/"))
    assert found == ["x/.dockerignore", "x/Dockerfile", "x/b", "x/d", "x/d/keep", "x/e"]
    with pytest.raises(TemplateError, match="no such file in the build context"):
        bench.build("FROM base\nCOPY a.log /x")


def test_stages_are_built_when_needed_and_copied_from(bench: Bench) -> None:
    bench.changes["make"] = {"out/bin/app": b"app"}
    build = bench.build(
        "FROM base AS build\nRUN make\nFROM base AS unused\nRUN never\n"
        "FROM base\nCOPY --from=build /out/bin /bin/\nCOPY --from=0 /out/bin/* /two/\n"
        "COPY --from=base /etc/name /n"
    )
    assert [call.argv[-1] for call in bench.runner.calls] == ["make"]
    assert bench.read(build, "/usr/bin/app") == b"app"
    assert bench.read(build, "/two/app") == b"app"
    assert bench.read(build, "/n") == b"base"


def test_a_target_stage_may_be_named(bench: Bench) -> None:
    text = "FROM base AS one\nENV A=1\nFROM one AS two\nENV B=2"
    assert bench.build(text, target="one").image.env == {"BASE": "1", "A": "1"}
    assert bench.build(text).image.env == {"BASE": "1", "A": "1", "B": "2"}
    with pytest.raises(TemplateError, match="one, two"):
        bench.build(text, target="three")


def test_arguments_follow_dockers_rules(bench: Bench) -> None:
    text = "ARG TAG=base\nARG LATER\nFROM $TAG\nARG A=1\nARG TAG\nARG TARGETARCH\n"
    text += "ENV A2=$A T=$TAG L=$LATER M=$TARGETARCH"
    env = bench.build(text, arguments={"A": "given"}).image.env
    assert env == {"BASE": "1", "A2": "given", "T": "base", "L": "", "M": architecture()}
    with pytest.raises(TemplateError, match="no ARG"):
        bench.build(text, arguments={"B": "x"})


def test_without_a_workdir_the_workspace_is_not_the_root(bench: Bench) -> None:
    build = bench.build("FROM base\nRUN a")
    assert bench.runner.calls[0].cwd == "/"
    assert build.image.workdir == "/workspace"
    assert "workspace" in bench.names(build)


def test_scratch_has_no_files(bench: Bench) -> None:
    build = bench.build("FROM scratch\nCOPY a /a", {"a": "1"})
    assert bench.names(build) == ["a", "workspace"]


REFUSED = {
    "FROM nowhere": ("line 1: FROM", "known: base"),
    "FROM base@sha256:0": ("line 1: FROM", "no such base"),
    "FROM --platform=linux/vax base": ("line 1: FROM", "platform"),
    "FROM base\nCOPY absent /x": ("line 2: COPY", "no such file"),
    "FROM base\nCOPY *.none /x": ("line 2: COPY", "no such file"),
    "FROM base\nCOPY ../x /x": ("line 2: COPY", "leads out"),
    "FROM base\nCOPY f": ("line 2: COPY", "source and a target"),
    "FROM base\nCOPY f f /x": ("line 2: COPY", "ends with /"),
    "FROM base\nCOPY f /etc/name/x": ("line 2: COPY", "file is where"),
    "FROM base\nCOPY d /etc/name": ("line 2: COPY", "file is where"),
    "FROM base\nCOPY --from=later f /x": ("line 2: COPY", "no such base"),
    "FROM base\nCOPY --from=base /absent /x": ("line 2: COPY", "no such file"),
    "FROM base\nCOPY --chmod=u+x f /x": ("line 2: COPY", "octal"),
    "FROM base\nADD https://example.org/x /x": ("line 2: ADD", "URL"),
    "FROM base\nADD packed.tar /x": ("line 2: ADD", "unpack"),
    "FROM base\nENV =x": ("line 2: ENV", "no name"),
    "FROM base\nENV ONE": ("line 2: ENV", "value"),
    "FROM base\nENV A=1 B": ("line 2: ENV", "NAME=value"),
    "FROM base\nARG 1=2": ("line 2: ARG", "no name"),
    "FROM base\nUSER a b": ("line 2: USER", "no user"),
    "FROM base\nWORKDIR /etc/name": ("line 2: WORKDIR", "file is where"),
    "FROM base\nCOPY fifo /x": ("line 2: COPY", "pipe"),
    "FROM base\nCOPY .wh.x /d/": ("line 2: COPY", "stands for a deleted file"),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_mistakes_are_refused_with_their_line(bench: Bench, text: str) -> None:
    write_tree(bench.context, {"f": "1", "d/f": "1", ".wh.x": "", "packed.tar": bytes(257) + b"ustar"})
    (bench.context / "fifo").unlink(missing_ok=True)
    os.mkfifo(bench.context / "fifo")
    with pytest.raises(TemplateError) as caught:
        bench.build(text)
    for part in REFUSED[text]:
        assert part in str(caught.value)
    assert bench.store.list() == ["base"]
    assert leftovers(bench.store.layers) == []


def test_doubling_variables_are_stopped(bench: Bench) -> None:
    lines = "\n".join(f"ENV A{number + 1}=$A{number}$A{number}" for number in range(40))
    with pytest.raises(TemplateError, match="too much text"):
        bench.build(f"FROM base\nENV A0=0123456789\n{lines}")


def test_a_missing_or_binary_dockerfile_is_a_typed_error(bench: Bench) -> None:
    with pytest.raises(TemplateError, match="cannot be read"):
        asyncio.run(bench.builder.build(bench.context, "x"))
    write_tree(bench.context, {"Dockerfile": b"FROM \xff"})
    with pytest.raises(TemplateError, match="UTF-8"):
        asyncio.run(bench.builder.build(bench.context, "x"))


def test_steps_are_announced(bench: Bench) -> None:
    said: list[str] = []
    bench.builder.on_step = said.append
    bench.build("FROM base\nENV A=1\nRUN x")
    assert said == ["2: ENV A=1", "3: RUN x"]


def test_a_cancelled_build_leaves_nothing(bench: Bench) -> None:
    started = asyncio.Event()

    class Waiting(FakeLayerRunner):
        async def run(self, *arguments: object, **options: object) -> RunResult:  # type: ignore[override]
            started.set()
            await asyncio.sleep(60)
            raise AssertionError

    bench.builder = Builder(bench.store, Waiting())
    write_tree(bench.context, {"Dockerfile": "FROM base\nRUN a"})

    async def cancelled() -> None:
        task = asyncio.create_task(bench.builder.build(bench.context, "x"))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert bench.store.list() == ["base"]
    assert leftovers(bench.store.layers) == []


def test_a_layer_holds_only_what_was_copied_and_the_way_to_it(bench: Bench) -> None:
    build = bench.build("FROM base\nWORKDIR /a/b\nCOPY f .", {"f": "1"})
    roots = [tree(path) for path in bench.store.paths(build.image)]
    assert roots[1:] == [{"a": "dir", "a/b": "dir"}, {"a": "dir", "a/b": "dir", "a/b/f": "1"}]


def test_a_run_that_is_given_up_while_its_changes_are_packed_leaves_no_archive(tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Packing:
        """A backend whose sandboxes are packed when they are told to be."""

        async def create(self, *given: object) -> Packing:
            return self

        async def connect(self, sandbox_id: str) -> Packing:
            return self

        async def save_root(self, sandbox: object, target: Path) -> None:
            await asyncio.to_thread(target.write_bytes, b"half a layer")
            begun.set()
            await go_on.wait()

        async def job(self, header: object) -> tuple[dict[str, Any], bytes]:
            return {"timed_out": False, "exit_code": 0}, b""

        async def kill(self) -> None:
            pass

        id = "one"
        environment: Mapping[str, str] = {}

    async def scenario() -> None:
        runner = SandboxRunner(cast("Any", Packing()), scratch=tmp_path)
        running = asyncio.ensure_future(runner.run(Image("i", ()), ["true"], {}, "/", "root", 60.0))
        await begun.wait()
        running.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []
