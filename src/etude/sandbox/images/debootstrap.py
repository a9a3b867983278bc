"""Makes a root file system archive of Debian packages by `mmdebstrap`, from this host's package sources.

Mirrors come from the host's apt configuration or, if that has none for the suite, from mmdebstrap's defaults.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from etude.errors import ResourceError, SandboxError
from etude.sandbox.errors import TemplateError

BUILD_TIMEOUT_S = 900.0
_TAIL_CHARS = 1500
# As in sources.list; CODENAME would need package lists that are fetched, and not being replaced.
_REPOSITORY_FORMAT = "$(RELEASE)|$(COMPONENT)|$(REPO_URI)"


async def write_archive(
    suite: str,
    target: Path,
    options: Sequence[str],
    epoch_s: int,
    timeout_s: float = BUILD_TIMEOUT_S,
    field: str = "base image",
) -> None:
    """Writes a root file system to `target`, a tar file in a directory of its own. Takes minutes.

    `epoch_s`: upper bound of modification times; `field`: of errors. Raises ResourceError if mmdebstrap is
    missing or its package sources cannot be reached.
    """
    tool = shutil.which("mmdebstrap")
    if tool is None:
        raise ResourceError(
            "mmdebstrap is not installed", field=field, received=suite,
            fix="apt-get install mmdebstrap, or import an OCI archive of the base image",
        )  # fmt: skip
    sources = await asyncio.to_thread(_host_sources, suite, field)
    # If mmdebstrap does not run as root, other users unpack packages too.
    target.parent.chmod(0o711)
    argv = [tool, "--format=tar", "--quiet", *options, suite, str(target), *(["-"] if sources else [])]
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": str(epoch_s),
        "TMPDIR": str(target.parent),
        "LC_ALL": "C.UTF-8",
    }
    with (target.parent / "log").open("w+b") as log:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            async with asyncio.timeout(timeout_s):
                await process.communicate(sources.encode())
        except TimeoutError as error:
            raise ResourceError(
                f"mmdebstrap took longer than {timeout_s:g} s", field=field,
                fix="check the network and the mirror, or allow more time",
            ) from error  # fmt: skip
        finally:
            await _end(process)
        if process.returncode != 0:
            log.seek(0)
            tail = log.read().decode(errors="replace")[-_TAIL_CHARS:]
            raise ResourceError(
                f"mmdebstrap ended with exit code {process.returncode}: {tail.strip()}",
                field=field,
                fix="check that apt-get update works here; as a plain user, install uidmap",
            )


def _host_sources(suite: str, field: str) -> str:
    """The host's package sources for a suite and its updates, as lines of sources.list; may be empty."""
    try:
        found = subprocess.run(
            ["apt-get", "indextargets", "--format", _REPOSITORY_FORMAT, "Created-By: Packages"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired as error:
        raise SandboxError("apt-get does not answer", field=field) from error
    if found.returncode != 0:
        raise ResourceError(
            f"apt does not list its sources: {found.stderr.strip()[-_TAIL_CHARS:]}",
            field=field,
            fix="check that apt-get update works here",
        )
    return parse_sources(found.stdout, suite, field)


def parse_sources(listing: str, suite: str, field: str = "base image") -> str:
    """Lines of sources.list from `release|component|address` rows: the suite, its updates and security fixes.

    Empty if the suite itself is not among them. Raises TemplateError for addresses that hold a password.
    """
    lines: set[str] = set()
    for row in listing.splitlines():
        release, component, address = (*row.split("|"), "", "")[:3]
        if release not in (suite, f"{suite}-updates", f"{suite}-security") or component != "main":
            continue
        if "@" in address:
            raise TemplateError(
                "the host's package source holds a password, which would end up in the image",
                field=field,
                received=release,
                fix="keep passwords in apt's auth.conf",
            )
        lines.add(f"deb {address} {release} main\n")
    return "".join(sorted(lines)) if any(f" {suite} main" in line for line in lines) else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends mmdebstrap and its descendants, if it still runs."""
    if process.returncode is not None:
        return
    # It unmounts and cleans up on SIGTERM.
    for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await process.wait()
            return
