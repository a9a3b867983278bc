"""What a Dockerfile stage has come to: layers, variables, directory, user; and the instructions that only
change those."""

from __future__ import annotations

import platform
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.dockerfile import Instruction
from etude.sandbox.images.words import expand, split_words
from etude.sandbox.paths import WORKSPACE
from etude.sandbox.template import Image

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_SHELL = ("/bin/sh", "-c")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    """This machine's architecture in OCI's words."""
    return _MACHINES.get(platform.machine(), platform.machine())


def platform_arguments() -> dict[str, str]:
    """The ARGs that are always there."""
    machine = architecture()
    values = {"PLATFORM": f"linux/{machine}", "OS": "linux", "ARCH": machine, "VARIANT": ""}
    return {side + key: value for side in ("TARGET", "BUILD") for key, value in values.items()}


@dataclass
class StageState:
    """One stage in the making."""

    image: Image
    """So far; `workdir` is where the next RUN starts."""
    escape: str
    arguments: dict[str, str] = field(default_factory=dict)
    """Values of the declared ARGs."""
    shell: tuple[str, ...] = DEFAULT_SHELL

    @property
    def variables(self) -> dict[str, str]:
        """What `$NAME` stands for: ENV wins over ARG."""
        return {**self.arguments, **self.image.env}

    @property
    def run_env(self) -> dict[str, str]:
        """The environment of a RUN."""
        env = {"PATH": DEFAULT_PATH, **self.variables}
        if self.image.user in ("root", "0"):
            env.setdefault("HOME", "/root")
        return env

    def words(self, instruction: Instruction) -> list[str]:
        """An instruction's words, variables expanded. Raises TemplateError with its line."""
        if instruction.words is not None:
            return [self.expand(instruction, word) for word in instruction.words]
        try:
            return split_words(instruction.text, self.variables, self.escape)
        except TemplateError as error:
            raise instruction.error(error.message, error.received, error.fix) from error

    def expand(self, instruction: Instruction, text: str) -> str:
        """One word, variables expanded. Raises TemplateError with the instruction's line."""
        return expand_in(instruction, text, self.variables, self.escape)

    def add_layer(self, digest: str | None) -> None:
        """Puts a layer on top; None: nothing changed."""
        if digest is not None:
            self.image = replace(self.image, layers=(*self.image.layers, digest))

    def absolute(self, path: str) -> str:
        """A path of the image from the root, without `.` and `..`; a slash at the end stays."""
        whole = posixpath.normpath(posixpath.join("/", self.image.workdir, path)).replace("//", "/")
        keeps = path.endswith(("/", "/.")) or path in ("", ".")
        return whole if not keeps or whole == "/" else f"{whole}/"

    def set_env(self, instruction: Instruction) -> None:
        """ENV."""
        first = instruction.text.split(None, 1)
        if "=" not in first[0]:
            if len(first) < 2:
                raise instruction.error("needs a value", instruction.text[:80], "ENV NAME=value")
            pairs = [(first[0], self.expand(instruction, first[1]))]
        else:
            pairs = [_pair(instruction, word) for word in self.words(instruction)]
        for name, value in pairs:
            if not name or "\0" in value or any(char.isspace() for char in name):
                raise instruction.error("is no name for a variable", name[:80])
        self.image = replace(self.image, env={**self.image.env, **dict(pairs)})

    def set_workdir(self, instruction: Instruction) -> None:
        """WORKDIR, but for making the directory."""
        path = self.absolute(self.expand(instruction, instruction.text))
        self.image = replace(self.image, workdir=path.rstrip("/") or "/")

    def set_user(self, instruction: Instruction) -> None:
        """USER."""
        user = self.expand(instruction, instruction.text).strip()
        if not user or any(char.isspace() for char in user):
            raise instruction.error("is no user", user[:80], "USER name, or name:group")
        self.image = replace(self.image, user=user)

    def declare(self, instruction: Instruction, given: Mapping[str, str]) -> None:
        """ARG; `given` are the values from outside and those of ARGs before the first FROM."""
        for word in self.words(instruction):
            name, equals, default = word.partition("=")
            if not _NAME.match(name):
                raise instruction.error("is no name for a variable", name[:80])
            if name in given:
                self.arguments[name] = given[name]
            elif equals:
                self.arguments[name] = default


def global_arguments(
    instructions: tuple[Instruction, ...], given: Mapping[str, str], escape: str
) -> dict[str, str]:
    """Values of the ARGs before the first FROM."""
    state = StageState(Image("", ()), escape, platform_arguments())
    for instruction in instructions:
        state.declare(instruction, given)
    return state.arguments


def expand_in(instruction: Instruction, text: str, variables: Mapping[str, str], escape: str) -> str:
    """`text` with variables expanded. Raises TemplateError with the instruction's line."""
    try:
        return expand(text, variables, escape)
    except TemplateError as error:
        raise instruction.error(error.message, error.received, error.fix) from error


def finished(image: Image, name: str) -> Image:
    """The stage's image under its name. The root directory is no workspace: then it is `/workspace`."""
    return replace(image, name=name, workdir=WORKSPACE if image.workdir == "/" else image.workdir)


def _pair(instruction: Instruction, word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise instruction.error("must be NAME=value", word[:80], "put values with spaces in quotes")
    return name, value
