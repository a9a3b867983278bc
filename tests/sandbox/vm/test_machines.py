"""Command lines, keys and tickets: what can be seen without a guest."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.sandbox.errors import TemplateError, Unsupported
from etude.sandbox.snapshots import this_machine
from etude.sandbox.template import Image, Template
from etude.sandbox.types import Resources
from etude.sandbox.vm import templates
from etude.sandbox.vm.backend import VmBackend
from etude.sandbox.vm.image import VmImage
from etude.sandbox.vm.qemu import PROGRAM, Boot, Hardware, command_line
from etude.sandbox.vm.templates import template_key

HARDWARE = Hardware.for_resources(Resources(), "tcg")
IMAGE = VmImage("ab" * 20, Path("/images/ab"), {})


def arguments(**changes: Any) -> list[str]:
    values: dict[str, Any] = {
        "root": Path("r"),
        "disk": Path("d"),
        "memory": Path("m"),
        "line": 7,
        "control": 8,
    }
    return command_line(**{"hardware": HARDWARE, **values, **changes})


def test_a_machine_has_no_network_card_no_shared_folder_and_a_filter() -> None:
    argv = arguments()
    text = " ".join(argv)
    for forbidden in (
        "-net",
        "-nic",
        "virtio-net",
        "e1000",
        "-virtfs",
        "9p",
        "fsdev",
        "vhost",
        "hostfwd",
        "vsock",
    ):
        assert forbidden not in text
    assert argv[argv.index("-sandbox") + 1] == (
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    )
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(argv)
    assert "driver=file,node-name=root,read-only=on,filename=r" in argv


def test_a_machine_without_a_boot_waits_for_a_state() -> None:
    assert arguments()[-3:] == ["-incoming", "defer", "-S"]
    boot = arguments(boot=Boot(Path("k"), Path("i"), "panic=-1", Path("c")))
    assert "-incoming" not in boot
    assert boot[-6:] == ["-kernel", "k", "-initrd", "i", "-append", "panic=-1"]


def test_commas_in_paths_do_not_become_options() -> None:
    assert any(word.endswith("filename=a,,readonly=off") for word in arguments(disk=Path("a,readonly=off")))


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 34), st.floats(0.01, 8))
def test_hardware_gives_at_least_what_was_asked(memory: int, disk: int, cpus: float) -> None:
    hardware = Hardware.for_resources(Resources(memory_bytes=memory, disk_bytes=disk, cpus=cpus), "tcg")
    assert hardware.memory_bytes >= memory
    assert hardware.disk_bytes >= disk
    assert cpus <= hardware.num_cpus < cpus + 1


def test_a_template_is_found_only_for_what_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "qemu_version", lambda: "7.2.0")
    base = template_key(IMAGE, Resources(), HARDWARE)
    assert base == template_key(IMAGE, Resources(), HARDWARE)
    other_image = dataclasses.replace(IMAGE, digest="cd" * 20)
    keys = {
        base,
        template_key(other_image, Resources(), HARDWARE),
        template_key(IMAGE, Resources(num_processes=3), HARDWARE),
        template_key(IMAGE, Resources(), dataclasses.replace(HARDWARE, num_cpus=2)),
        template_key(IMAGE, Resources(), dataclasses.replace(HARDWARE, accelerator="kvm")),
    }
    monkeypatch.setattr(templates, "qemu_version", lambda: "7.2.1")
    keys.add(template_key(IMAGE, Resources(), HARDWARE))
    assert len(keys) == 6


def test_without_the_device_guests_are_emulated(tmp_path: Path) -> None:
    assert asyncio.run(templates.choose_accelerator(tmp_path, IMAGE, tmp_path / "none")) == "tcg"


def test_the_probe_is_done_once_for_a_machine_and_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "qemu_version", lambda: "7.2.0")
    device = tmp_path / "kvm"
    device.touch()
    here = {**this_machine(), "qemu": "7.2.0", "image": IMAGE.digest}
    (tmp_path / "vm-accelerator.json").write_text(json.dumps({"here": here, "accelerator": "kvm"}))
    assert asyncio.run(templates.choose_accelerator(tmp_path, IMAGE, device)) == "kvm"


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")
def test_a_host_without_an_image_says_what_to_do(tmp_path: Path) -> None:
    async def run() -> None:
        backend = VmBackend(tmp_path, accelerator="tcg")
        assert any("etude sandbox image build" in problem for problem in backend.doctor())
        with pytest.raises(TemplateError, match="etude sandbox image build"):
            await backend.create()
        await backend.close()

    asyncio.run(run())
    assert not list(tmp_path.rglob("vm-*"))


def test_what_guests_cannot_do_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        backend = VmBackend(tmp_path, accelerator="tcg")
        with pytest.raises(Unsupported, match="local"):
            await backend.create(Template(image=Image("debian", ("ab",))))
        await backend.close()
        with pytest.raises(ConfigError, match="accelerator"):
            VmBackend(tmp_path, accelerator="xen")

    asyncio.run(run())


def test_torn_templates_are_not_whole(tmp_path: Path) -> None:
    key = tmp_path / ("ab" * 20)
    key.mkdir()
    for name in (templates.RAM, templates.DISK, templates.DEVICES):
        (key / name).write_bytes(name.encode() * 100)
    templates._write_manifest(key, key.name)
    assert templates._is_whole(key)
    for name, damage in itertools.product((templates.RAM, templates.DISK), (b"", b"x" * 100)):
        saved = (key / name).read_bytes()
        (key / name).write_bytes(damage)
        assert not templates._is_whole(key)
        (key / name).write_bytes(saved)
    (key / templates.MANIFEST).write_text("{}")
    assert not templates._is_whole(key)


def made_template(directory: Path, key: str, state: bytes) -> Path:
    """A finished template for a key, of which nobody knows yet."""
    directory.mkdir()
    for name in (templates.RAM, templates.DISK, templates.DEVICES):
        (directory / name).write_bytes(state)
    templates._write_manifest(directory, key)
    return directory


def test_a_template_that_another_process_has_warmed_meanwhile_stays_as_it_is(tmp_path: Path) -> None:
    """Machines may just be starting from it: their memory and their devices must be of one guest."""
    key = "ab" * 20
    templates._publish(made_template(tmp_path / "one", key, b"first"), tmp_path / key)
    templates._publish(made_template(tmp_path / "two", key, b"second"), tmp_path / key)
    assert (tmp_path / key / templates.RAM).read_bytes() == b"first"
    (tmp_path / key / templates.DISK).write_bytes(b"torn")
    templates._publish(tmp_path / "two", tmp_path / key)
    assert (tmp_path / key / templates.RAM).read_bytes() == b"second"
    assert templates._is_whole(tmp_path / key)
