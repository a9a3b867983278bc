"""Copies what an agent left outside of its working directory into the sandbox that grades it.

    agent's sandbox ── names, then contents ──> tar file ── filtered here ──> tar file ──> fresh sandbox

For a task with an image these are the changes in the rest of its root; if the verifier has a machine of its
own, the artifacts that the task declares. Nothing is written where the verifier's own files are, and no link
that leads there or to the root itself.

Programs, libraries and their settings, which test.sh would run or read, are copied only if `allowed_paths`
names them.
"""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from etude.environment.grading import folders_above, is_bytecode, matches_any
from etude.environment.origins import run_harness_command, task_template
from etude.errors import AgentError, TaskError
from etude.kit.tasks import off_loop
from etude.records import Artifact, Task
from etude.sandbox.errors import DiffTooLargeError, SandboxKilledByAgentError
from etude.sandbox.interface import Sandbox

ARTIFACT_BYTES = 64 << 20
"""Limit for all artifacts of a session together."""
ROOT_BYTES = 32 << 20
"""Limit for all changes outside of the working directory together; the same holds for those in it."""
_EVERYWHERE = "/**"
_GLOB = re.compile(r"[*?\[]")
_VERIFIERS = frozenset(("tests", "logs", "solution", "proc", "sys", "dev"))
"""Directories of the root to which no file of the agent's is copied, and to which no copied link may lead."""
PUBLISHED = "/logs/artifacts"
"""The exception: Harbor's directory for files that an agent publishes."""
_SYSTEM = frozenset(
    "bin boot etc lib lib32 lib64 libx32 nix opt run sbin snap usr var".split()  # noqa: SIM905
)
"""Directories of the root with programs, their settings and the package databases."""
_SCRATCH = frozenset(("tmp",))
_LIBRARIES = frozenset(("bin", "dist-packages", "node_modules", "sbin", "site-packages"))
_SETTINGS = frozenset(("pyvenv.cfg", "sitecustomize.py", "usercustomize.py"))
_KEYS = re.compile(r"authorized_keys|known_hosts|id_\w+(\.pub)?")
"""Files of `.ssh` that are not settings: settings can name programs to run."""
_NO_PREFIXES = frozenset(("", "/opt", "/root", "/srv"))
"""Directories that contain installations without being one."""
_MAKE_ROOM = """set --
last=none
while IFS= read -r row; do
    path="${row#?}"
    folder="${path%/*}"
    case "$row" in
    =*) [ -L "$path" ] || [ ! -d "$path" ] || rm -rf -- "$path" ;;
    +*) rm -rf -- "$path"/* "$path"/.[!.]* "$path"/..?* ;;
    -*)
        [ "$folder" = "$last" ] || real="$(cd "$folder/" 2> /dev/null && pwd -P)"
        last="$folder"
        [ "$real" != "${folder:-/}" ] || set -- "$@" "$path"
        [ $# -lt 500 ] || { rm -rf -- "$@"; set --; }
        ;;
    esac
done
[ $# -eq 0 ] || rm -rf -- "$@"
"""
# Rows: `-` paths to remove, `+` directories to empty, `=` paths at which a directory is removed.
_NO_PROGRAM = (126, 127)


@dataclass(frozen=True, slots=True)
class CarriedFiles:
    """Files that are copied from one sandbox into another."""

    archive: bytes = b""
    """Tar file with paths from `/`."""
    room: tuple[str, ...] = ()
    """Paths that are removed before it is unpacked: rows of `_MAKE_ROOM`."""
    digest: bytes = b""
    """Of the contents, without modification times."""


async def carry_root(task: Task, sandbox: Sandbox) -> CarriedFiles | None:
    """The agent's changes outside of its working directory, as far as the task allows; None if test.sh does
    not run in an image of the agent's.

    No process may run in the sandbox any more. Raises AgentError for too much data.
    """
    root = _root_of(task)
    if root is None:
        return None
    if not any(pattern.startswith("/") for pattern in task.allowed_paths):
        return CarriedFiles()
    workspace, programs, home = root
    named = [one for one in task.allowed_paths if one.startswith("/") and one != _EVERYWHERE]
    tops = {one.split("/")[1] for one in named}
    system = frozenset[str]() if any(map(_GLOB.search, tops)) else (_SYSTEM | _SCRATCH) - tops
    skip_tops = _VERIFIERS - {"logs"} | system
    is_wide = any(map(_reaches_settings, named))
    found = await sandbox.changed_root(
        sorted(skip_tops), () if is_wide else sorted(_LIBRARIES | _SETTINGS), skip_hidden=not is_wide
    )
    changed = {
        path: is_there
        for path, is_there in found.items()
        if _crosses(path, task.allowed_paths, programs, home) and not f"{workspace}/".startswith(f"{path}/")
    }
    asked = sorted(path for path, is_there in changed.items() if is_there)
    gone = tuple(f"-{path}" for path in _topmost(path for path, is_there in changed.items() if not is_there))
    if not changed:
        return CarriedFiles()
    archive = await sandbox.pack(asked, limit_bytes=ROOT_BYTES, below=False) if asked else b""
    names = set(asked)

    def is_asked(path: str, is_folder: bool) -> bool:
        # Files of the root itself, such as pytest.ini, are settings of whatever runs below it.
        return path in names and (is_folder or path.count("/") > 1 or path in task.allowed_paths)

    return await off_loop(
        len(archive), _filter_archive, archive, sandbox, is_asked, leads_to_no_verifier, gone
    )


async def find_ungraded(task: Task, sandbox: Sandbox) -> list[str]:
    """Paths outside of the working directory that changed and are not graded, without their parent
    directories; empty if there are too many, or if test.sh does not run in an image of the agent's."""
    root, found = _root_of(task), dict[str, bool]()
    if root is None:
        return []
    _, programs, home = root
    with contextlib.suppress(DiffTooLargeError):
        found = dict(await sandbox.changed_root(sorted(_VERIFIERS)))
    above = {folder for path in found for folder in folders_above(path)}
    return sorted(
        path for path in found.keys() - above if not _crosses(path, task.allowed_paths, programs, home)
    )


async def carry_artifacts(artifacts: Sequence[Artifact], sandbox: Sandbox) -> CarriedFiles:
    """The task's artifacts as the agent left them; the first of equal paths. Raises as `carry_root`."""
    parts: list[CarriedFiles] = []
    room_bytes = ARTIFACT_BYTES
    for artifact in artifacts:
        top = artifact.source
        archive = await sandbox.pack([top], artifact.exclude, limit_bytes=room_bytes)
        room_bytes -= len(archive)

        def is_below(path: str, is_folder: bool, top: str = top) -> bool:
            return f"{path}/".startswith(f"{top}/")

        def stays(path: str, target: str, top: str = top) -> bool:
            return path != top and stays_inside(path[len(top) + 1 :], target, top)

        parts.append(
            await off_loop(len(archive), _filter_archive, archive, sandbox, is_below, stays, (f"+{top}",))
        )
    return await off_loop(ARTIFACT_BYTES - room_bytes, _merge, parts)


def _root_of(task: Task) -> tuple[str, tuple[str, ...], str] | None:
    """(workspace, program paths in its variables, home) of test.sh; None if not in the agent's image."""
    script = task.verifier
    if script is None or script.machine is not None:
        return None
    template = task_template(task, script.user)
    if template.image is None:
        return None
    env = {**template.image.env, **script.env}
    programs = tuple(_installations(env, template.workspace))
    return template.workspace, programs, env.get("HOME", "/root").rstrip("/")


def _reaches_settings(pattern: str) -> bool:
    """Whether a pattern may match a hidden file, a library or a setting."""
    names = pattern.split("/")
    return any(_GLOB.search(name) or name.startswith(".") or name in _LIBRARIES | _SETTINGS for name in names)


def _topmost(paths: Iterable[str]) -> list[str]:
    """The paths that are not below another of them, sorted by directory."""
    known = set(paths)
    top = [path for path in known if known.isdisjoint(folders_above(path))]
    return sorted(top, key=lambda path: path.rpartition("/"))


def _installations(env: Mapping[str, str], workspace: str) -> Iterator[str]:
    """Files and directories in the values of `env`, such as those of programs and libraries, without HOME;
    for `PREFIX/bin` the whole prefix."""
    for name, value in env.items():
        words = value.split(":") if name != "HOME" else []
        for folder in (one.rstrip("/") for one in words if one.startswith("/") and one.strip("/")):
            prefix, _, last = folder.rpartition("/")
            is_plain = prefix in _NO_PREFIXES or re.fullmatch("/home/[^/]*", prefix) is not None
            is_around = f"{workspace}/".startswith(f"{prefix}/")
            if not f"{workspace}/".startswith(f"{folder}/"):
                yield folder if last not in ("bin", "sbin") or is_plain or is_around else prefix


def _crosses(path: str, patterns: Iterable[str], programs: Sequence[str], home: str) -> bool:
    """Whether a change at an absolute path is graded."""
    names = path.split("/")[1:]
    is_published = path.startswith(f"{PUBLISHED}/")
    if (names[0] in _VERIFIERS and not is_published) or "\n" in path or is_bytecode(path):
        return False
    if matches_any(path, (one for one in patterns if one.startswith("/") and one != _EVERYWHERE)):
        return True
    if path.startswith(keys := f"{home}/.ssh/"):
        is_setting = _KEYS.fullmatch(path.removeprefix(keys)) is None
    else:
        is_hidden = any(name.startswith(".") for name in names) and path != f"{home}/.ssh"
        is_setting = is_hidden or names[-1] in _SETTINGS
    return not (
        _EVERYWHERE not in patterns
        or is_setting
        or names[0] in _SYSTEM | _SCRATCH
        or not _LIBRARIES.isdisjoint(names)
        or any(_overlap(path, one) for one in programs)
        or f"{home}/".startswith(f"{path}/")
    )


def _overlap(path: str, program: str) -> bool:
    return f"{path}/".startswith(f"{program}/") or f"{program}/".startswith(f"{path}/")


def leads_to_no_verifier(path: str, target: str) -> bool:
    """Whether a link's target, judged by its text, is in the root and not one of the verifier's files."""
    found = _target_of(path, target)
    return bool(found) and found[0] not in _VERIFIERS


def stays_inside(path: str, target: str, here: str) -> bool:
    """Whether a link's target, judged by its text, is in the directory `here`, which contains `path`.

    Names with newlines would not be copied correctly and are refused.
    """
    if {"", ".", ".."} & set(path.split("/")) or "\n" in path + target:
        return False
    found, top = _target_of(f"{here}/{path}", target), here.strip("/").split("/")
    return found is not None and found[: len(top)] == top


def _target_of(path: str, target: str) -> list[str] | None:
    """The path components of a link's target from the root; None if its text does not determine it.

    `..` is accepted at the beginning only, where each component is a directory: after a link it would lead
    to another place.
    """
    steps = [step for step in target.split("/") if step not in ("", ".")]
    climbs = next((number for number, step in enumerate(steps) if step != ".."), len(steps))
    folders = [] if target.startswith("/") else path.strip("/").split("/")[:-1]
    if ".." in steps[climbs:] or climbs > len(folders) or "\0" in target:
        return None
    return folders[: len(folders) - climbs] + steps[climbs:]


def _filter_archive(
    archive: bytes,
    sandbox: Sandbox,
    is_asked: Callable[[str, bool], bool],
    may_link: Callable[[str, str], bool],
    room: tuple[str, ...],
) -> CarriedFiles:
    """Keeps the entries of an untrusted archive, from the agent's sandbox, that may be copied.

    Raises SandboxKilledByAgentError for an archive that none of our programs would write.
    """
    state, target = blake2b(digest_size=16), io.BytesIO()
    links: set[str] = set()
    laid: set[str] = set()
    no_folders: list[str] = []
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(archive or _EMPTY), mode="r:") as given,
            tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as taken,
        ):
            for row in given:
                path = f"/{row.name}"
                if (
                    {"", ".", ".."} & set(path.split("/")[1:])
                    or not is_asked(path, row.isdir())
                    or path in laid
                    or not links.isdisjoint(folders_above(path))
                ):
                    continue
                if row.issym() and may_link(path, row.linkname):
                    links.add(path)
                elif not (row.isreg() or row.isdir()):
                    continue
                laid.add(path)
                if not row.isdir() and "\n" not in path:
                    no_folders.append(f"={path}")
                data = given.extractfile(row) if row.isreg() else None
                content = b"" if data is None else data.read()
                kept = tarfile.TarInfo(row.name)
                kept.type, kept.mtime = row.type, row.mtime
                kept.mode = row.mode & (0o3777 if row.isdir() else 0o777)
                kept.linkname, kept.size = row.linkname if row.issym() else "", len(content)
                taken.addfile(kept, io.BytesIO(content))
                head = repr((row.name, row.type, kept.mode, kept.linkname, len(content)))
                state.update(head.encode(errors="surrogateescape") + content)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise SandboxKilledByAgentError(
            f"sandbox {sandbox.id} gave no tar file: {error}", field="sandbox", received=sandbox.id
        ) from error
    state.update("\0".join(room).encode(errors="surrogateescape"))
    return CarriedFiles(target.getvalue() if laid else b"", (*room, *no_folders), state.digest())


_EMPTY = bytes(1024)


def _merge(parts: Sequence[CarriedFiles]) -> CarriedFiles:
    """Merges several into one; of equal paths the first is kept."""
    target = io.BytesIO()
    seen: set[str] = set()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as taken:
        for part in parts:
            if not part.archive:
                continue
            with tarfile.open(fileobj=io.BytesIO(part.archive), mode="r:") as given:
                for row in given:
                    if row.name not in seen:
                        seen.add(row.name)
                        taken.addfile(row, given.extractfile(row) if row.isreg() else None)
    digest = blake2b(b"".join(part.digest for part in parts), digest_size=16).digest()
    room = tuple(row for part in parts if part.archive for row in part.room)
    return CarriedFiles(target.getvalue() if seen else b"", room, digest)


async def apply_carried(carried: CarriedFiles, fresh: Sandbox) -> None:
    """Unpacks the files in a sandbox in which no code of the agent's has run.

    Raises AgentError if they cannot be written there, TaskError for an image without the programs for it,
    SandboxError if it took too long.
    """
    steps: list[tuple[str, bytes]] = []
    if carried.room:
        rows = "".join(f"{row}\n" for row in carried.room)
        steps.append((_MAKE_ROOM, rows.encode(errors="surrogateescape")))
    if carried.archive:
        steps.append(("tar -x -o -p -f - -C /", carried.archive))
    for command, data in steps:
        result = await run_harness_command(fresh, "unpacking the agent's files", command, data)
        if result.exit_code in _NO_PROGRAM:
            raise TaskError(
                "the agent's files cannot be unpacked in its verifier's image",
                field="verifier.environment",
                received=result.stderr.strip()[-200:],
                fix="use an image with sh, tar and coreutils",
            )
        if result.exit_code != 0:
            raise AgentError(f"the agent's files cannot be unpacked: {result.stderr.strip()[-200:]}")
