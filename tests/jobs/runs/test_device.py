"""The devices of a run are chosen from facts alone; several: test_topology.py.

Run: pytest tests/jobs/runs/test_device.py
"""

import pytest

from unisono.base.errors import UsageError
from unisono.guard.facts import Machine
from unisono.guard.facts.machine import Gpu
from unisono.guard.places.placement import choose_devices, device_words
from unisono.guard.places.ranks import DeviceChoice


def gpu(index: int, capability: tuple[int, int] = (9, 0)) -> Gpu:
    return Gpu(
        index, f"GPU-{index}{index}{index}{index}-aaaa", f"Big {index}", 80 * 10**9, 70 * 10**9, capability
    )


def machine(*gpus: Gpu, note: str = "") -> Machine:
    return Machine("box", 8, 10**10, "A CPU", cpu_bfloat16=False, gpus=list(gpus), gpu_note=note)


def choose(
    here: Machine,
    *,
    requested: str = "auto",
    named: str | None = None,
    visible: str | None = None,
    torch: str = "2.13.0",
) -> DeviceChoice:
    words = device_words(named)
    (chosen,), _ = choose_devices(
        here, requested=requested, named=words, visible=visible, nproc=1, torch_version=torch
    )
    return chosen


def test_without_an_accelerator_it_is_the_cpu() -> None:
    assert choose(machine(note="no NVIDIA driver")).kind == "cpu"


def test_the_first_visible_one_is_taken_and_the_others_are_mentioned() -> None:
    (chosen,), origin = choose_devices(
        machine(gpu(0), gpu(1)), requested="auto", named=(), visible=None, nproc=1
    )
    assert chosen.index == 0
    assert "--devices" in origin


def test_visible_devices_keep_their_order_and_end_at_what_is_none() -> None:
    here = machine(gpu(0), gpu(1), gpu(2))
    assert choose(here, visible="2,0").index == 2
    assert choose(here, visible="1,9,0").index == 1
    assert choose(here, visible="9,0").kind == "cpu"
    assert choose(here, visible="").kind == "cpu"


@pytest.mark.parametrize("word", ["1", "GPU-1111", "gpu-1111-aaaa"])
def test_a_device_is_named_by_index_or_uuid(word: str) -> None:
    assert choose(machine(gpu(0), gpu(1)), named=word).uuid == "GPU-1111-aaaa"


@pytest.mark.parametrize("word", ["7", "GPU-", "0,0", "nonsense"])
def test_a_device_that_is_none_or_named_twice_is_refused(word: str) -> None:
    with pytest.raises(UsageError):
        choose(machine(gpu(0), gpu(1)), named=word)


def test_a_hidden_device_is_refused_with_the_variable_that_hides_it() -> None:
    with pytest.raises(UsageError) as caught:
        choose(machine(gpu(0), gpu(1)), named="1", visible="0")
    assert "CUDA_VISIBLE_DEVICES=0" in "\n".join(caught.value.lines())


def test_cuda_without_a_device_reports_why() -> None:
    with pytest.raises(UsageError) as caught:
        choose(machine(note="no NVIDIA driver"), requested="cuda")
    assert "no NVIDIA driver" in "\n".join(caught.value.lines())


def test_a_torch_without_cuda_trains_on_the_cpu_or_reports_it() -> None:
    assert choose(machine(gpu(0)), torch="2.13.0+cpu").kind == "cpu"
    with pytest.raises(UsageError, match="no CUDA device"):
        choose(machine(gpu(0)), requested="cuda", torch="2.13.0+cpu")


def test_naming_a_device_contradicts_device_cpu() -> None:
    with pytest.raises(UsageError):
        choose(machine(gpu(0)), requested="cpu", named="0")


def test_bfloat16_is_known_by_the_compute_capability() -> None:
    assert choose(machine(gpu(0, (8, 0)))).bfloat16
    assert not choose(machine(gpu(0, (7, 5)))).bfloat16
