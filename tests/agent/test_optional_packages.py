import subprocess
import sys

import pytest

ABSENT = """
import sys
sys.modules[{package!r}] = None
from etude.errors import ConfigError
import etude.agent
try:
    import {module}
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(("module", "package", "extra"), [("etude.agent.mcp", "mcp", "mcp")])
def test_a_missing_package_is_named_with_its_extra(module, package, extra):
    script = ABSENT.format(module=module, package=package)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert f"pip install 'etude[{extra}]'" in done.stdout, done.stderr
