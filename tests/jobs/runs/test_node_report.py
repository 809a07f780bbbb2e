"""What a node brings to the table, made from a real machine and from recorded answers.

Run: pytest tests/jobs/runs/test_node_report.py
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.agree.reports import NodeReport
from unisono.guard.facts import Probes, read_environment, read_machine
from unisono.guard.facts.limits import SystemLimits
from unisono.guard.facts.machine import Gpu
from unisono.guard.facts.network import NetworkInterface
from unisono.guard.facts.storage import leave_nonce
from unisono.guard.rendezvous.party import NONCE_FILE, ChannelFacts
from unisono.jobs.runs.config_file import load_config
from unisono.jobs.runs.node_report import (
    checkpoints_bytes,
    flat_config,
    look_at_files,
    look_at_output,
    make_node_report,
    reserve,
)
from unisono.jobs.runs.planning import LocalNode, look_around
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.config import LoadedConfig, RunConfig
from unisono.trainer.plan.task_requests import InputDigests

GIB = 1 << 30
LIMITS = SystemLimits(8, 100 * GIB, 20 * GIB, 10 * GIB, 1024, None, None, None)


@dataclass(frozen=True)
class Recorded:
    """A network as it was recorded somewhere else."""

    def interfaces(self) -> list[NetworkInterface]:
        return [
            NetworkInterface(
                "ib7", ["10.9.0.7"], 4092, up=True, loopback=False, speed_mbit=200_000, kind="infiniband"
            )
        ]

    def resolve(self, name: str) -> list[str]:
        return {"ada": ["10.9.0.1"]}.get(name, ["127.0.1.1"])


class Ahead:
    """A clock that is a minute ahead."""

    def wall(self) -> float:
        return time.time() + 60

    def monotonic(self) -> float:
        return time.monotonic()


def gpus(count: int) -> list[Gpu]:
    return [
        Gpu(i, f"GPU-{i}", "H100", 80 * GIB, 79 * GIB, (9, 0), f"0000:0{i}:00.0", i // 4)
        for i in range(count)
    ]


def eight() -> tuple[list[Gpu], str]:
    return gpus(8), ""


PROBES = Probes(
    devices=eight,
    network=Recorded(),
    clock=Ahead(),
    packages=lambda: {"python": "3.11.7", "torch": "2.11.0+cu126", "nvidia-nccl-cu12": "2.27.5"},
)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: builtin:tiny\ndata: {{train: {tmp_path}/rows.jsonl}}\noutput_dir: {tmp_path}/runs/one\n"
    )
    return load_config(file)


def here_of(loaded: LoadedConfig, tmp_path: Path, **options: Any) -> LocalNode:
    request = TrainRequest(
        config_path=tmp_path / "run.yaml", probes=PROBES, nodes="2", node_rank=1, head="ada:29577", **options
    )
    return look_around(request, loaded, read_machine(PROBES.devices), read_environment())


def report_of(loaded: LoadedConfig, here: LocalNode, **welcome: str) -> NodeReport:
    channel = ChannelFacts("10.9.0.7", dict(welcome), -0.5, [4001, 4002, 4003])
    return make_node_report(
        loaded=loaded, local_node=here, channel=channel, files=look_at_files(loaded, here), output=look_at_output(loaded, channel),
        probes=PROBES,
    )  # fmt: skip


def test_recorded_answers_stand_in_the_report(
    loaded: LoadedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 30)
    monkeypatch.setenv("UNISONO_TOKEN", "hunter2hunter2")
    report = report_of(loaded, here_of(loaded, tmp_path, nproc=2))
    assert (report.node_rank, report.nodes, report.nproc, report.nproc_declared) == (1, 2, 2, True)
    assert [device.uuid for device in report.chosen] == ["GPU-2", "GPU-3"]
    assert [device.index for device in report.visible] == [2, 3, 4]
    assert [device.numa_node for device in report.physical] == [0] * 4 + [1] * 4
    assert [place.uuid for place in report.places] == ["GPU-2", "GPU-3"]
    assert (report.device_kind, report.visible_variable) == ("cuda", "2,3,4")
    assert report.variables["NCCL_ALGO"] == "Ring"
    assert report.versions["cuda"] == "12.6"
    assert report.versions["nccl"] == "2.27.5"
    assert [(one.name, one.kind, one.mtu) for one in report.interfaces] == [("ib7", "infiniband", 4092)]
    assert (report.head_addresses, report.host_addresses) == (["10.9.0.1"], ["127.0.1.1"])
    assert report.clock_offset_s == pytest.approx(59.5, abs=1)
    assert (report.address, report.probe_ports) == ("10.9.0.7", [4001, 4002, 4003])
    assert [file.label for file in report.data_files] == ["train[0]: rows.jsonl"]
    assert report.model_files
    assert report.tokenizer_files
    assert report.code["unisono/trainer/training/loop.py"]
    text = json.dumps(report.to_json())
    assert "hunter2" not in text
    assert "hf_ssss" not in text
    assert NodeReport.model_validate(json.loads(text)) == report


def test_a_cpu_node_has_a_place_for_each_rank_and_no_devices(loaded: LoadedConfig, tmp_path: Path) -> None:
    on_cpu = replace(loaded, config=loaded.config.model_copy(update={"device": "cpu"}))
    report = report_of(on_cpu, here_of(on_cpu, tmp_path, nproc=3))
    assert (report.device_kind, report.chosen, len(report.places)) == ("cpu", [], 3)


def test_the_heads_file_reports_that_the_folder_is_shared(loaded: LoadedConfig, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    name = leave_nonce(folder)
    here = here_of(loaded, tmp_path, nproc=1)
    assert report_of(loaded, here, **{NONCE_FILE: name}).output.shared is True
    assert report_of(loaded, here, **{NONCE_FILE: name[:-4] + "0000"}).output.shared is False
    assert report_of(loaded, here, **{NONCE_FILE: "../../../etc/passwd"}).output.shared is None
    output = report_of(loaded, here).output
    assert (output.shared, output.writable) == (None, True)


def test_files_that_cannot_be_looked_at_are_noted(loaded: LoadedConfig, tmp_path: Path) -> None:
    here = here_of(loaded, tmp_path, nproc=1)
    (tmp_path / "rows.jsonl").unlink()
    report = report_of(loaded, here)
    assert report.data_files == []
    assert "there is no file" in report.files_note


def config_with(**data: Any) -> RunConfig:
    return RunConfig.model_validate({"model": "/m", "data": {"train": "/d", **data}, "output_dir": "/o"})


def test_the_config_is_flat_and_has_no_paths() -> None:
    flat = flat_config(config_with(eval="/e", template="/t"))
    assert "/" not in json.dumps(flat).replace("cosine/", "")
    assert flat["optim.lr"] == 2.0e-4
    assert flat["data.eval"] == "a file"
    assert flat["adapter.rank"] == 16
    assert not {"model.path", "model.tokenizer", "data.template", "output_dir"} & set(flat)


def test_the_name_of_a_template_is_compared_and_its_file_is_not() -> None:
    assert flat_config(config_with(template="lf:qwen3"))["data.template"] == "lf:qwen3"
    assert "data.template" not in flat_config(config_with(template="/t"))


def test_a_source_means_the_same_as_text_and_as_a_section() -> None:
    plain = flat_config(config_with(format="alpaca"))
    section = flat_config(config_with(train=[{"path": "/elsewhere", "format": "alpaca"}], format="alpaca"))
    assert plain == section
    weighted = flat_config(config_with(train=[{"path": "/d", "weight": 2.0}], format="alpaca"))
    assert {key for key in plain if plain[key] != weighted[key]} == {"data.train.0.weight"}


def test_every_other_key_is_compared() -> None:
    changed = RunConfig.model_validate(
        {"model": {"path": "/x", "revision": "r"}, "data": {"train": "/y", "max_length": 64}, "output_dir": "/z", "seed": 3,
         "adapter": None, "track": ["tensorboard"]}
    )  # fmt: skip
    plain, other = flat_config(config_with()), flat_config(changed)
    differing = {key for key in plain | other if plain.get(key) != other.get(key)}
    assert {key for key in differing if not key.startswith("adapter")} == {
        "model.revision",
        "data.max_length",
        "seed",
        "track",
    }
    assert other["adapter"] is None


@given(st.integers(0, 1 << 45), st.integers(1, 512), st.integers(1, 512), st.none() | st.integers(0, 1 << 45))
def test_something_is_always_left_to_the_system(memory: int, cores: int, nproc: int, shm: int | None) -> None:
    limits = replace(LIMITS, memory_bytes=memory, cores=cores, shm_free_bytes=shm)
    kept = reserve(limits, nproc=nproc, disk_bytes=None)
    assert kept["memory_bytes"] >= max(GIB, memory // 10)
    assert kept["cores"] == (cores > nproc)
    assert ("shm_bytes" in kept) == (shm is not None)
    assert "disk_bytes" not in kept


def test_disk_must_hold_kept_checkpoints_one_written_and_one_read_back() -> None:
    config = config_with()
    files = InputDigests(parameters=1_000_000, linear_in_out=10_000)
    assert checkpoints_bytes(config, files) == 16 * 10_000 * 12 * 5
    assert checkpoints_bytes(config.model_copy(update={"adapter": None}), files) == 1_000_000 * 12 * 5
    assert checkpoints_bytes(config, {"parameters": None}) is None
