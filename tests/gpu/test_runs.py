"""Whole runs on one CUDA device, as a user starts them.

Run: pytest -m gpu tests/gpu/test_runs.py

All runs that do not disturb each other are begun at once, by the fixture `runs`, and each test
waits for those that it reads.
"""

import contextlib
import json
import secrets
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests import needs
from tests.gpu.whole_runs import (
    BFLOAT16,
    DEVICE,
    DIES_AT,
    EXACT,
    FULL,
    LIMIT_S,
    NAMED_S,
    NF4,
    PACED,
    STEPS,
    UNISONO,
    Runs,
)
from tests.grouped_files import write_grouped
from tests.ports import free_port
from unisono.guard.facts.processes import living_ranks
from unisono.trainer.config import RunConfig
from unisono.trainer.model.forward import Rows, choose_forward
from unisono.trainer.model.load import load_for_training
from unisono.trainer.model.quantization import dequantized, quantized_layers, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REFUSED_S = 20.0  # ten times what a refusal takes; a run that is not refused takes longer
MOST_BYTES = 300 << 20  # on the device; the process itself takes more host memory
KINDS: dict[str, dict[str, Any]] = {"lora": EXACT, "full": {**EXACT, **FULL}}
"""What is resumed: an adapter, of which each step is kept in memory, and a model, of which
checkpoints are.
"""


@pytest.fixture(scope="module")
def place(model_dir: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A folder for all of them."""
    made = Runs(tmp_path_factory.mktemp("runs"), model_dir, rows_file)
    yield made
    made.close()


@pytest.fixture(scope="module")
def runs(place: Runs, pair_files: tuple[Path, Path]) -> Runs:
    """All runs that do not disturb each other; those that others wait for come first."""
    made = place
    dpo: dict[str, Any] = {
        "objective": "dpo",
        "data": {"train": str(pair_files[0])},
        "optim": {"lr": 5e-3},
        "duration": "6 steps",
    }
    dies = {"die": {"rank": 0, "step": DIES_AT, "how": "sigkill"}, **PACED}
    for kind, sections in KINDS.items():
        made.train(f"{kind} killed", faults=dies, **sections)
    made.train("full float32", **FULL)
    made.train("lora bfloat16", **BFLOAT16)
    for kind, sections in KINDS.items():
        made.train(f"{kind} undisturbed", **sections)
    made.train("full bfloat16", **BFLOAT16, **FULL)
    made.train("dpo", **dpo)
    made.train("dpo bfloat16", **dpo, **BFLOAT16)
    if find_spec("bitsandbytes") is not None:
        made.train("nf4", **NF4)
        made.train("nf4 on the cpu", **NF4, device="cpu")
    made.train("full float32 on the cpu", **FULL, device="cpu")
    made.train("dpo on the cpu", **dpo, device="cpu")
    own = f"{made.folder / 'objectives.py'}:TooLarge"
    made.train("too large", "--json", "--trust-code", objective=own)
    tiny = {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.00001"}
    made.train("no room for the model", "--json", env=tiny)
    return made


@pytest.fixture(scope="module")
def uses(runs: Runs) -> Runs:
    """The programs that use results."""
    full, lora = runs.ended("full float32").out, runs.ended("lora bfloat16").out
    data = ("--data", str(runs.rows), "--json")
    on_cpu = {"CUDA_VISIBLE_DEVICES": ""}
    prompt = ("1 red cat sings", "--max-tokens", "16", "--json")
    runs.call("export", *UNISONO, "export", str(lora), str(runs.folder / "merged"), "--merge")
    runs.call("eval", *UNISONO, "eval", str(full), *data)
    runs.call("eval on the cpu", *UNISONO, "eval", str(full), *data, env=on_cpu)
    runs.call("generate", *UNISONO, "generate", str(full), *prompt)
    runs.call("generate on the cpu", *UNISONO, "generate", str(full), *prompt, env=on_cpu)
    runs.call("eval of the adapter", *UNISONO, "eval", str(lora), *data)
    runs.ended("export").check()
    runs.call("eval of the merged model", *UNISONO, "eval", str(runs.folder / "merged"), *data)
    return runs


def _falls(losses: list[float]) -> bool:
    """Whether the losses are numbers, and those of the last third are below those of the first."""
    third = len(losses) // 3
    return all(loss == loss and abs(loss) < 100 for loss in losses) and sum(losses[-third:]) < sum(
        losses[:third]
    )


@pytest.mark.parametrize("name", ["full float32", "lora bfloat16", "full bfloat16"])
def test_run_ends_with_falling_losses_and_shows_the_device_and_memory(runs: Runs, name: str) -> None:
    run = runs.ended(name).check()
    assert len(run.losses) == STEPS
    assert _falls(run.losses), run.losses
    device = run.read("plan.json")["device"]
    assert (device["kind"], device["name"]) == (DEVICE, torch.cuda.get_device_name(0))
    assert device["uuid"].startswith("GPU-")
    (shown,) = [line for line in run.stderr.splitlines() if line.startswith("device")]
    assert device["name"] in shown
    assert device["uuid"] in shown
    assert all(0 < line["memory_bytes"] < MOST_BYTES for line in run.metrics)
    assert run.read("result.json")["outcome"] == "completed"
    plan = run.read("plan.json")
    assert (plan["world_size"], plan["strategy"]) == (1, "single")
    facts = run.event("ready")["facts"]
    # torch's flash attention computes in 16 bits only.
    assert facts["layout"] == ("flat" if "bfloat16" in name else "padded"), facts["why"]
    assert facts["head"] == "chunked"


def test_losses_in_float32_are_those_of_the_cpu(runs: Runs) -> None:
    here, cpu = (runs.ended(name).check() for name in ("full float32", "full float32 on the cpu"))
    assert here.losses[:6] == pytest.approx(cpu.losses[:6], rel=1e-3)
    assert here.losses == pytest.approx(
        cpu.losses, rel=1e-2
    )  # AdamW divides small differences by small numbers
    assert [grad for _, grad in here.figures][:4] == pytest.approx(
        [grad for _, grad in cpu.figures][:4], rel=1e-2
    )


def test_losses_in_bfloat16_are_near_those_in_float32(runs: Runs) -> None:
    exact, rounded = (runs.ended(name).check() for name in ("full float32", "full bfloat16"))
    assert rounded.losses == pytest.approx(exact.losses, rel=0.03)


def test_one_device_has_no_process_group_and_no_socket(place: Runs) -> None:
    """Whatever a launcher has left behind."""
    left = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}  # fmt: skip
    config = place.write("alone", **BFLOAT16, duration="200 steps")
    seen, ranks = [], set[int]()
    with subprocess.Popen(
        [*UNISONO, "train", str(config)], env={**place.environment, **left}, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            seen.append(line)
            if line.startswith("step") and not ranks:
                ranks = {*living_ranks(process.pid)}
                for pid in [process.pid, *ranks]:
                    with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended since has none
                        assert psutil.Process(pid).net_connections("inet") == []
                process.terminate()
    assert ranks, "".join(seen)
    assert process.returncode in (75, 0), "".join(seen)  # 0: it was through before the signal came
    assert any(line.startswith("ignored") for line in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_deterministic_run_is_bit_equal_to_undisturbed(runs: Runs, kind: str) -> None:
    dead = runs.ended(f"{kind} killed").check(5)
    verdict = dead.read("verdict.json")
    assert (verdict["cause"], verdict["ranks"]) == ("rank_killed", [0])
    again = runs.run([*UNISONO, "train", str(runs.folder / f"{kind} killed.yaml")], dead.out).check()
    resumed = again.read("plan.json")["resume"]["step"]
    # Finished steps of an adapter are kept in the front's memory: each, unless that would take a
    # hundredth of its time.
    assert 16 <= resumed < DIES_AT if kind == "lora" else resumed == 16
    print(f"resumed at step {resumed}")
    wanted = runs.ended(f"{kind} undisturbed").check()
    assert again.figures == wanted.figures
    assert again.weights() == wanted.weights()


def test_without_deterministic_the_losses_are_the_same_up_to_rounding(runs: Runs) -> None:
    exact, usual = (runs.ended(name).check() for name in ("lora undisturbed", "lora bfloat16"))
    differ = [step for step, (a, b) in enumerate(zip(exact.figures, usual.figures, strict=True), 1) if a != b]
    print(f"steps whose bits differ with and without `deterministic: true`: {differ or 'none'}")
    assert usual.losses == pytest.approx(exact.losses, rel=0.02)


def test_memory_that_runs_out_in_a_step_is_named_with_what_saves_some(runs: Runs) -> None:
    run = runs.ended("too large").check(5)
    (verdict,) = [line for line in run.lines if line["kind"] == "verdict"]
    assert (verdict["cause"], verdict["ranks"], verdict["phase"]) == ("cuda_oom", [0], "train")
    assert torch.cuda.get_device_name(0) in verdict["summary"]
    assert verdict["step"] >= 1
    assert verdict["fix"]
    assert run.seconds < LIMIT_S / 2


def test_memory_that_runs_out_while_the_model_is_loaded_is_named(runs: Runs) -> None:
    run = runs.ended("no room for the model").check(5)
    (verdict,) = [line for line in run.lines if line["kind"] == "verdict"]
    assert (verdict["cause"], verdict["ranks"], verdict["phase"]) == ("cuda_oom", [0], "load_model")


def test_quantized_base_trains_with_the_losses_it_has_on_the_cpu(runs: Runs) -> None:
    needs.package("bitsandbytes")
    here, cpu = (runs.ended(name).check() for name in ("nf4", "nf4 on the cpu"))
    assert _falls(here.losses), here.losses
    assert here.losses[:6] == pytest.approx(cpu.losses[:6], rel=5e-3)
    assert here.event("ready")["facts"]["quick"]


def test_dpo_has_the_losses_and_metrics_that_it_has_on_the_cpu(runs: Runs) -> None:
    here, cpu = (runs.ended(name).check() for name in ("dpo", "dpo on the cpu"))
    assert here.losses[0] == pytest.approx(0.693147, rel=1e-4), "the adapter starts as the reference"
    for name in ("loss", "reward_margin", "logps_chosen"):
        found, wanted = ([line[name] for line in run.metrics] for run in (here, cpu))
        assert found == pytest.approx(wanted, rel=1e-2, abs=1e-3), name


def test_dpo_in_bfloat16_has_flat_rows_and_the_losses_in_float32(runs: Runs) -> None:
    exact, rounded = (runs.ended(name).check() for name in ("dpo", "dpo bfloat16"))
    assert rounded.event("ready")["facts"]["layout"] == "flat"
    assert rounded.losses == pytest.approx(exact.losses, rel=0.1)


def test_results_are_evaluated_and_answer_as_on_the_cpu(uses: Runs) -> None:
    figures = [uses.ended(name).check().lines[-1] for name in ("eval", "eval on the cpu")]
    assert figures[0]["loss"] == pytest.approx(figures[1]["loss"], rel=1e-4)
    answers = [uses.ended(name).check().lines[-1] for name in ("generate", "generate on the cpu")]
    assert answers[0]["answer"] == answers[1]["answer"]


def test_a_merged_model_has_the_loss_of_the_adapter_on_its_base(uses: Runs) -> None:
    adapter, merged = (
        uses.ended(name).check().lines[-1]["loss"]
        for name in ("eval of the adapter", "eval of the merged model")
    )
    assert merged == pytest.approx(adapter, rel=0.02)


@pytest.mark.parametrize("layout", [{"layout": "gptq", "shuffled": True}, {"layout": "gptq_v2", "bits": 8, "group": 32}, {"layout": "gemm"}], ids=["gptq", "gptq_v2", "awq"])  # fmt: skip
def test_weights_of_gptq_and_awq_have_the_values_that_they_have_on_the_cpu(
    model_dir: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    values = write_grouped(model_dir, tmp_path / "model", **layout)
    config = RunConfig.model_validate(
        {"model": str(tmp_path / "model"), "data": {"train": "-"}, "output_dir": "-"}
    )
    losses = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        directory = tmp_path / "model"
        loaded = load_for_training(
            config, directory=directory, tokenizer_directory=directory, dtype="float32", device=torch.device(device)
        )  # fmt: skip
        layers = dict(quantized_layers(loaded.model))
        assert len(layers) == len(values)
        for name, layer in layers.items():
            assert layer.weight.device.type == device
            found = dequantized(layer.weight, state_of(layer), torch.float32)
            wanted = next(value for key, value in values.items() if _plain(key) in _plain(name))
            assert torch.equal(found.cpu(), wanted), name
        forward = choose_forward(loaded, dtype="float32", quick_adapter=True, gradient_checkpointing=False)
        ids = torch.arange(40, device=device)
        losses.append(forward.loss(Rows(ids, ids, [40], ids[:-1], ids[1:]), count=39).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def _plain(name: str) -> str:
    """A layer's name without what peft puts around it."""
    return name.removeprefix("base_model.model.").removesuffix(".weight").replace(".base_layer", "")


REFUSALS: dict[str, tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]] = {
    "more ranks than devices": (
        ("--nproc", "64"),
        {},
        ("--nproc requests 64 ranks", "every rank has its own device"),
    ),
    "one device twice": (
        ("--nproc", "2", "--devices", "0,0"),
        {},
        ("names one device twice", "two ranks on one device"),
    ),
    "a device that does not exist": (("--devices", "77"), {}, ("there is no device 77", "one of 0 (GPU-")),
    "all devices hidden": ((), {"CUDA_VISIBLE_DEVICES": ""}, ("there is no CUDA device", "hides all")),
    "the device hidden": (
        ("--devices", "0"),
        {"CUDA_VISIBLE_DEVICES": "63"},
        ("there is no CUDA device", "CUDA_VISIBLE_DEVICES=63"),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_devices_that_cannot_be_had_are_refused_before_anything_starts(place: Runs, case: str) -> None:
    words, env, said = REFUSALS[case]
    name = f"refused {case}"
    command = [*UNISONO, "train", str(place.write(name)), *words]
    done = place.run(command, place.folder / name, env).check(2)
    assert all(part in done.stderr for part in said), done.stderr
    assert not done.out.exists()
    assert done.seconds < REFUSED_S


def test_two_nodes_on_one_device_are_refused_by_agreement(place: Runs) -> None:
    """NCCL would fail with "Duplicate GPU detected", or hang."""
    config = place.write("two nodes")
    env = {**place.environment, "UNISONO_TOKEN": secrets.token_hex(32)}
    port = free_port()
    fronts = [
        subprocess.Popen(
            [*UNISONO, "train", str(config), "--nodes", "2", "--node-rank", str(node), "--head", f"127.0.0.1:{port}", "--nproc", "1",
             "--devices", "0", "--join-timeout", "60"],
            env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for node in range(2)
    ]  # fmt: skip
    texts = [front.communicate(timeout=LIMIT_S)[1] for front in fronts]
    assert [front.returncode for front in fronts] == [3, 3], texts
    for text in texts:
        assert "duplicate_gpu" in text, text
    assert not (place.folder / "two nodes" / "metrics.jsonl").exists()


def test_doctor_sees_the_device_and_finds_driver_and_torch_fit_for_it(place: Runs) -> None:
    done = place.run([*UNISONO, "doctor", str(place.write("doctor")), "--json"], place.folder / "doctor")
    checks = json.loads(done.stdout)["checks"]
    assert done.returncode == (6 if any(check["status"] == "fail" for check in checks) else 0), done.stdout
    print(*(f"{check['id']}: {check['status']}: {check['evidence']}" for check in checks), sep="\n")
    found = {check["id"]: check for check in checks if check["id"].startswith("devices.")}
    for name in ("devices.seen", "devices.selection", "devices.driver", "devices.health"):
        assert found[name]["status"] in ("pass", "warn"), found[name]
    assert torch.cuda.get_device_name(0) in str(found["devices.seen"]["evidence"])
    assert torch.__version__.partition("+")[0] in str(found["devices.driver"]["evidence"])


def test_a_stopped_rank_is_named(place: Runs) -> None:
    config = place.write("stopped", **BFLOAT16, duration="100000 steps")
    program = place.program("stopped", {"stop": {"rank": 0, "step": 9}})
    done = place.run([*program, "train", str(config), "--json"], place.folder / "stopped").check(4)
    verdict = done.read("verdict.json")
    assert (verdict["cause"], verdict["ranks"]) == ("rank_stopped", [0])
    assert verdict["named_after_s"] < NAMED_S


def test_a_kernel_that_does_not_end_is_named_and_its_rank_is_ended(place: Runs) -> None:
    """The last test: meanwhile the device computes little else."""
    own = f"{place.folder / 'objectives.py'}:Endless"
    config = place.write(
        "endless", **BFLOAT16, duration="100000 steps", objective=own, watch={"stall_after": "20 seconds"}
    )
    command = [*UNISONO, "train", str(config), "--json", "--trust-code"]
    done = place.run(command, place.folder / "endless").check(4)
    verdict = done.read("verdict.json")
    print(json.dumps(verdict, indent=1))
    assert verdict["cause"] == "user_code_stuck"
    assert "waits for a GPU" in verdict["summary"]
    assert (verdict["ranks"], verdict["phase"]) == ([0], "compute")
    assert verdict["named_after_s"] < NAMED_S
