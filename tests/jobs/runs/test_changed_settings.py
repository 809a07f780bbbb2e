"""A run that goes on with something changed: what is refused, what is told, what is kept.

Run: pytest tests/jobs/runs/test_changed_settings.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Loopback


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a run, but those that a start may leave beside it."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def warnings(text: str) -> list[str]:
    return [line.removeprefix("warning: ") for line in text.splitlines() if line.startswith("warning: ")]


@pytest.fixture
def died(front: Any) -> Any:
    """A run with stand-ins for its ranks that died after step 7, with checkpoints of steps 3 and
    6.
    """
    assert front.run(faults={"raise": 8}).returncode == 5
    return front


def test_changes_that_make_a_different_run_are_refused_until_allowed(
    died: Any,
) -> None:
    """They are refused before anything is touched, with the words that continue."""
    before = contents(died.out)
    overrides = ("optim.lr=1e-3", "seed=4", "checkpoint.keep=5")
    done = died.run(*overrides)
    assert done.returncode == 2
    first, *rest = errors(done.stderr)
    assert "would become a different one: 2 changes" in first
    assert rest == [
        "error: optim.lr is 0.001, and was 0.0002: updates are larger or smaller from here on",
        "error: seed is 4, and was 0: order, dropout and the evaluation split are drawn again: rows of this epoch may be repeated or"
        " skipped, and evaluation rows may have been trained on",
    ]  # fmt: skip
    lines = done.stderr.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(rest[0]))
    assert lines[at + 1 : at + 3] == [
        f"  where: command line; earlier: {died.out}/config.yaml",
        "  fix:   set optim.lr to 0.0002, or pass --allow optim.lr",
    ]
    assert contents(died.out) == before, "nothing is touched"
    typed = done.stderr.partition("pass ")[2].partition(" to resume")[0].split()
    assert typed == ["--allow", "optim.lr", "--allow", "seed"]
    assert died.run(*overrides, "--dry-run").returncode == 2
    again = died.run(*overrides, *typed)
    assert again.returncode == 0, again.stderr
    assert warnings(again.stderr)[:2] == [
        f"allowed: {rest[0].removeprefix('error: ')}",
        f"allowed: {rest[1].removeprefix('error: ')}",
    ]
    assert "checkpoint.keep is 5, and was 3: from here on; training does not change" in again.stderr
    assert died.steps() == list(range(1, 11))
    assert died.read("plan.json")["allowed"] == [
        {"key": "optim.lr", "before": 2e-4, "after": 1e-3, "from_step": 6},
        {"key": "seed", "before": 0, "after": 4, "from_step": 6},
    ]


def test_the_next_start_compares_with_what_really_ran(died: Any) -> None:
    assert died.run("optim.lr=1e-3", "--allow", "optim.lr", faults={"raise": 9}).returncode == 0
    longer = ("optim.lr=1e-3", "--resume", "duration=12 steps")
    again = died.run(*longer)
    assert again.returncode == 0, again.stderr
    assert not any("optim.lr is" in line for line in warnings(again.stderr))
    assert len(died.read("plan.json")["allowed"]) == 1, "what was allowed once is not forgotten"
    back = died.run("--resume", "duration=14 steps")
    assert back.returncode == 2
    assert "optim.lr is 0.0002, and was 0.001" in back.stderr


def test_a_start_whose_ranks_refuse_leaves_the_plan_of_the_one_that_ran(died: Any) -> None:
    before = {name: (died.out / name).read_bytes() for name in ("plan.json", "config.yaml", "environment.json")}  # fmt: skip
    done = died.run("adapter.targets=['q_proj']", "--allow", "adapter.targets", faults={"refuse": True})
    assert done.returncode == 2, done.stderr
    assert {name: (died.out / name).read_bytes() for name in before} == before
    assert died.run().returncode == 0, "the run as it was goes on without a word"


def test_what_costs_only_exactness_continues_with_a_line_that_reports_why(died: Any) -> None:
    died.environment["OMP_NUM_THREADS"] = "2"
    environment = died.read("environment.json")
    environment["packages"]["torch"] = "1.0"
    (died.out / "environment.json").write_text(json.dumps(environment))
    done = died.run("batch.micro=2", "memory.gradient_checkpointing=true", "eval.every=5 steps")
    assert done.returncode == 0, done.stderr
    reported = {line.partition(" ")[0]: line for line in warnings(done.stderr)}
    assert "sums are split among the threads" in reported["threads"]
    assert "set OMP_NUM_THREADS=1 to restore it" in reported["threads"]
    assert "sums are over different groups of sequences" in reported["micro_batch"]
    assert "activations are computed at different times" in reported["gradient_checkpointing"]
    assert "training does not" in reported["eval.every"]
    assert "losses may not be bit-exact" in reported["torch"]


def test_different_number_of_ranks_reports_what_is_and_is_not_the_same(
    died: Any,
) -> None:
    done = died.run("--nproc", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in warnings(done.stdout) if line.startswith("world_size")]
    assert (
        line == "world_size is 2, and was 1: the same rows in the same order; losses agree to rounding, not"
        " bit-exactly: sums over the ranks have a different order"
    )
    cut = died.run("--nproc", "2", "parallel.strategy=fsdp", "--dry-run")
    assert "strategy is fsdp, and was single: the same rows in the same order" in cut.stdout


def test_allow_refuses_unknown_words_and_reports_unneeded_ones(died: Any) -> None:
    """A refusal names the nearest key."""
    before = contents(died.out)
    done = died.run("--allow", "optim.lrr")
    assert done.returncode == 2
    assert "did you mean `optim.lr`?" in done.stderr
    assert contents(died.out) == before
    done = died.run("--allow", "optim.lr")
    assert done.returncode == 0
    assert "--allow optim.lr was not needed" in done.stderr


LONGER = ("--resume", "duration=5 steps")


@pytest.mark.slow
def test_changed_data_model_and_tokenizer_are_refused_until_each_allowed(
    finished: Any,
) -> None:
    """They are refused together."""
    finished.change_rows()
    finished.change_weights()
    finished.change_tokenizer()
    before = contents(finished.out)
    done = finished.train(*LONGER)
    assert done.returncode == 2, done.stderr
    assert "--allow model --allow tokenizer --allow data" in done.stderr
    assert contents(finished.out) == before, "not even the ledger of rows"
    again = finished.train(*LONGER, "--allow", "model", "--allow", "tokenizer", "--allow", "data")
    assert again.returncode == 0, again.stderr
    reported = "\n".join(warnings(again.stderr))
    assert "the adapter would continue on weights that it was not trained on" in reported
    assert "the same text gives different tokens than in training" in reported
    assert "24 sequences are done" in reported
    assert len(finished.losses()) == 5
    assert [entry["key"] for entry in finished.read("plan.json")["allowed"]] == ["model", "tokenizer", "data"]
    quiet = finished.train("--resume", "duration=6 steps", "--dry-run")
    assert quiet.returncode == 0, quiet.stderr
    assert warnings(quiet.stdout) == []


@pytest.mark.slow
def test_model_of_a_different_shape_is_refused_though_it_was_allowed(
    finished: Any,
) -> None:
    """The run stays as it was."""
    config = json.loads((finished.model / "config.json").read_text())
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(finished.model, finished.folder / "kept")
    LlamaForCausalLM(LlamaConfig(**{**config, "hidden_size": 64})).save_pretrained(finished.model)
    plan = (finished.out / "plan.json").read_bytes()
    done = finished.train(*LONGER, "--allow", "model")
    assert done.returncode == 7, done.stderr
    assert "does not match the trainable parameters of this run" in done.stderr
    assert (finished.out / "plan.json").read_bytes() == plan
    shutil.rmtree(finished.model)
    (finished.folder / "kept").rename(finished.model)
    quiet = finished.train(*LONGER, "--dry-run")
    assert quiet.returncode == 0, quiet.stderr
    lines = [line for line in warnings(quiet.stdout) if not line.startswith("the learning rate rises")]
    assert lines, "the run was carried to another folder"
    assert all(line.endswith(("the rows are the same", "its files have the same content")) for line in lines)


@pytest.mark.slow
def test_moved_files_continue_and_an_allowed_setting_has_its_effect(finished: Any, straight: Any) -> None:
    finished.rows.rename(finished.folder / "moved.jsonl")
    moved = f"data.train={finished.folder / 'moved.jsonl'}"
    done = finished.train(*LONGER, moved, "optim.weight_decay=200.0", "--allow", "optim.weight_decay")
    assert done.returncode == 0, done.stderr
    assert "the rows are the same" in done.stderr
    weights = [
        load_file(out / "adapter" / "adapter_model.safetensors") for out in (straight.out, finished.out)
    ]
    sizes = [sum(float(tensor.square().sum()) for tensor in part.values()) for part in weights]
    assert sizes[1] < 0.95 * sizes[0], "the checkpoint's own weight decay does not come back"


@pytest.mark.long
@pytest.mark.ranks
def test_of_several_nodes_the_head_decides_and_the_others_need_no_allow(
    tmp_path: Path, model_dir: Path, rows_file: Path
) -> None:
    job = Job(Loopback(), tmp_path, model=model_dir, rows=rows_file, caches=tmp_path / "caches", nodes=2)
    try:
        _all_well(job, [("--nproc", "1"), ("--nproc", "1")])
        longer = ("--nproc", "1", "--resume", "duration=6 steps", "optim.lr=1e-3")
        head = job.start(0, *longer, json=False)
        other = job.start(1, *longer, "--allow", "optim.lr", json=False)
        assert (head.wait(), other.wait()) == (2, 3), head.text() + other.text()
        assert "optim.lr is 0.001, and was 0.01" in head.text()
        assert "pass --allow optim.lr to resume" in head.text()
        assert "node 0" in other.text()
        assert "--allow optim.lr" in other.text()
        _all_well(job, [(*longer, "--allow", "optim.lr"), longer])
        assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4, 5, 6]
    finally:
        job.close()


def _all_well(job: Job, words: list[tuple[str, ...]]) -> None:
    fronts = [job.start(node, *of_node, json=False) for node, of_node in enumerate(words)]
    for front in fronts:
        assert front.wait() == 0, front.text()
    job.wait_gone()


def test_longer_schedule_that_raises_the_learning_rate_names_both_rates(front: Any) -> None:
    assert front.run().returncode == 0
    done = front.run("duration=20 steps", "--resume")
    assert done.returncode == 0, done.stderr
    (line,) = [text for text in warnings(done.stderr) if text.startswith("the learning rate rises")]
    rates = [json.loads(text)["lr"] for text in (front.out / "metrics.jsonl").read_text().splitlines()]
    assert f"from {rates[9]:.2g} in step 10 to {rates[10]:.2g} in step 11" in line
    assert "now spans 20 steps, and spanned 10" in line
    assert line in front.read("plan.json")["warnings"]


def test_a_longer_schedule_resumes_where_the_plan_of_before_has_no_steps(front: Any) -> None:
    assert front.run().returncode == 0
    plan = front.read("plan.json")
    del plan["total_steps"]
    (front.out / "plan.json").write_text(json.dumps(plan))
    done = front.run("duration=20 steps", "--resume")
    assert done.returncode == 0, done.stderr
    assert not [text for text in warnings(done.stderr) if text.startswith("the learning rate rises")]


def test_a_rate_that_does_not_rise_is_not_told(front: Any) -> None:
    assert front.run("optim.schedule=constant").returncode == 0
    done = front.run("optim.schedule=constant", "duration=20 steps", "--resume")
    assert done.returncode == 0, done.stderr
    assert not [text for text in warnings(done.stderr) if text.startswith("the learning rate rises")]
