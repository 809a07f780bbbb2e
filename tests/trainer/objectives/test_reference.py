"""A reference is computed once, stored, verified, and kept out of memory; a run that is at its
reference has a known loss.

Run: pytest tests/trainer/objectives/test_reference.py
"""

import gc
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from unisono.trainer.model.forward import Forward, Rows
from unisono.trainer.training import reference

Train = Callable[..., Any]
_LORA = {"rank": 4, "alpha": 8}


@pytest.fixture
def pairs(pair_files: tuple[Path, Path]) -> dict[str, Any]:
    """The config of a run of DPO on 40 pairs."""
    data = {"train": str(pair_files[0]), "max_length": 64, "packing": False}
    return {"objective": "dpo", "data": data, "checkpoint": {"every": "2 steps", "keep": 9}}


def _steps(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if "loss" in line]


def _computed(run: Any) -> list[tuple[int, int]]:
    return [(message["computed"], message["reused"]) for message in run.of_kind("reference")]


# ---- A run that is at its reference


@pytest.mark.parametrize(
    "adapter",
    [_LORA, {**_LORA, "kind": "dora"}, {**_LORA, "init": "pissa"}, {**_LORA, "merge": True}, None],
    ids=["lora", "dora", "pissa", "merge", "full"],
)
def test_at_step_1_the_loss_is_ln_2_and_the_margin_0(
    train_here: Train, pairs: dict[str, Any], adapter: dict[str, Any] | None
) -> None:
    if adapter is not None and "merge" in adapter:
        adapter = {**adapter, "merge": [str(train_here().directory)]}
    first, *_, last = _steps(train_here(**pairs, adapter=adapter))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert first["rewards_chosen"] == pytest.approx(0, abs=1e-5)
    assert first["reward_accuracy"] == 0.5, "equal rewards count half"
    assert last["loss"] < math.log(2) - 0.01


def test_an_adapter_that_training_begins_with_is_off_in_its_reference(
    train_here: Train, pairs: dict[str, Any], tmp_path: Path
) -> None:
    """As in LLaMA-Factory.

    With the merged model as the reference, or with adapter.merge, it is on.
    """
    begun = train_here()
    adapter = {**_LORA, "from": str(begun.directory)}
    off = _steps(train_here(**pairs, adapter=adapter))[0]
    base = {"reference": str(begun.plan.model.directory)}
    named = _steps(train_here(**pairs, adapter=adapter, preference=base))[0]
    assert off["loss"] != pytest.approx(math.log(2), abs=1e-3)
    assert off["loss"] == pytest.approx(named["loss"], rel=1e-6)


def test_a_reference_with_a_name_is_that_model(
    train_here: Train, pairs: dict[str, Any], model_dir: Path
) -> None:
    other = train_here(adapter=None)
    own = _steps(train_here(**pairs, preference={"reference": str(model_dir)}))[0]
    assert own["loss"] == pytest.approx(math.log(2), abs=1e-6)
    moved = _steps(train_here(**pairs, preference={"reference": str(other.directory / "model")}))[0]
    assert moved["loss"] != pytest.approx(math.log(2), abs=1e-3)


# ---- Computed once


@pytest.fixture
def rows_without_gradient(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the rows of tokens whose log-probabilities are computed without a gradient, as those
    of a reference are.
    """
    counts: list[int] = []
    own = Forward.log_probs

    def log_probs(self: Forward, rows: Rows) -> torch.Tensor:
        if not torch.is_grad_enabled():
            counts.append(len(rows.lengths))
        return own(self, rows)

    monkeypatch.setattr(Forward, "log_probs", log_probs)
    return counts


@pytest.mark.parametrize("named", [False, True], ids=["auto", "a path"])
def test_three_epochs_need_as_many_rows_of_the_reference_as_one(
    train_here: Train,
    pairs: dict[str, Any],
    model_dir: Path,
    rows_without_gradient: list[int],
    *,
    named: bool,
) -> None:
    preference = {"preference": {"reference": str(model_dir)}} if named else {}
    run = train_here(**pairs, **preference, duration="3 epochs")
    assert run.plan.total_steps == 15
    assert sum(rows_without_gradient) == 2 * 40  # both answers of each pair
    assert _computed(run) == [(40, 0)]
    rows_without_gradient.clear()
    again = train_here(
        **pairs, **preference, duration="3 epochs", directory=run.directory,
        resume=(6, run.directory / "checkpoints" / "step-00000006"),
    )  # fmt: skip
    assert rows_without_gradient == []
    assert _computed(again) == [(0, 40)]
    assert again.losses == run.losses


def test_a_row_that_occurs_several_times_in_an_epoch_is_computed_once(
    train_here: Train, pairs: dict[str, Any], rows_without_gradient: list[int]
) -> None:
    weighted = [{"path": pairs["data"]["train"], "weight": 3}]
    run = train_here(**{**pairs, "data": {**pairs["data"], "train": weighted}}, duration="1 epoch")
    assert run.plan.data.train.rows == 120
    assert sum(rows_without_gradient) == 2 * 40


def test_no_second_model_stays_in_memory(train_here: Train, pairs: dict[str, Any], model_dir: Path) -> None:
    def models() -> int:
        gc.collect()
        return sum(isinstance(thing, transformers.PreTrainedModel) for thing in gc.get_objects())

    seen: list[int] = []

    def look(message: dict[str, Any], _: Any) -> None:
        if message["kind"] == "step":
            seen.append(models())

    for preference in ({}, {"preference": {"reference": str(model_dir)}}):
        for adapter in (_LORA, None):
            before = models()
            train_here(**pairs, **preference, adapter=adapter, duration="2 steps", on_message=look)
            one = 2  # the language model and its body
            assert set(seen) == {before + one}
            seen.clear()


# ---- The store


def test_a_resumed_run_is_bit_equal_also_with_a_store_that_is_damaged(
    train_here: Train, pairs: dict[str, Any]
) -> None:
    straight = train_here(**pairs)
    path = straight.directory / "checkpoints" / "step-00000004"
    figures = [{k: v for k, v in line.items() if _is_compared(k)} for line in straight.metrics]
    for damage in (None, _flip_a_value, lambda file: file.write_bytes(file.read_bytes()[:-3]), Path.unlink):
        folder = straight.directory.with_name("copy")
        shutil.copytree(straight.directory, folder)
        if damage is not None:
            damage(folder / "reference.safetensors")
        resumed = train_here(**pairs, directory=folder, resume=(4, path))
        assert [{k: v for k, v in line.items() if _is_compared(k)} for line in resumed.metrics] == figures
        warnings = [m["text"] for m in resumed.of_kind("warning") if m["code"] == "reference_damaged"]
        is_there = damage not in (None, Path.unlink)
        assert len(warnings) == is_there
        assert _computed(resumed) == [(0, 40) if damage is None else (40, 0)]
        mine, wanted = (load_file(run / "reference.safetensors") for run in (folder, straight.directory))
        assert torch.equal(mine["train"], wanted["train"])
        shutil.rmtree(folder)


def _is_compared(key: str) -> bool:
    return key not in ("tokens_per_second", "memory_bytes") and not key.endswith("_time_s")


def _flip_a_value(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def test_every_flipped_byte_of_a_store_is_noticed(tmp_path: Path) -> None:
    values: reference.Values = {"train": torch.randn(3, 2), "eval": torch.randn(1, 2)}
    tables: Any = {
        split: SimpleNamespace(table=SimpleNamespace(rows=len(value))) for split, value in values.items()
    }
    file, key = tmp_path / "reference.safetensors", "0" * 32
    intact = reference._encode(values, key)
    file.write_bytes(intact)
    found, _ = reference._read(file, key, tables)
    assert found is not None
    assert all(torch.equal(found[split], value) for split, value in values.items())
    for place in range(len(intact)):
        data = bytearray(intact)
        data[place] ^= 1
        file.write_bytes(data)
        read, why = reference._read(file, key, tables)
        same = read is not None and all(torch.equal(read[split], value) for split, value in values.items())
        assert same or (read is None and why), (place, intact[:place][-20:])


def test_store_of_other_packages_or_other_model_code_is_not_used(
    train_here: Train, pairs: dict[str, Any], tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    settings = {**pairs, "model": {"path": str(model), "dtype": "float32", "trust_remote_code": True}}
    run = train_here(**settings, duration="3 steps")
    begun = {"directory": run.directory, "resume": (2, run.directory / "checkpoints" / "step-00000002")}
    assert _computed(train_here(**settings, **begun, duration="3 steps")) == [(0, 40)]
    (model / "modeling_own.py").write_text("SCALE = 2\n", encoding="utf-8")
    assert _computed(train_here(**settings, **begun, duration="3 steps")) == [(40, 0)]
    monkeypatch.setattr(reference, "version", lambda name: "0")
    assert _computed(train_here(**settings, **begun, duration="3 steps")) == [(40, 0)]


@pytest.mark.parametrize("change", ["rows", "weights", "reference", "dtype"])
def test_a_store_of_other_weights_rows_or_settings_is_not_used(
    train_here: Train, pairs: dict[str, Any], tmp_path: Path, model_dir: Path, change: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    named = {"reference": str(model)} if change == "reference" else {}
    sections = {
        **pairs,
        **({"preference": named} if named else {}),
        "model": {"path": str(model_dir), "dtype": "float32"},
    }
    first = train_here(**sections, duration="2 steps")
    if change == "rows":
        rows = [json.loads(line) for line in Path(pairs["data"]["train"]).read_text().splitlines()]
        rows[7]["rejected"] += " house"
        file = tmp_path / "other.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections["data"] = {**sections["data"], "train": str(file)}
    if change in ("weights", "reference"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            loaded.model.norm.weight[0] += 0.5
        loaded.save_pretrained(model)
    if change == "weights":
        sections["model"]["path"] = str(model)
    if change == "dtype":
        sections["model"]["dtype"] = "bfloat16"
    second = train_here(**sections, duration="2 steps", directory=first.directory)
    assert _computed(second) == [(40, 0)]
    (warning,) = [m["text"] for m in second.of_kind("warning") if m["code"] == "reference_damaged"]
    assert "other weights, rows or settings" in warning
