"""Images from Dockerfiles: buildah's command lines and results, and builds by a real buildah."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.errors import ResourceError
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import BaseFile, find_base, full_name
from etude.sandbox.images.buildah import find_ids
from etude.sandbox.images.building import (
    BUILDAH,
    bud_arguments,
    build_image,
    explain_failure,
    find_missing,
    open_proxy,
    show_line,
)
from etude.sandbox.images.built import BuildInputs, BuildOptions, LastCopy, record_build
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image
from etude.sandbox.types import Network
from tests.sandbox.images.image_builders import (
    Layout,
    file_member,
    is_running,
    layers_of,
    read_image,
    tar_bytes,
    write_tree,
)
from tests.sandbox.images.test_bases import fake_tool
from tests.sandbox.network.builders import exchange

BASE = "example.org/tiny:1"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def test_everything_that_a_build_is_given_is_an_argument_and_part_of_no_shell() -> None:
    words = bud_arguments(
        "/tmp/c",
        "sub/File",
        "/tmp/id",
        {"/etc/pip.conf": "/tmp/v"},
        {"B": "x y; z", "A": "1"},
        ["--no-cache"],
    )
    assert words[0] == "bud"
    assert words[-1] == "/tmp/c"
    assert {"--isolation=chroot", "--pull-never", "--no-cache", "--iidfile=/tmp/id"} < set(words)
    assert "--file=/tmp/c/sub/File" in words
    assert [word for word in words if word.startswith("--build-arg")] == [
        "--build-arg=A=1",
        "--build-arg=B=x y; z",
    ]
    assert "--volume=/tmp/v:/etc/pip.conf:ro" in words


@pytest.mark.parametrize(
    ("starts", "output", "missing"),
    [
        ([], "Error: creating build container: a/b:1: image not known\n", {"a/b:1"}),
        ([], "Error: COPY --from=other:2: no stage or image found with that name\n", {"other:2"}),
        (["STEP 1/2: FROM known:1"], "Error: x", set[str]()),
        (["[1/2] STEP 1/3: FROM known:1 AS Build", "[2/2] STEP 1/2: FROM build"], "", set[str]()),
        (["STEP 1/2: FROM scratch"], "", set[str]()),
        (["STEP 1/2: FROM nown:1"], "", {"nown:1"}),
    ],
)
def test_the_bases_that_buildah_lacks_are_read_from_what_it_says(
    starts: list[str], output: str, missing: set[str]
) -> None:
    assert find_missing(starts, output, {"known:1"}) == missing


def test_a_base_that_is_still_to_be_made_is_shown_as_no_error() -> None:
    shown = show_line("Error: creating build container: python:3.11-slim: image not known")
    assert "getting python:3.11-slim" in shown and "rror" not in shown
    assert show_line("STEP 1/2: FROM a") == "STEP 1/2: FROM a"


def test_a_failure_shows_the_instruction_and_the_end_of_its_output() -> None:
    output = (
        "x" * 9000 + "\nno such thing\nCopying blob sha256:1\n"
        'Error: building at STEP "RUN make all": while running runtime: exit status 3'
    )
    error = explain_failure("Dockerfile", output, 3)
    assert error.received == "RUN make all"
    assert "--allow HOST" in (error.fix or "") and "images.allow" in (error.fix or "")
    assert "no such thing\nError" in error.message
    assert len(error.message) < 2200


def test_a_build_that_fails_says_what_its_network_refused(tmp_path: Path) -> None:
    options = BuildOptions(network=Network(("here.example",)))
    with pytest.raises(TemplateError) as failed, open_proxy(options, tmp_path, "x") as proxy:
        assert proxy is not None
        asyncio.run(exchange(proxy, b"GET http://here.example/ HTTP/1.1\r\nHost: here.example\r\n\r\n"))
        raise explain_failure("Dockerfile", "E: failed", 100)
    assert "here.example:80 (no_rule)" in (failed.value.fix or "")
    options = BuildOptions(network=Network(("10.1.2.3",)))
    with pytest.raises(TemplateError) as failed, open_proxy(options, tmp_path, "x") as proxy:
        assert proxy is not None
        asyncio.run(exchange(proxy, b"CONNECT 10.1.2.3:443 HTTP/1.1\r\nHost: 10.1.2.3\r\n\r\n"))
        raise explain_failure("Dockerfile", "E: failed", 100)
    assert "10.1.2.3:443 (address_private 10.1.2.3)" in (failed.value.fix or "")


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("python:3.11", "docker.io/library/python:3.11"),
        ("me/tool", "docker.io/me/tool"),
        ("localhost/tool", "localhost/tool"),
        ("registry.example.org/a/b:1", "registry.example.org/a/b:1"),
        ("host:5000/a", "host:5000/a"),
    ],
)
def test_a_name_stands_for_the_image_that_docker_takes_it_for(name: str, full: str) -> None:
    assert full_name(name) == full


def test_a_base_may_lie_in_a_file(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    write_tree(layout, {"index.json": "{}"})
    assert BaseFile.find(f"oci:{layout}") == BaseFile("oci", layout, "")
    assert BaseFile.find(f"oci:{layout}:1.2") == BaseFile("oci", layout, "1.2")
    assert BaseFile.find("debian:12") is None
    assert BaseFile.find(None) is None
    for wrong in (f"oci:{tmp_path / 'none'}", f"oci-archive:{layout}", f"oci:{layout / 'index.json'}"):
        with pytest.raises(TemplateError, match="no such image") as caught:
            BaseFile.find(wrong)
        assert caught.value.received == wrong


def test_what_from_names_is_looked_for_in_the_map_and_then_in_the_store(
    store: ImageStore, tmp_path: Path
) -> None:
    layout = Layout()
    layout.index(layout.image(tar_bytes(file_member("name", b"mapped")))).write(tmp_path / "layout")
    mapped = asyncio.run(find_base("a:1", store, {"a:1": f"oci:{tmp_path / 'layout'}"}))
    assert read_image(store, mapped, "name") == b"mapped"
    assert asyncio.run(find_base("docker.io/library/a:1", store)) == mapped
    assert asyncio.run(find_base("b:2", store, {"b:2": "a:1"})) == mapped
    with pytest.raises(TemplateError, match=r"no such base image.*'c:3'.*a:1.*debian:12"):
        asyncio.run(find_base("c:3", store))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dockerfile": "none"}, "no such Dockerfile"),
        ({"name": "a b"}, "is not a valid image name"),
        ({"options": BuildOptions(volumes={"relative": Path("/etc/passwd")})}, "relative path inside"),
        ({"options": BuildOptions(volumes={"/x": Path("/nowhere")})}, "no such file"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_runs(
    store: ImageStore, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    context = write_tree(tmp_path / "c", {"Dockerfile": "FROM scratch\n"})
    with pytest.raises(TemplateError, match=message):
        asyncio.run(build_image(context, store=store, **{"name": "x", **options}))
    assert not (store.layers.root / BUILDAH).exists()


def test_a_machine_without_buildah_says_what_to_install(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    context = write_tree(tmp_path / "c", {"Dockerfile": "FROM scratch\n"})
    with pytest.raises(ResourceError, match="apt-get install buildah"):
        asyncio.run(build_image(context, "x", store))


@pytest.mark.parametrize(
    ("dockerfile", "is_split"),
    [
        ("FROM a\nRUN b\nWORKDIR /w\nCOPY w/ /w/\n", True),
        ("FROM a AS b\nFROM a\nCOPY --from=b /x /y\nCOPY w/ /w", True),
        ("FROM a\nCOPY w/ /w/\nRUN b\n", False),
        ("FROM a\nCOPY x /x\nCOPY w/ /w/\n", False),
        ("FROM a\nADD x /x\nCOPY w/ /w/\n", False),
        ("FROM a\nRUN --mount=type=bind,target=/x b\nCOPY w/ /w/\n", False),
        ("FROM a\nRUN b \\\nCOPY w/ /w/\n", False),
        ("FROM a\nRUN <<END\nCOPY w/ /w/\n", False),
        ("# escape=`\nFROM a\nCOPY w/ /w/\n", False),
        ("FROM a\nCOPY --chown=1 w/ /w/\n", False),
        ("FROM a\nCOPY w/ /w/deeper/\n", False),
        ("FROM a\nCOPY w/* /w/\n", False),
        ("FROM a\nCOPY none/ /w/\n", False),
        ("FROM a\nCOPY ../ /w/\n", False),
        ("FROM a\nCOPY ./ /w/\n", False),
        ("FROM a\nCOPY w/ /..\n", False),
        ("FROM a\nCOPY linked/ /w/\n", False),
        ("FROM a\nCOPY odd/ /w/\n", False),
    ],
)
def test_only_a_last_copy_of_a_plain_directory_is_done_without_buildah(
    tmp_path: Path, dockerfile: str, is_split: bool
) -> None:
    write_tree(tmp_path, {"Dockerfile": dockerfile, "w/file": "", "odd/.wh.file": ""})
    (tmp_path / "linked").symlink_to("w")
    found = LastCopy.find(tmp_path, "Dockerfile")
    assert (found is not None) == is_split
    if found is not None:
        assert found.beginning + dockerfile.rstrip().rpartition("\n")[2] == dockerfile.rstrip()
    (tmp_path / ".dockerignore").touch()
    assert LastCopy.find(tmp_path, "Dockerfile") is None


def test_an_image_is_built_again_for_whatever_it_is_made_of(store: ImageStore, tmp_path: Path) -> None:
    context = write_tree(tmp_path / "c", {"Dockerfile": "FROM a:1\nCOPY file /\n", "file": "1"})

    def key(**changes: Any) -> str | None:
        build = BuildInputs(context, "Dockerfile", {}, None, BuildOptions())
        return replace(build, **changes).find_key(store)

    def base(data: bytes) -> None:
        store.save(Image("a:1", (store.layers.add_tar(io.BytesIO(tar_bytes(file_member("f", data)))),)))

    keys = [key()]
    base(b"1")
    keys += [
        key(),
        key(args={"A": "1"}),
        key(target="t"),
        key(options=BuildOptions(network=Network(("h:1",)))),
    ]
    base(b"2")
    keys.append(key())
    (context / "file").chmod(0o700)
    keys.append(key())
    (context / "file").write_text("2")
    keys.append(key())
    (context / "file").rename(context / "other")
    keys.append(key())
    assert len({*keys}) == len(keys)
    assert None not in keys
    write_tree(context, {"Dockerfile": "ARG V\nFROM a:$V\n"})
    assert key() is None


def test_what_was_built_is_found_without_buildah(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    context = write_tree(tmp_path / "c", {"Dockerfile": "FROM scratch\n"})
    layer = store.layers.add_tar(io.BytesIO(tar_bytes(file_member("f", b""))))
    key = BuildInputs(context, "Dockerfile", {}, None, BuildOptions()).find_key(store)
    assert key is not None
    record_build(store, key, Image("then", (layer,), {"A": "b"}, "/w", "me"))
    assert asyncio.run(build_image(context, "x", store)) == Image("x", (layer,), {"A": "b"}, "/w", "me")
    assert store.load("x").layers == (layer,)
    with pytest.raises(ResourceError, match="apt-get install buildah"):
        asyncio.run(build_image(context, "x", store, options=BuildOptions(fresh=True)))


# By a real buildah


def tiny() -> bytes:
    """A layer with this machine's shell and a few programs, and the libraries that they need."""
    programs = ("sh", "ls", "cat", "id", "sleep", "setsid", "touch", "perl")
    found = [Path(path) for name in programs if (path := shutil.which(name))]
    listed = subprocess.run(["ldd", *map(str, found)], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    rows = [file_member(f"bin/{path.name}", path.read_bytes(), 0o755) for path in found]
    rows += [file_member(name.lstrip("/"), Path(name).read_bytes(), 0o755) for name in sorted(libraries)]
    rows.append(file_member("etc/passwd", b"root:x:0:0::/:/bin/sh\nme:x:1000:1000::/:/bin/sh\n"))
    return tar_bytes(*rows)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    try:
        find_ids()
    except ResourceError as error:
        pytest.skip(str(error))
    made = Layout()
    return made.index(made.image(tiny(), config={"Env": ["PATH=/bin", "A=b"]})).write(
        tmp_path_factory.mktemp("tiny")
    )


class Builds:
    """Builds of one context into one store."""

    def __init__(self, folder: Path, layout: Path) -> None:
        self.context = folder / "context"
        self.store = ImageStore(folder / "store")
        self.bases = {BASE: f"oci:{layout}"}
        self.lines: list[str] = []

    def build(self, dockerfile: str, options: dict[str, Any] | None = None, **more: Any) -> Image:
        """Raises whatever `build_image` does."""
        write_tree(self.context, {"Dockerfile": dockerfile, "hello": "hi\n"})
        chosen = BuildOptions(**{"bases": self.bases, "deadline_s": 300.0, **(options or {})})
        build = build_image(
            self.context, "built", self.store, options=chosen, on_line=self.lines.append, **more
        )
        return asyncio.run(build)

    def read(self, image: Image, path: str) -> str:
        data = read_image(self.store, image, path)
        assert data is not None, path
        return data.decode()


@pytest.fixture
def builds(tmp_path: Path, layout: Path) -> Builds:
    return Builds(tmp_path, layout)


STAGES = f"""ARG VERSION=1
FROM example.org/tiny:$VERSION AS first
ARG COLOUR=red
RUN echo $COLOUR >/colour
RUN cat /proc/self/uid_map /settings/one >/seen; ls -d /proc/[0-9]* >/processes; id -u >/user
RUN cat /proc/net/dev >/network; setsid sleep 1017 & true
FROM {BASE}
ENV B=$A-c
COPY --from=first /colour /seen /processes /network /user /kept/
COPY hello /kept/
WORKDIR /work
USER me
RUN id -u >/tmp/own 2>/dev/null || true
"""


@pytest.mark.slow
@pytest.mark.foreign
def test_a_dockerfile_with_stages_is_built_apart_from_the_host_and_once(
    builds: Builds, tmp_path: Path
) -> None:
    settings = write_tree(tmp_path / "settings", {"one": "from the host\n"})
    (settings / "one").chmod(0o600)
    options = {"volumes": {"/settings": settings}}
    image = builds.build(STAGES, options, args={"COLOUR": "green"})
    assert (image.env["B"], image.workdir, image.user) == ("b-c", "/work", "me")
    assert builds.read(image, "/kept/colour") == "green\n"
    assert builds.read(image, "/kept/hello") == "hi\n"
    ids, shown = builds.read(image, "/kept/seen").splitlines()
    assert shown == "from the host"
    first_outside = int(ids.split()[1])
    assert first_outside != 0
    assert builds.read(image, "/kept/user") == "0\n"
    assert re.findall(r"(\S+):", builds.read(image, "/kept/network")) == ["lo"]
    assert len(builds.read(image, "/kept/processes").split()) < 20
    assert b"from the host" not in b"".join(
        file.read_bytes()
        for layer in map(builds.store.layers.path, image.layers)
        for file in layer.rglob("*")
        if file.is_file() and file.parent.name == "settings"
    )
    assert not is_running("sleep", "1017")
    assert str(builds.store.layers.root) not in Path("/proc/self/mountinfo").read_text()

    builds.lines.clear()
    assert builds.build(STAGES, options, args={"COLOUR": "green"}) == image
    assert any("Using cache" in line for line in builds.lines)


@pytest.mark.slow
@pytest.mark.foreign
def test_a_last_copy_of_a_directory_gives_the_files_that_buildah_gives_without_asking_it_again(
    builds: Builds,
) -> None:
    beginning = f"FROM {BASE}\nWORKDIR /work\nRUN echo old >a; echo kept >kept; echo >c\n"
    write_tree(builds.context, {"w/a": "new\n", "w/.b/run": "#!/bin/sh\n", "w/d/e": ""})
    (builds.context / "w/.b/run").chmod(0o755)
    (builds.context / "w/link").symlink_to("/nowhere")
    whole = builds.build(f"{beginning}COPY ./w/ /work/\n")
    split = builds.build(f"{beginning}COPY w/ /work/\n")
    assert (split.env, split.workdir, split.user) == (whole.env, whole.workdir, whole.user)
    assert describe_files(builds.store, split, "work") == describe_files(builds.store, whole, "work")
    builds.lines.clear()
    write_tree(builds.context, {"w/a": "newer\n"})
    assert builds.read(builds.build(f"{beginning}COPY w/ /work/\n"), "/work/a") == "newer\n"
    assert builds.lines == []


def describe_files(store: ImageStore, image: Image, folder: str) -> dict[str, tuple[int, str]]:
    """Path -> mode and content of what lies in a directory of an image."""
    found: dict[str, tuple[int, str]] = {}
    for digest in image.layers:
        root = store.layers.path(digest)
        for path in [root / folder, *(root / folder).rglob("*")]:
            mode = path.lstat().st_mode if path.is_symlink() or path.exists() else 0
            text = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else ""
            found |= {path.relative_to(root).as_posix(): (mode, text)} if mode else {}
    return found


@pytest.mark.slow
@pytest.mark.foreign
def test_what_does_not_build_says_why_and_leaves_the_next_build_as_it_was(
    builds: Builds, tmp_path: Path
) -> None:
    with pytest.raises(TemplateError, match=r"(?s)not today.*exit status 3") as caught:
        builds.build(f"FROM {BASE}\nRUN echo not today >&2; exit 3\n")
    assert caught.value.received == "RUN echo not today >&2; exit 3"
    with pytest.raises(TemplateError, match="exit status 121"):
        builds.build(f"FROM {BASE}\nRUN exit 121\n")
    with pytest.raises(TemplateError, match=r"no such base image.*'nowhere:7'"):
        builds.build("FROM nowhere:7\n")
    # The end of a known name is none: buildah itself would take it for the whole.
    with pytest.raises(TemplateError, match=r"no such base image.*'tiny:1'"):
        builds.build("FROM tiny:1\nRUN true\n")
    with pytest.raises(TemplateError, match="FETCH"):
        builds.build(f"FROM {BASE}\nFETCH x\n")
    foreign = Layout()
    foreign.index(foreign.image(tiny(), architecture="s390x")).write(tmp_path / "foreign")
    with pytest.raises(TemplateError, match="is for s390x, and this machine is"):
        builds.build("FROM other:1\n", {"bases": {"other:1": f"oci:{tmp_path / 'foreign'}"}})
    assert builds.build(f"FROM {BASE}\nCOPY hello /x\n").layers


LEAVE = """RUN perl -e 'mkdir "x"; chroot "x" or exit 7; chdir ".." for 1..64; chroot "." or exit 8; \\
  rename "/tmp/work", "/tmp/w" or exit 9; symlink "{victim}", "/tmp/work" or exit 10;'
"""


LOOK = """RUN cat /proc/self/status >/status; ls -d /proc/[0-9]*/root/tmp/work >/ways 2>/dev/null; \\
  for one in /proc/self/fd/*; do if [ -d $one ]; then echo $one >>/ways; fi; done
"""


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.skipif(shutil.which("perl") is None, reason="perl is not installed")
def test_an_instruction_cannot_leave_its_root_and_lay_a_trap_for_the_next_build(
    builds: Builds, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    write_tree(victim, {"folder/file": "kept\n"})
    with pytest.raises(TemplateError, match="exit status 7"):
        builds.build(f"FROM {BASE}\n{LEAVE.format(victim=victim)}")
    image = builds.build(f"FROM {BASE}\n{LOOK}")
    (bounds,) = re.findall(r"CapBnd:\s*(\w+)", builds.read(image, "/status"))
    assert not int(bounds, 16) >> 18 & 1, "nor by a file that would give the right back"
    assert builds.read(image, "/ways") == ""
    assert (victim / "folder/file").read_text() == "kept\n"
    assert {path.stat().st_uid for path in (victim, victim / "folder")} == {os.geteuid()}


@pytest.mark.slow
@pytest.mark.foreign
def test_a_build_that_takes_too_long_is_ended_with_all_that_it_began(builds: Builds) -> None:
    builds.build(f"FROM {BASE}\nRUN true\n")
    began_s = time.monotonic()
    with pytest.raises(TemplateError, match="longer than 20 s"):
        builds.build(f"FROM {BASE}\nRUN setsid sleep 1018 & sleep 1019\n", {"deadline_s": 20.0})
    assert time.monotonic() - began_s < 60
    assert not is_running("sleep", "1018")
    assert not is_running("sleep", "1019")
    root = builds.store.layers.root / BUILDAH
    assert list((root / "work").iterdir()) == []
    builds.build(f"FROM {BASE}\nRUN touch /made\n")
    assert (root / "storage/overlay-containers/containers.json").read_text().strip() == "[]"


@pytest.mark.slow
@pytest.mark.foreign
def test_a_base_that_is_made_meanwhile_does_not_count(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ready.base").write_bytes(tiny())
    fake_tool(tmp_path, monkeypatch, f'sleep 21\ncp {tmp_path}/ready.base "$target"')
    image = builds.build("FROM debian:12\nRUN touch /made\n", {"deadline_s": 20.0})
    assert builds.read(image, "/made") == ""


@pytest.mark.slow
@pytest.mark.foreign
def test_a_base_that_changes_is_taken_anew(builds: Builds, tmp_path: Path) -> None:
    dockerfile = f"FROM {BASE}\nCOPY hello /x\n"
    assert "A" in builds.build(dockerfile).env
    changed = Layout()
    settings = {"Env": ["PATH=/bin", "C=d"]}
    history = [{"created": "2021-01-01T00:00:00Z", "created_by": "another test"}]
    changed.index(changed.image(tiny(), config=settings, history=history)).write(tmp_path / "changed")
    again = builds.build(dockerfile, {"bases": {BASE: f"oci:{tmp_path / 'changed'}"}})
    assert dict(again.env) == {"PATH": "/bin", "C": "d"}
    with pytest.raises(TemplateError, match="no such base image"):
        builds.build(dockerfile, {"bases": {}})


@pytest.mark.slow
@pytest.mark.foreign
def test_an_image_of_the_store_is_a_base_whose_layers_are_kept_once(builds: Builds) -> None:
    layer = builds.store.layers.add_tar(io.BytesIO(tiny()))
    builds.store.save(Image("mine:1", (layer,), {"PATH": "/bin"}, "/"))
    dockerfile = "FROM mine:1\nRUN echo 1 >/one\n"
    image = builds.build(dockerfile, {"bases": {}})
    assert image.layers[0] == layer
    assert len(layers_of(builds.store.layers)) == len(image.layers)
    builds.store.save(Image("mine:1", (layer,), {"PATH": "/bin", "E": "f"}, "/"))
    assert builds.build(dockerfile, {"bases": {}}).env["E"] == "f"
