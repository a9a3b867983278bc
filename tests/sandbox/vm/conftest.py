"""One state directory with warmed guests for all tests of the vm backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandbox.vm.guests import make_state


@pytest.fixture(scope="session")
def vm_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state(tmp_path_factory.mktemp("vm") / "state")
