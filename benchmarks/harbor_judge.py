"""Grades task directories by Harbor's own trials in podman containers: one line of JSON for each.

    PYTHON_OF_HARBOR benchmarks/harbor_judge.py DIRECTORY/TASK:oracle DIRECTORY/TASK:nop ...

Arguments that begin with `--` are options of `podman build`, such as `--volume=FROM:TO:ro`, `--from=IMAGE`.

Runs in an environment with Harbor and imports nothing from Étude. Trial, agents (`oracle` and `nop`),
verifier and reward parsing are Harbor's. Only the container is started here, by podman's command line:
Harbor's own podman support refuses tasks without network access, and needs a compose program.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

_LIMITS = ("--ulimit=nofile=1024:4096", "--ulimit=nproc=1024:4096")

_build: list[str] = []
"""Options of every `podman build`."""


class PodmanCommand(BaseEnvironment):
    """One container without a network, from the task's image or its Dockerfile."""

    @staticmethod
    def type() -> str:
        return "podman-command"

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities()

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        image = self.task_env_config.docker_image
        if not image:
            image = f"localhost/harbor-judge:{self.environment_name.rsplit('/')[-1]}"
            build = ("build", "--isolation=chroot", *_LIMITS, *_build, "--quiet", "--tag", image)
            await _podman(*build, str(self.environment_dir))
        run = ("run", "--detach", "--runtime=runc", *_LIMITS, "--network=none", "--user=root")
        self._id = (await _podman(*run, image, "sleep", "infinity")).strip()
        await self.ensure_dirs(["/logs/agent", "/logs/verifier", "/logs/artifacts"])

    async def stop(self, delete: bool) -> None:
        await _podman("rm", "--force", "--time=0", self._id)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        chosen, words = self._resolve_user(user), ["exec"]
        words += [f"--env={name}={value}" for name, value in (self._merge_env(env) or {}).items()]
        words += [f"--workdir={place}" for place in (cwd or self.task_env_config.workdir,) if place]
        words += [f"--user={chosen}"] if chosen is not None else []
        limit = ("timeout", str(timeout_sec)) if timeout_sec else ()
        process = await asyncio.create_subprocess_exec(
            "podman", *words, self._id, *limit, "bash", "-c", command, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            output, errors = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        return ExecResult(
            stdout=output.decode(errors="replace"),
            stderr=errors.decode(errors="replace"),
            return_code=process.returncode or 0,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await _podman("cp", str(source_path), f"{self._id}:{target_path}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.exec(f"mkdir -p {target_dir}", user="root")
        await _podman("cp", f"{source_dir}/.", f"{self._id}:{target_dir}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await _podman("cp", f"{self._id}:{source_path}", str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await _podman("cp", f"{self._id}:{source_dir}/.", str(target_dir))


async def _podman(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "podman", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"podman {words[0]}: {errors.decode(errors='replace')[-1000:]}")
    return output.decode()


async def judge(directory: Path, agent: str, trials: Path) -> dict[str, object]:
    """The rewards of one trial, or the type of its failure."""
    config = TrialConfig(
        task=TaskConfig(path=directory),
        trials_dir=trials,
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig(import_path=f"{__name__}:PodmanCommand"),
    )
    result = await (await Trial.create(config)).run()
    failure = result.exception_info
    return {
        "task": str(directory),
        "agent": agent,
        "rewards": result.verifier_result.rewards if result.verifier_result else None,
        "failure": failure and f"{failure.exception_type}: {failure.exception_message[-400:]}",
    }


async def main(wanted: list[str]) -> None:
    trials = Path(tempfile.mkdtemp(prefix="harbor-trials-"))
    try:
        _build.extend(words for words in wanted if words.startswith("--"))
        for words in (words for words in wanted if words not in _build):
            directory, _, agent = words.rpartition(":")
            print(json.dumps(await judge(Path(directory), agent, trials)), flush=True)
    finally:
        shutil.rmtree(trials, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
