"""What an agent left outside of its working directory, on its way into the sandbox that grades it.

    agent's sandbox ── names, then contents ──> tar file ── looked through here ──> tar file ──> fresh sandbox

Of a task with an image that is what changed in the rest of its root; of one whose verifier has a machine of
its own, the artifacts that the task declares. Nothing is laid where the verifier's own files are, and no link
that leads there or to the root itself.

Programs, libraries and their settings, which test.sh would run or read, cross only where `allowed_paths`
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
from etude.environment.origins import run_own, task_template
from etude.errors import AgentError, TaskError
from etude.kit.tasks import off_loop
from etude.records import Artifact, Task
from etude.sandbox.errors import DiffTooLargeError, SandboxKilledByAgentError
from etude.sandbox.interface import Sandbox

ARTIFACT_BYTES = 64 << 20
"""All artifacts of a session together."""
ROOT_BYTES = 32 << 20
"""All changes outside of the working directory together, as of those in it."""
_EVERYWHERE = "/**"
_GLOB = re.compile(r"[*?\[]")
_VERIFIERS = frozenset(("tests", "logs", "solution", "proc", "sys", "dev"))
"""Directories of the root where nothing of the agent's is laid, and to which none of its links leads."""
PUBLISHED = "/logs/artifacts"
"""What lies there is laid all the same: Harbor's place for what an agent publishes."""
_SYSTEM = frozenset(
    "bin boot etc lib lib32 lib64 libx32 nix opt run sbin snap usr var".split()  # noqa: SIM905
)
"""Directories of the root with programs, their settings and the records of what is installed."""
_SCRATCH = frozenset(("tmp",))
_LIBRARIES = frozenset(("bin", "dist-packages", "node_modules", "sbin", "site-packages"))
_SETTINGS = frozenset(("pyvenv.cfg", "sitecustomize.py", "usercustomize.py"))
_KEYS = re.compile(r"authorized_keys|known_hosts|id_\w+(\.pub)?")
"""What of `.ssh` is no setting: those can name programs."""
_NO_PREFIXES = frozenset(("", "/opt", "/root", "/srv"))
"""What stands above directories of programs without being an installation of its own."""
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
# Rows: `-` what is gone, `+` directories that are emptied, `=` what no directory may stand in the way of.
_NO_PROGRAM = (126, 127)


@dataclass(frozen=True, slots=True)
class Carried:
    """What crosses from one sandbox into another."""

    archive: bytes = b""
    """Tar file of what is laid, from `/`."""
    room: tuple[str, ...] = ()
    """What is removed before it is laid: see `_MAKE_ROOM`."""
    digest: bytes = b""
    """Names what crosses, but for the times of files."""


async def carry_root(task: Task, sandbox: Sandbox) -> Carried | None:
    """What the agent changed outside of its working directory, as far as the task allows; None where test.sh
    runs in no image of the agent's.

    Nothing may run in the sandbox any more. Raises AgentError for too much.
    """
    root = _root_of(task)
    if root is None:
        return None
    if not any(pattern.startswith("/") for pattern in task.allowed_paths):
        return Carried()
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
        return Carried()
    archive = await sandbox.pack(asked, limit_bytes=ROOT_BYTES, below=False) if asked else b""
    names = set(asked)

    def is_asked(path: str, is_folder: bool) -> bool:
        # Files of the root itself, such as pytest.ini, are settings of whatever runs below it.
        return path in names and (is_folder or path.count("/") > 1 or path in task.allowed_paths)

    return await off_loop(
        len(archive), _looked_through, archive, sandbox, is_asked, leads_to_no_verifier, gone
    )


async def left_behind(task: Task, sandbox: Sandbox) -> list[str]:
    """What changed outside of the working directory and does not reach grading, without the directories
    above it; nothing where it is too much, or where test.sh runs in no image of the agent's."""
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


async def carry_artifacts(artifacts: Sequence[Artifact], sandbox: Sandbox) -> Carried:
    """What the agent left at the places of its artifacts; first come, first laid. Raises as `carry_root`."""
    parts: list[Carried] = []
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
            await off_loop(len(archive), _looked_through, archive, sandbox, is_below, stays, (f"+{top}",))
        )
    return await off_loop(ARTIFACT_BYTES - room_bytes, _joined, parts)


def _root_of(task: Task) -> tuple[str, tuple[str, ...], str] | None:
    """Where test.sh runs in the agent's image: the working directory, what its variables name of programs,
    its home."""
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
    """Whether a pattern may name what is hidden, a library or a setting."""
    names = pattern.split("/")
    return any(_GLOB.search(name) or name.startswith(".") or name in _LIBRARIES | _SETTINGS for name in names)


def _topmost(paths: Iterable[str]) -> list[str]:
    """Those of which no directory is among them, sorted by their directories."""
    known = set(paths)
    top = [path for path in known if known.isdisjoint(folders_above(path))]
    return sorted(top, key=lambda path: path.rpartition("/"))


def _installations(env: Mapping[str, str], workspace: str) -> Iterator[str]:
    """Files and directories that `env` names, such as those of programs and libraries, but for HOME; of
    `PREFIX/bin` all of the prefix."""
    for name, value in env.items():
        words = value.split(":") if name != "HOME" else []
        for folder in (one.rstrip("/") for one in words if one.startswith("/") and one.strip("/")):
            prefix, _, last = folder.rpartition("/")
            is_plain = prefix in _NO_PREFIXES or re.fullmatch("/home/[^/]*", prefix) is not None
            is_around = f"{workspace}/".startswith(f"{prefix}/")
            if not f"{workspace}/".startswith(f"{folder}/"):
                yield folder if last not in ("bin", "sbin") or is_plain or is_around else prefix


def _crosses(path: str, patterns: Iterable[str], programs: Sequence[str], home: str) -> bool:
    """Whether a change of an absolute path reaches grading."""
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
    """Whether a link leads to something of the root that is not the verifier's, by its words alone."""
    found = _target_of(path, target)
    return bool(found) and found[0] not in _VERIFIERS


def stays_inside(path: str, target: str, here: str) -> bool:
    """Whether a link leads to something of the directory `here`, in which `path` is, by its words alone.

    Names with newlines do not come over as they were, and are refused.
    """
    if {"", ".", ".."} & set(path.split("/")) or "\n" in path + target:
        return False
    found, top = _target_of(f"{here}/{path}", target), here.strip("/").split("/")
    return found is not None and found[: len(top)] == top


def _target_of(path: str, target: str) -> list[str] | None:
    """The names on the way from the root to what a link leads to; None where its words do not say.

    It may climb only at first, where every step is a directory: behind a link `..` leads elsewhere.
    """
    steps = [step for step in target.split("/") if step not in ("", ".")]
    climbs = next((number for number, step in enumerate(steps) if step != ".."), len(steps))
    folders = [] if target.startswith("/") else path.strip("/").split("/")[:-1]
    if ".." in steps[climbs:] or climbs > len(folders) or "\0" in target:
        return None
    return folders[: len(folders) - climbs] + steps[climbs:]


def _looked_through(
    archive: bytes,
    sandbox: Sandbox,
    is_asked: Callable[[str, bool], bool],
    may_link: Callable[[str, str], bool],
    room: tuple[str, ...],
) -> Carried:
    """The archive with what may be laid of it: it comes from where the agent was.

    Raises SandboxKilledByAgentError for one that no program of ours would write.
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
    return Carried(target.getvalue() if laid else b"", (*room, *no_folders), state.digest())


_EMPTY = bytes(1024)


def _joined(parts: Sequence[Carried]) -> Carried:
    """Several as one."""
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
    return Carried(target.getvalue() if seen else b"", room, digest)


async def lay(carried: Carried, fresh: Sandbox) -> None:
    """Lays it into a sandbox in which nothing of the agent's has run.

    Raises AgentError for what does not fit there, TaskError for an image without the programs for it,
    SandboxError where it took too long.
    """
    steps: list[tuple[str, bytes]] = []
    if carried.room:
        rows = "".join(f"{row}\n" for row in carried.room)
        steps.append((_MAKE_ROOM, rows.encode(errors="surrogateescape")))
    if carried.archive:
        steps.append(("tar -x -o -p -f - -C /", carried.archive))
    for command, data in steps:
        result = await run_own(fresh, "laying what the agent left", command, data)
        if result.exit_code in _NO_PROGRAM:
            raise TaskError(
                "what the agent left cannot be laid in the image of its verifier",
                field="verifier.environment",
                received=result.stderr.strip()[-200:],
                fix="the image needs sh, tar and coreutils",
            )
        if result.exit_code != 0:
            raise AgentError(f"what the agent left cannot be laid: {result.stderr.strip()[-200:]}")
