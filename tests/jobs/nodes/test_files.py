"""Nodes that read other files. Run: pytest tests/jobs/nodes/test_files.py"""

import json
import shutil
from pathlib import Path

import pytest

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.verdict_checks import refused

pytestmark = pytest.mark.ranks


def own_rows(job: Job, node: int, rows_file: Path) -> Path:
    """Gives a node a copy of the rows."""
    copy = job.home(node) / rows_file.name
    shutil.copy(rows_file, copy)
    job.config(node, data={"train": str(copy)})
    return copy


def own_model(job: Job, node: int, model_dir: Path) -> Path:
    """Gives a node a copy of the model."""
    copy = job.home(node) / "model"
    shutil.copytree(model_dir, copy)
    job.config(node, model={"path": str(copy)})
    return copy


@pytest.mark.fault("optim.lr differs on one node")
def test_a_setting_that_differs_is_named_with_both_values(trio: Job) -> None:
    trio.config(2, optim={"lr": 1e-5})
    fronts = trio.start_all()
    verdict = refused(fronts, "config_mismatch", hosts=[fronts[2].host])
    assert "optim.lr" in verdict.summary
    assert "1e-5" in verdict.summary
    assert "0.01" in verdict.summary


def test_an_override_on_one_node_alone_is_a_difference(trio: Job) -> None:
    fronts = [trio.start(node, *(["seed=7"] if node == 1 else [])) for node in range(3)]
    verdict = refused(fronts, "config_mismatch", hosts=[fronts[1].host])
    assert "seed" in verdict.summary


@pytest.mark.fault("one word of the data differs")
def test_one_changed_word_in_the_data_of_one_node_is_found(trio: Job, rows_file: Path) -> None:
    rows = own_rows(trio, 1, rows_file)
    text = rows.read_text()
    rows.write_text(text.replace("house", "mouse", 1))
    fronts = trio.start_all()
    verdict = refused(fronts, "data_mismatch", hosts=[fronts[1].host])
    assert rows_file.name in str(verdict.to_json())


def write_llamafactory_file(job: Job, node: int, rows: Path, *, response: str) -> None:
    """Gives a node a LLaMA-Factory file with a dataset_info.json of its own."""
    data = job.home(node) / "data"
    data.mkdir()
    entry = {"file_name": str(rows), "columns": {"prompt": "prompt", "response": response}}
    (data / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    keys = {
        "model_name_or_path": str(job.model), "stage": "sft", "do_train": True, "dataset": "mine", "template": "alpaca", "cutoff_len": 64,
        "output_dir": str(job.out), "max_steps": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "use_cpu": True,
    }  # fmt: skip
    (job.home(node) / "c.yaml").write_text(json.dumps(keys))


def test_a_different_dataset_info_on_one_node_is_found(trio: Job, rows_file: Path) -> None:
    for node in range(3):
        write_llamafactory_file(trio, node, rows_file, response="prompt" if node == 2 else "completion")
    fronts = trio.start_all()
    verdict = refused(fronts, "data_mismatch", hosts=[fronts[2].host])
    assert "columns" in str(verdict.to_json())


@pytest.mark.fault("two rows swapped on one node")
def test_rows_in_a_different_order_are_other_data(trio: Job, rows_file: Path) -> None:
    rows = own_rows(trio, 0, rows_file)
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([lines[1], lines[0], *lines[2:], ""]))
    fronts = trio.start_all()
    refused(fronts, "data_mismatch", hosts=[fronts[0].host])


@pytest.mark.fault("other tokenizer.json on one node")
def test_a_different_tokenizer_on_one_node_is_found(trio: Job, model_dir: Path) -> None:
    directory = own_model(trio, 2, model_dir)
    path = directory / "tokenizer.json"
    body = json.loads(path.read_text())
    body["model"]["merges"] = body["model"]["merges"][:-1]
    path.write_text(json.dumps(body))
    fronts = trio.start_all()
    verdict = refused(fronts, "tokenizer_files_mismatch", hosts=[fronts[2].host])
    assert "tokenizer.json" in str(verdict.to_json())


@pytest.mark.fault("one flipped bit in the weights of one node")
def test_one_flipped_bit_in_the_weights_of_one_node_is_found(trio: Job, model_dir: Path) -> None:
    directory = own_model(trio, 1, model_dir)
    (path,) = directory.glob("*.safetensors")
    body = bytearray(path.read_bytes())
    body[-100] ^= 1
    path.write_bytes(body)
    fronts = trio.start_all()
    verdict = refused(fronts, "weights_mismatch", hosts=[fronts[1].host])
    assert path.name in str(verdict.to_json())


@pytest.mark.slow  # three nodes train after the refusal
def test_flipped_bit_in_one_nodes_reference_is_found_and_paths_may_differ(
    trio: Job, model_dir: Path, pair_files: tuple[Path, Path]
) -> None:
    trio.config(objective="dpo", data={"train": str(pair_files[0])}, duration="1 steps")
    for node in range(3):
        shutil.copytree(model_dir, trio.home(node) / f"ref{node}")
        trio.config(node, preference={"reference": f"ref{node}"})
    (path,) = (trio.home(1) / "ref1").glob("*.safetensors")
    body = bytearray(path.read_bytes())
    path.write_bytes(body[:-100] + bytes([body[-100] ^ 1]) + body[-99:])
    fronts = trio.start_all()
    verdict = refused(fronts, "weights_mismatch", hosts=[fronts[1].host])
    assert f"preference.reference: {path.name}" in str(verdict.to_json())
    path.write_bytes(body)
    fronts = trio.start_all()
    assert [front.wait() for front in fronts] == [0, 0, 0], trio.transcript()
    named = json.loads((trio.out / "plan.json").read_text())["config"]["preference"]["reference"]
    assert named == str(trio.home(0) / "ref0"), "absolute, so that the run can be evaluated from anywhere"


def test_a_file_that_one_node_has_not_got_ends_all_at_once(trio: Job, rows_file: Path) -> None:
    """That node refuses by itself, and tells the head, so that the others do not wait for it."""
    trio.config(2, data={"train": str(rows_file.parent / "absent.jsonl")})
    fronts = trio.start_all()
    codes = [front.wait() for front in fronts]
    assert codes[:2] == [3, 3], trio.transcript()
    assert codes[2] in (2, 3), trio.transcript()
    assert "absent.jsonl" in fronts[2].text()
    for front in fronts[:2]:
        assert fronts[2].label in front.text()


def test_a_broken_config_on_one_node_ends_all_at_once(trio: Job) -> None:
    """The node itself says where the mistake is, exit 2; the others say who refused, exit 3, and do
    not wait.
    """
    (trio.home(1) / "c.yaml").write_text("model: builtin:tiny\noptimm: {lr: 1}\n")
    fronts = trio.start_all()
    codes = [front.wait() for front in fronts]
    assert codes == [3, 2, 3], trio.transcript()
    assert "optimm" in fronts[1].text()
    for front in (fronts[0], fronts[2]):
        assert fronts[1].label in front.text(), front.text()
    took = max(front.ended or 0 for front in fronts) - max(front.started for front in fronts)
    assert took < 20


def own_objective(job: Job, node: int, power: int) -> None:
    """Gives a node an objective in a file of its own."""
    file = job.home(node) / "focal.py"
    file.write_text(
        "import unisono\n\nclass Focal(unisono.Objective):\n    def loss(self, forward, micro, *, counts,"
        " known=0.0):\n        log_probs = forward.log_probs(micro.rows)\n        loss = -((1 -"
        f" log_probs.exp()) ** {power} * log_probs).sum() / counts.loss_tokens\n        return"
        " unisono.Part(loss, loss.new_zeros(0))\n"
    )
    job.config(node, objective=f"{file}:Focal")


def test_another_file_of_an_own_objective_on_one_node_is_found(trio: Job) -> None:
    for node in range(3):
        own_objective(trio, node, 3 if node == 1 else 2)
    fronts = [trio.start(node, "--trust-code") for node in range(3)]
    verdict = refused(fronts, "code_mismatch", hosts=[fronts[1].host])
    assert "objective focal.py" in str(verdict.to_json())
