"""From a loaded config to the plan: device, data, model facts, resume point."""

from dataclasses import dataclass
from typing import Any

from unisono.config import LoadedConfig
from unisono.facts import Environment, Machine, package_versions
from unisono.launch.asked import TrainRequest
from unisono.launch.attempt import Show
from unisono.launch.device import choose_device
from unisono.launch.tasks import run_task
from unisono.plan import DataSummary, DeviceChoice, ModelFacts, PlanInputs, ResumePoint, RunPlan, resolve_plan


@dataclass(frozen=True)
class Here:
    """What this machine and its environment are."""

    machine: Machine
    environment: Environment


def make_plan(
    request: TrainRequest,
    loaded: LoadedConfig,
    here: Here,
    *,
    run_id: str,
    resume: ResumePoint | None,
    resume_reason: str,
    ledger: bool,
    show: Show,
) -> RunPlan:
    """Prepares the data and decides everything else.

    Args:
        request: what was asked.
        loaded: the config, its paths absolute.
        here: machine and environment.
        run_id: the same over all starts of a run.
        resume: the checkpoint to go on from, or None.
        resume_reason: a line for people.
        ledger: whether data.json is written into the run's directory.
        show: sees the progress of the preparation.

    Raises:
        UnisonoError: if device, data, model or batch are refused.
    """
    config = loaded.config
    device, device_origin = choose_device(
        here.machine, wish=config.device, named=request.devices, visible=here.environment.visible_devices,
        torch_version=package_versions().get("torch", ""),
    )  # fmt: skip
    prepared = _prepare(request, loaded, here, ledger=ledger, show=show)
    threads, threads_origin = _threads(here)
    return resolve_plan(
        PlanInputs(
            config=config, run_id=run_id, output_dir=config.output_dir, host=here.machine.host, device=device,
            threads=threads, threads_origin=threads_origin, model=ModelFacts.model_validate(prepared["model"]),
            data=DataSummary.model_validate(prepared["data"]), resume=resume, resume_reason=resume_reason,
            ignored_variables=list(here.environment.leftovers),
            origins=_origins(loaded, device, device_origin), faults=request.faults,
        )
    )  # fmt: skip


def _prepare(
    request: TrainRequest, loaded: LoadedConfig, here: Here, *, ledger: bool, show: Show
) -> dict[str, Any]:
    config = loaded.config
    body: dict[str, Any] = {
        "config": config.model_dump(mode="json", by_alias=True),
        "cache_dir": str(here.environment.cache_dir),
        "output_dir": config.output_dir if ledger else None,
    }
    if request.limit_rows is not None:
        body["limit_rows"] = request.limit_rows
    return run_task("prepare", body, on_message=show, programs=request.programs)


def _threads(here: Here) -> tuple[int, str]:
    """Threads of the rank: part of what makes a run repeatable."""
    declared = here.environment.omp_num_threads
    if declared:
        return declared, "OMP_NUM_THREADS"
    return here.machine.cores, "the cores that this process may use"


def _origins(loaded: LoadedConfig, device: DeviceChoice, device_origin: str) -> dict[str, str]:
    return {**loaded.origins, "device": f"{device.name}: {device_origin}"}
