"""What stands beside NVML: the bus, the kernel's log, and who holds a device.

Run: pytest tests/guard/facts/test_device_facts.py
"""

import os
import pwd
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.guard.facts.machine import (
    DeviceHolder,
    Gpu,
    Xid,
    no_gpus,
    probe_nvidia,
    read_machine,
    triton_trouble,
)
from unisono.guard.facts.nvidia import (
    KernelLine,
    nvidia_devices,
    probe_details,
    read_kernel_log,
    redirecting_bridges,
    xids_in,
)
from unisono.guard.facts.processes import holder_of


def test_process_is_described_by_user_and_program_without_its_arguments() -> None:
    """An argument may be a secret."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "hf_secret"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # by then it is the program, and no copy of this process
        found = holder_of(child.pid, 5)
        child.communicate()
    assert found == DeviceHolder(child.pid, 5, pwd.getpwuid(os.getuid()).pw_name, Path(sys.executable).name)
    assert holder_of(child.pid, 5) == DeviceHolder(child.pid, 5)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/usr/bin/python3", "-u", "/home/ann/train.py", "--token=s3cret"], "python3 train.py"),
        (["python3.12", "-m", "vllm.serve", "--api-key", "s3cret"], "python3.12 vllm.serve"),
        (["python", "-X", "s3cret", "train.py"], "python"),
        (["python", "-c", "login('s3cret')"], "python"),
        (["bash", "-lc", "export HF_TOKEN=s3cret; train"], "bash"),
        (["/opt/bin/serve", "s3cret"], "serve"),
        (["redis-server", "-p", "s3cret"], "redis-server"),
    ],
)
def test_command_line_is_shown_without_anything_that_may_be_a_secret(
    tmp_path: Path, words: list[str], shown: str
) -> None:
    folder = tmp_path / "77"
    folder.mkdir()
    (folder / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
    assert holder_of(77, proc=tmp_path).command == shown


def test_the_kernels_log_is_read_to_its_end_or_not_at_all(tmp_path: Path) -> None:
    found = read_kernel_log()
    assert found is None or all(line.text and (line.age_s is None or line.age_s >= 0) for line in found)
    assert read_kernel_log(tmp_path / "none") is None


def test_a_record_of_the_kernels_log_is_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(
        "4,1234,0,-;NVRM: Xid (PCI:0000:2a:00): 79, pid=9, GPU has fallen off the bus.\n SUBSYSTEM=pci\n"
    )
    found = read_kernel_log(tmp_path / "kmsg")
    assert found is not None
    assert [line.text for line in found] == [
        "NVRM: Xid (PCI:0000:2a:00): 79, pid=9, GPU has fallen off the bus."
    ]
    assert xids_in(found)[0].number == 79


def test_xids_are_found_with_their_device() -> None:
    lines = [
        KernelLine("usb 1-1: new device", 1.0),
        KernelLine("NVRM: Xid (PCI:0000:3B:00): 48, pid=1, DBE", 2.0),
    ]
    assert xids_in(lines) == (Xid("0000:3b:00.0", 48, "pid=1, DBE", 2.0),)


def test_accelerators_on_the_bus_are_distinguished_from_other_devices(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("0000:07:00.0", "0x10de", "0x030200"),
        ("0000:07:00.1", "0x10de", "0x040300"),
        ("0000:00:02.0", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert nvidia_devices(tmp_path) == ("0000:07:00.0",)
    assert nvidia_devices(tmp_path / "none") == ()


def test_a_machine_without_such_hardware_gets_no_advice_about_packages() -> None:
    found = probe_details()
    assert found.devices or found.on_bus or found.note == ""


def bridge(*, control: int, before: int = 0x0001) -> bytes:
    """The registers of a PCIe bridge, as the kernel shows them to root: another capability first,
    then ACS.
    """
    registers = bytearray(4096)
    registers[0x100:0x104] = (before | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    registers[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")  # the last of the list
    registers[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(registers)


def on_bus(folder: Path, name: str, *above: tuple[str, bytes]) -> None:
    """A device below bridges, as /sys has it: folders in folders, and links to all of them."""
    place = folder / "devices" / "pci0000:00"
    (folder / "bus").mkdir(exist_ok=True)
    for address, registers in (*above, (name, bytes(64))):
        place = place / address
        place.mkdir(parents=True, exist_ok=True)
        (place / "config").write_bytes(registers)
        if not (folder / "bus" / address).is_symlink():
            (folder / "bus" / address).symlink_to(place)


def test_bridges_that_redirect_are_read_from_their_registers(tmp_path: Path) -> None:
    on_bus(
        tmp_path,
        "0000:16:00.0",
        ("0000:14:00.0", bridge(control=0)),
        ("0000:15:00.0", bridge(control=0x001D)),
    )
    on_bus(tmp_path, "0000:27:00.0", ("0000:14:00.0", bridge(control=0)), ("0000:26:00.0", bridge(control=0)))
    both = ["0000:16:00.0", "0000:27:00.0"]
    assert redirecting_bridges(both, tmp_path / "bus") == {"0000:16:00.0": ("0000:15:00.0",)}
    assert redirecting_bridges(["0000:99:00.0"], tmp_path / "bus") == {}


def test_registers_only_root_sees_are_unknown_and_an_endless_list_ends(tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:16:00.0", ("0000:15:00.0", bridge(control=0x001D)[:64]))
    assert redirecting_bridges(["0000:16:00.0"], tmp_path / "bus") is None
    turning = bytearray(4096)
    turning[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    on_bus(tmp_path, "0000:28:00.0", ("0000:27:00.0", bytes(turning)))
    assert redirecting_bridges(["0000:28:00.0"], tmp_path / "bus") == {}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (
            "0, GPU-1d4f, NVIDIA H100 80GB HBM3, 81559, 81008, 9.0, 00000000:07:00.0",
            [Gpu(0, "GPU-1d4f", "NVIDIA H100 80GB HBM3", 81559 << 20, 81008 << 20, (9, 0), "0000:07:00.0")],
        ),
        ("0, GPU-1d4f, NVIDIA GB10, [N/A], [N/A], 12.1, 00000000:07:00.0", []),
        ("No devices were found", []),
    ],
)
def test_without_nvidia_ml_py_the_drivers_own_program_lists_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, found: list[Gpu]
) -> None:
    """Else a GPU would stay unused, as nvidia-ml-py is an extra of this package."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus, note = probe_nvidia()
    assert [replace(gpu, numa_node=None) for gpu in gpus] == found
    assert bool(note) == (not found)


def test_what_triton_lacks_is_named_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts on its kernels where nothing is missing, and the first screen says what
    is.
    """
    monkeypatch.setattr(sys, "path", [])
    assert triton_trouble() == "Triton is not installed (pip install triton)"
    monkeypatch.undo()
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert triton_trouble().startswith("Triton finds no C compiler, gcc or clang (install gcc")
    (tmp_path / "mycc").write_text("")
    (tmp_path / "mycc").chmod(0o755)
    monkeypatch.setenv("CC", "mycc")
    headers = tmp_path / "include"
    monkeypatch.setattr("sysconfig.get_path", lambda *_names: str(headers))
    assert triton_trouble().endswith("include/Python.h is missing (install python3-dev)")
    headers.mkdir()
    (headers / "Python.h").write_text("")
    assert triton_trouble() == ""
    assert read_machine(no_gpus).compiles
    monkeypatch.setenv("CC", "gcc")
    assert triton_trouble().startswith("Triton finds no C compiler, gcc (")
    assert not read_machine(no_gpus).compiles
