"""Devices and the ladder on a real GPU. Run: pytest -m gpu tests/gpu/test_doctor.py"""

import pytest
import torch

from tests.front.checks.replay import details_from, record
from unisono.front.checks.ladder_attempts import attempt_local
from unisono.guard.facts.machine import probe_nvidia
from unisono.guard.facts.nvidia import probe_details
from unisono.guard.places.ranks import DeviceChoice
from unisono.guard.supervise.child_process import Programs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_probe_sees_what_torch_sees() -> None:
    details = probe_details(limit_s=60.0)
    assert details.note == ""
    assert len(details.devices) == len(probe_nvidia()[0]) >= torch.cuda.device_count()
    names = {device.name for device in details.devices}
    assert {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())} <= names
    assert all(device.uuid.startswith("GPU-") and device.memory_bytes > 0 for device in details.devices)
    assert details.driver
    assert details.driver_cuda is not None


def test_what_is_recorded_here_replays_to_the_same() -> None:
    """The form of the composed machines is that of a real one."""
    pynvml = pytest.importorskip("pynvml")
    live, replayed = probe_details(limit_s=60.0), details_from(record(pynvml))
    assert [device.uuid for device in replayed.devices] == [device.uuid for device in live.devices]
    assert [device.nvlinks for device in replayed.devices] == [device.nvlinks for device in live.devices]
    assert replayed.pairs == live.pairs
    assert replayed.on_bus == live.on_bus


def places() -> list[DeviceChoice]:
    return [
        DeviceChoice(kind="cuda", index=gpu.index, uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_free_bytes, bfloat16=True)
        for gpu in probe_nvidia()[0]
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "settings", [{}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}]
)
def test_each_ladder_step_can_be_climbed_and_nccl_reports_its_transports(
    settings: dict[str, str | None],
) -> None:
    outcome = attempt_local(places()[:2], settings, backend="nccl", deadline_s=60.0, programs=Programs())
    assert outcome.ok, outcome
    assert outcome.rate > 0
    text = "\n".join(outcome.rows)
    expected = "NET/" if "NCCL_SHM_DISABLE" in settings else "SHM" if settings else "→"
    assert expected in text, text


def test_one_device_alone_makes_a_group_of_one() -> None:
    outcome = attempt_local(places()[:1], {}, backend="nccl", deadline_s=60.0, programs=Programs())
    assert outcome.ok, outcome
