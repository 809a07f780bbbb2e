"""Optimizers in a file of the user's own. Run: pytest tests/trainer/training/test_own_optimizer.py

How a file is trusted and compared is in tests/front/api/test_own_objective.py and
tests/jobs/nodes/test_files.py.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from unisono.base.errors import ConfigError, UsageError
from unisono.jobs.runs.node_report import flat_config
from unisono.jobs.runs.plan_changes import _code_findings
from unisono.jobs.runs.train_request import named_code_digests, refuse_code, with_absolute_paths
from unisono.trainer.config import RunConfig, build_config, optimizers
from unisono.trainer.config.optimizers import OptimizerKind
from unisono.trainer.config.schedules import SCHEDULES
from unisono.trainer.config.training_sections import OptimSection
from unisono.trainer.training.optim import build_optimizers

Train = Callable[..., Any]
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "python.md"


@pytest.fixture
def lion(tmp_path: Path) -> Path:
    """The file of the how-to page."""
    (code,) = re.findall(r"```python\n# lion.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "lion.py").write_text(code)
    return tmp_path / "lion.py"


def losses(run: Any) -> list[float]:
    return [message["loss"] for message in run.of_kind("step")]


@pytest.mark.parametrize("adapter", [{"rank": 4}, None])
def test_the_optimizer_of_the_how_to_trains_and_resumes_bit_exactly(
    train_here: Train, lion: Path, adapter: dict[str, Any] | None
) -> None:
    settings: dict[str, Any] = {
        "optim": {"kind": f"{lion}:Lion", "lr": 1e-3, "options": {"betas": [0.9, 0.99]}},
        "adapter": adapter,
        "checkpoint": {"every": "3 steps"},
    }
    whole = train_here(**settings)
    assert losses(whole)[-1] < losses(whole)[0]
    checkpoint = whole.directory / "checkpoints" / "step-00000003"
    with safe_open(checkpoint / "optimizer-own.safetensors", "pt") as file:
        assert {key.rpartition("::")[2] for key in file.keys()} == {"mean"}  # noqa: SIM118 - not a mapping
    resumed = train_here(resume=(3, checkpoint), **settings)
    assert losses(resumed) == losses(whole)[3:]


def test_values_that_an_optimizer_keeps_in_its_groups_are_restored(train_here: Train, lion: Path) -> None:
    counted = lion.read_text().replace(
        "for group in self.param_groups:",
        "for group in self.param_groups:\n            group['lr'] /= 1 + group.setdefault('steps', 0)\n      "
        "      group['steps'] += 1",
    )
    lion.write_text(counted)
    settings = {"optim": {"kind": f"{lion}:Lion", "lr": 1e-3}, "checkpoint": {"every": "3 steps"}}
    whole = train_here(**settings)
    resumed = train_here(resume=(3, whole.directory / "checkpoints" / "step-00000003"), **settings)
    assert losses(resumed) == losses(whole)[3:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('setdefault("mean", ', 'setdefault("set", set()) or self.state[p].setdefault("mean", '), ".weight, a set:"),
        (("mean.lerp_", "self.state['all']['steps'] = 1; mean.lerp_"), "`state['all']`"),
        (
            ("group in self.param_groups:", "group in self.param_groups:\n            group['at'] = torch.ones(1)"),
            "`at` of a parameter group, a Tensor",
        ),
    ],
)  # fmt: skip
def test_state_a_checkpoint_cannot_hold_is_refused_after_the_first_step(
    train_here: Train, lion: Path, change: tuple[str, str], said: str
) -> None:
    lion.write_text(lion.read_text().replace(*change))
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        train_here(optim={"kind": f"{lion}:Lion"}, duration="2 steps")
    assert "a checkpoint cannot hold it" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "options", "what", "line"),
    [
        (("torch.optim.Optimizer", "list"), {}, "not a subclass of torch.optim.Optimizer", ""),
        (("import torch", "import torch, nothing_such"), {}, "nothing_such", ":1"),
        (("", ""), {"beta": 1}, "beta", ""),
    ],
)
def test_class_that_is_no_optimizer_or_takes_other_arguments_is_refused(
    train_here: Train, lion: Path, change: tuple[str, str], options: dict[str, Any], what: str, line: str
) -> None:
    lion.write_text(lion.read_text().replace(*change))
    with pytest.raises(ConfigError) as raised:
        train_here(optim={"kind": f"{lion}:Lion", "options": options}, duration="1 steps")
    (problem,) = raised.value.problems
    assert "the optimizer" in problem.what
    assert what in problem.what
    assert problem.where.endswith(line)


def test_a_class_of_torch_is_one_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    line = OptimizerKind("torch.optim:SGD", ("options",), state_values=1)
    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", line)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    section = OptimSection.model_validate({"kind": "sgd", "lr": 0.5, "options": {"momentum": "1e-1"}})
    made = build_optimizers(section, {"w": weight}, not_matrices=set())
    made.step()
    assert weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert made.parts["sgd"].param_groups[0]["momentum"] == 0.1
    assert line.state_bytes("float32") == 4


def test_its_file_needs_trust_is_named_by_path_and_compared_by_content(lion: Path) -> None:
    raw = {"model": "m", "data": {"train": "d"}, "output_dir": "o", "optim": {"kind": "lion.py:Lion"}}
    config = with_absolute_paths(RunConfig.model_validate(raw), lion.parent)
    assert config.optim.kind == f"{lion}:Lion"
    assert flat_config(config)["optim.kind"] == "lion.py:Lion"
    with pytest.raises(UsageError, match="code that has not been trusted") as raised:
        refuse_code(config, {"optim.kind": "train.yaml:7"})
    assert raised.value.problems[0].where == "train.yaml:7"
    (name, before), *_ = named_code_digests(config).items()
    assert name == "optimizer lion.py"
    lion.write_text(lion.read_text() + "\n")
    assert named_code_digests(config)[name] != before


def test_a_changed_file_is_a_change_that_can_be_allowed() -> None:
    raw = {"model": "m", "data": {"train": "d"}, "output_dir": "o", "optim": {"kind": "/a/lion.py:Lion"}}
    config = RunConfig.model_validate(raw).model_dump(mode="json", by_alias=True)
    before, after = ({"config": config, "code_digests": {"optim.kind": digest}} for digest in "ab")
    (finding,) = _code_findings(before, after, set())
    assert (finding.name, finding.verdict) == ("optim.kind", "refused")
    assert finding.text.startswith(
        "the file of optim.kind /a/lion.py:Lion has changed: updates may be different"
    )
    assert _code_findings(before, before, set()) == []


def test_sharded_weights_and_unknown_names_are_refused_by_the_schema() -> None:
    raw: dict[str, object] = {"model": "m", "data": {"train": "d"}, "output_dir": "o"}
    sharded = {**raw, "optim": {"kind": "/a/lion.py:Lion"}, "parallel": {"strategy": "fsdp"}}
    with pytest.raises(ValueError, match="this optimizer needs full tensors, but fsdp shards them"):
        RunConfig.model_validate(sharded)
    with pytest.raises(ConfigError) as raised:
        build_config(raw | {"optim": {"kind": "adamv", "schedule": "cosin"}}, lines={}, name="c.yaml")
    assert [(p.what, p.fix) for p in raised.value.problems] == [
        (
            f"optim.kind: must be one of {', '.join(f'`{name}`' for name in optimizers.OPTIMIZERS)} or a class in your own file, `FILE.py:CLASS`, got 'adamv'",
            "did you mean `adamw`?",
        ),
        (f"optim.schedule: must be one of {', '.join(f'`{name}`' for name in SCHEDULES)}, got 'cosin'", "did you mean `cosine`?"),
    ]  # fmt: skip
