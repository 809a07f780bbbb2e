"""Versions, code and devices, without torch. Run: pytest tests/guard/facts/test_versions.py"""

import shutil
from importlib import metadata
from pathlib import Path

import pytest

import unisono
from unisono.guard.facts import Probes, package_versions
from unisono.guard.facts.environment import code_digests, cuda_of, decisive_versions
from unisono.guard.facts.machine import driver_version, numa_node_of, pci_address


@pytest.mark.parametrize(
    ("torch", "cuda"),
    [("2.11.0+cu126", "12.6"), ("2.11.0+cu130", "13.0"), ("2.9.1+cu128", "12.8"), ("2.11.0+cpu", None), ("2.8.0+rocm6.4", None), ("", None)],
)  # fmt: skip
def test_the_cuda_of_torch_stands_in_its_version(torch: str, cuda: str | None) -> None:
    assert cuda_of(torch) == cuda


def test_a_version_without_suffix_is_looked_up_in_torchs_own_file() -> None:
    """The torch of the tests is one for CPUs, or one of the index whose wheels have no suffix."""
    import torch

    assert cuda_of(torch.__version__.partition("+")[0]) == torch.version.cuda


def test_what_decides_is_picked_out_and_the_rest_is_left() -> None:
    packages = {
        "python": "3.11.7",
        "torch": "2.11.0+cu126",
        "nvidia-nccl-cu12": "2.27.5",
        "rich": "13",
        "peft": "0.18",
    }
    found = decisive_versions(packages)
    found.pop("driver", None)
    assert found == {
        "python": "3.11.7",
        "torch": "2.11.0+cu126",
        "cuda": "12.6",
        "nccl": "2.27.5",
        "peft": "0.18",
    }


def test_the_installed_ones_are_among_them() -> None:
    found = decisive_versions(package_versions())
    assert {"python", "torch", "transformers", "peft", "unisono"} <= set(found)


def test_names_and_versions_are_those_that_the_standard_library_reads() -> None:
    found = package_versions()
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        first = metadata.distribution(distribution.metadata["Name"])  # that which Python imports
        assert found[name] == first.version


def test_one_changed_byte_changes_one_files_digest(tmp_path: Path) -> None:
    copy = tmp_path / "unisono"
    shutil.copytree(Path(unisono.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digests(copy)
    loop = copy / "trainer" / "training" / "loop.py"
    loop.write_bytes(loop.read_bytes() + b"\n")
    after = code_digests(copy)
    assert {name for name in before if after[name] != before[name]} == {"unisono/trainer/training/loop.py"}
    assert set(after) == set(before)


def test_all_of_the_packages_files_are_digested() -> None:
    assert {
        "unisono/__init__.py",
        "unisono/guard/facts/environment.py",
        "unisono/trainer/training/loop.py",
    } <= set(code_digests())


@pytest.mark.parametrize(
    ("printed", "address"),
    [
        ("00000000:07:00.0", "0000:07:00.0"),
        ("00010000:AF:00.0", "0000:af:00.0"),
        ("0001:81:00.0", "0001:81:00.0"),
        ("?", "?"),
    ],
)
def test_bus_ids_are_spelt_as_sys_does(printed: str, address: str) -> None:
    assert pci_address(printed) == address


def test_the_numa_node_of_a_device_is_read_where_there_is_one(tmp_path: Path) -> None:
    for address, text in (("0000:07:00.0", "1\n"), ("0000:08:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(text)
    assert [numa_node_of(f"0000:0{i}:00.0", folder=tmp_path) for i in (7, 8, 9)] == [1, None, None]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build\n",
    ],
)
def test_the_driver_reports_its_version_in_files(tmp_path: Path, text: str) -> None:
    assert driver_version(root=tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert driver_version(root=tmp_path) == "550.90.07"
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("560.1\n")
    assert driver_version(root=tmp_path) == "560.1"


def test_the_real_probes_are_the_default_and_answer() -> None:
    probes = Probes()
    assert probes.clock.wall() > 1.7e9
    assert probes.clock.monotonic() <= probes.clock.monotonic()
    assert probes.packages()["python"]
    gpus, note = probes.devices()
    assert gpus or note
