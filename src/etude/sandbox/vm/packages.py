"""Debian packages for the guest image, fetched and unpacked by mmdebstrap with this host's apt sources."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from etude.sandbox.errors import TemplateError

BUILD_S = 1800.0
KERNEL = "linux-image-cloud-amd64"
KERNEL_DIRECTORY = "etude-kernel"
"""Where the kernel's package lies in the archive that mmdebstrap writes."""
_FETCH_KERNEL = (
    f'mkdir "$1/{KERNEL_DIRECTORY}" && cd "$1/{KERNEL_DIRECTORY}" '
    '&& export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" '
    f"&& apt-get -q download $(apt-cache depends {KERNEL} "
    "| sed -n 's/.*Depends: \\(linux-image-[^ ]*\\)$/\\1/p')"
)
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
_ONE_LINE = re.compile(
    r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)"
)


def host_codename() -> str:
    """The Debian release of this host, such as `bookworm`. Raises TemplateError on another system."""
    values: dict[str, str] = {}
    path = Path("/etc/os-release")
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        key, _, value = line.partition("=")
        values[key] = value.strip('"')
    if values.get("ID") != "debian" or "VERSION_CODENAME" not in values:
        raise TemplateError(
            "guest images are built from the host's Debian sources",
            field="image",
            received=values.get("PRETTY_NAME"),
            fix="build on Debian, or give the lines of a sources.list of Debian",
        )
    return values["VERSION_CODENAME"]


def host_sources(codename: str, root: Path = Path("/etc/apt")) -> list[str]:
    """Lines of a sources.list: what this host's apt knows of a release, its updates and its security fixes.

    Raises TemplateError if there is nothing.
    """
    suites = {codename, f"{codename}-updates", f"{codename}-security"}
    lines: list[str] = []
    for path in sorted([*root.glob("sources.list"), *root.glob("sources.list.d/*.list")]):
        for line in path.read_text(encoding="utf-8").splitlines():
            match = _ONE_LINE.fullmatch(line.partition("#")[0].strip())
            if match and match["suite"] in suites:
                lines.append(match[0])
    for path in sorted(root.glob("sources.list.d/*.sources")):
        for stanza in _stanzas(path.read_text(encoding="utf-8")):
            lines += _one_lines(stanza, suites)
    if not lines:
        raise TemplateError(
            "apt of this host knows no source of this release", field="image", received=codename,
            fix="give the lines of a sources.list of Debian",
        )  # fmt: skip
    return lines


def _stanzas(text: str) -> Iterable[dict[str, str]]:
    for block in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[key] = f"{fields.get(key, '')} {line.strip()}".strip()
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        yield fields


def _one_lines(stanza: dict[str, str], suites: set[str]) -> Iterable[str]:
    if "deb" not in stanza.get("types", "").split() or stanza.get("enabled", "yes").lower() == "no":
        return
    key = stanza.get("signed-by", "")
    options = f"[signed-by={key}] " if key.startswith("/") else ""
    for uri in stanza.get("uris", "").split():
        for suite in stanza.get("suites", "").split():
            if suite in suites:
                yield f"deb {options}{uri} {suite} {stanza.get('components', 'main')}"


def fetch_packages(
    packages: Sequence[str], codename: str, sources: Sequence[str], target: Path, epoch_s: int
) -> None:
    """Writes a tar archive of a root file system with `packages`, and the kernel's package beside it.

    Blocks for a minute or so. Raises TemplateError.
    """
    program = shutil.which("mmdebstrap")
    if program is None:
        raise TemplateError(
            "mmdebstrap is not installed", field="image", received="mmdebstrap",
            fix="install the package mmdebstrap",
        )  # fmt: skip
    command = [program, "--quiet", "--variant=essential", f"--include={','.join(packages)}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    command += [f"--customize-hook={_FETCH_KERNEL}", "--format=tar", codename, str(target), "-"]
    try:
        done = subprocess.run(
            command,
            input="\n".join(sources) + "\n",
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            env=_environment(epoch_s),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TemplateError(f"mmdebstrap does not end well: {error}", field="image") from error
    if done.returncode != 0:
        raise TemplateError(
            f"mmdebstrap fails: {(done.stderr or done.stdout).strip()[-1500:]}",
            field="image",
            received=codename,
            fix="see that apt on this host reaches its sources (apt-get update)",
        )


def unpack_package(package: Path, target: Path) -> None:
    """Unpacks one .deb. Raises TemplateError."""
    program = shutil.which("dpkg-deb") or "dpkg-deb"
    try:
        subprocess.run([program, "-x", package, target], check=True, capture_output=True, timeout=BUILD_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise TemplateError(f"cannot unpack the kernel: {error}", field="image") from error


def _environment(epoch_s: int) -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SOURCE_DATE_EPOCH": str(epoch_s),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "DEBIAN_FRONTEND": "noninteractive",
    }
