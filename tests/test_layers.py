"""Import rules that a static linter cannot check: modules loaded at run time."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIGHT = ["errors", "kit", "records", "protocols", "config", "observe", "store"]
EVERY_COMMAND = (
    "import etude.cli, typer.main\n"
    "group = typer.main.get_command(etude.cli.app)\n"
    "for name in group.commands: group.get_command(None, name)\n"
)
"""Imports every command: the command line imports each only when it is used."""


@pytest.mark.parametrize("imports", [*(f"import etude.{name}\n" for name in LIGHT), EVERY_COMMAND])
def test_lower_layers_and_the_command_line_do_not_load_torch(imports: str) -> None:
    code = f"{imports}import sys; assert not {{'torch', 'ray'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_does_not_wait_for_what_others_need() -> None:
    code = "import sys, etude.cli, etude.cli.sandbox; assert not {'pydantic', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_process_of_a_run_does_not_wait_for_what_it_may_never_need() -> None:
    slow = {"transformers", "torch.distributed.tensor", "torch.distributed.checkpoint", "ray", "sympy"}
    code = f"import sys, etude.controller.train; assert not {slow!r} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_records_need_only_numpy() -> None:
    code = (
        "import sys, etude.records\n"
        "foreign = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "foreign -= {'numpy', 'etude', 'sitecustomize', 'usercustomize'}\n"
        "foreign = {name for name in foreign if not name.startswith('_')}\n"
        "assert not foreign, foreign\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_prints_nothing_and_makes_no_files(tmp_path) -> None:
    code = f"{EVERY_COMMAND}import etude.store, etude.observe.report"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_training_needs_no_extra_and_nothing_that_only_servers_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    serving = {"fastapi", "uvicorn", "websockets", "mcp", "acp", "prometheus_client"}
    missing = sorted(_modules_of(extras) - _modules_of(project["dependencies"]) | serving)
    assert "pytest" in missing
    code = (
        f"import sys; sys.modules |= dict.fromkeys({missing!r})\n"  # None in sys.modules makes an import fail
        f"{EVERY_COMMAND}import etude.controller.train, etude.controller.pretraining, etude.controller.sft\n"
        "import etude.controller.parity, etude.controller.recorded, etude.cli.train, etude.cli.evaluate\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _modules_of(requirements: list[str]) -> set[str]:
    """Importable module names of those distributions that are installed."""
    wanted = {re.split(r"[^A-Za-z0-9.-]", line)[0].lower() for line in requirements}
    found = importlib.metadata.packages_distributions().items()
    return {module for module, names in found if wanted & {name.lower() for name in names}} - {"etude"}


def test_the_core_and_what_servers_share_with_it_need_no_web_framework() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('fastapi', 'starlette', 'uvicorn', 'prometheus_client'))\n"
        "import etude.records, etude.protocols, etude.config, etude.tokens, etude.model, etude.algorithms\n"
        "import etude.weights, etude.training, etude.inference\n"
        "import etude.serving.access, etude.serving.errors, etude.serving.metrics\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tokens_are_compared_and_servers_are_started_in_one_place() -> None:
    words = re.compile(r"compare_digest|\bFastAPI\(|uvicorn\.(Config|Server)\(|# TYPE ")
    source = ROOT / "src" / "etude"
    found = {
        path.relative_to(source).parts[0] for path in source.rglob("*.py") if words.search(path.read_text())
    }
    assert found == {"serving"}


def test_the_kit_needs_only_the_standard_library() -> None:
    modules = [f"etude.kit.{path.stem}" for path in sorted((ROOT / "src/etude/kit").glob("[a-z]*.py"))]
    code = (
        f"import sys, {', '.join(modules)}\n"
        "names = {name for name in sys.modules if name.startswith('etude.')}\n"
        "assert all(name.startswith(('etude.kit', 'etude.errors')) for name in names), names\n"
        "foreign = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "foreign -= {'etude', 'sitecustomize', 'usercustomize'}\n"
        "assert not {name for name in foreign if not name.startswith('_')}, foreign\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_servers_are_asked_in_one_place() -> None:
    others = r"^\s*(import|from) (httpx2?|aiohttp|requests|urllib3|http\.client|urllib\.request)\b"
    words = re.compile(rf"\bhttpx2?\.|{others}", re.MULTILINE)
    source = ROOT / "src" / "etude"
    found = [path for path in source.rglob("*.py") if words.search(path.read_text())]
    assert found == [source / "serving" / "client.py"]


EXCEPTIONS = {}
"""Module -> functions of `etude.kit` that it implements itself."""


def test_files_become_durable_and_tasks_are_kept_in_one_place() -> None:
    source, found = ROOT / "src" / "etude", dict[str, set[str]]()
    for path in source.rglob("*.py"):
        name = path.relative_to(source).as_posix()
        if not name.startswith(
            ("kit/", "serving/", "sandbox/inside/")
        ):  # code inside sandboxes cannot import the kit
            words = set(filter(None, map(_mechanism, ast.walk(ast.parse(path.read_bytes())))))
            found |= {name: words} if words else {}
    assert found == EXCEPTIONS


def _mechanism(node: ast.AST) -> str | None:
    """The kit's function that a call duplicates, if any. `path.replace(other)` with one argument renames."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    name = node.func.attr
    is_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
    if name in ("rename", "renames") or (
        name == "replace" and (is_os or [len(node.args), node.keywords] == [1, []])
    ):
        return "rename"
    return name if name in ("fsync", "fdatasync", "add_done_callback") else None


def test_the_quickstarts_tasks_are_reached_by_their_name_alone() -> None:
    source = ROOT / "src" / "etude"
    found = [path for path in source.rglob("*.py") if "etude_quickstart" in path.read_text()]
    assert found == [source / "config" / "run.py"]
