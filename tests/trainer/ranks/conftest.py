"""Plans for one and for several ranks of the same run; each is made once, when a test first asks
for it.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

from tests import needs
from tests.grouped_files import write_grouped
from tests.trainer.batches import rollouts
from tests.trainer.objectives.grpo import rewards
from tests.trainer.objectives.labelled import labelled_rows, similar_rows, write_rows
from tests.trainer.ranks.front import Ended, Front
from unisono.base.events import Reporter
from unisono.base.messages import Message
from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.trainer.config import RunConfig
from unisono.trainer.config.own_code import own_code_digests
from unisono.trainer.plan import DataSummary, ModelFacts, PlanInputs, ResumePoint, RunPlan, resolve_plan
from unisono.trainer.plan.task_requests import PrepareRequest
from unisono.trainer.task import data_tasks
from unisono.trainer.training.front_io import StopRequest
from unisono.trainer.training.rank_run import run_plan
from unisono.trainer.worker.injected_faults import faults_of

_CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=10**10, bfloat16=True)

# What runs differ in, beside the number of ranks and the strategy. Twenty steps, a short last
# batch, a remainder over four ranks.
_COMMON: dict[str, Any] = {
    "duration": "3.65 epochs", "batch": {"global": 10, "micro": 2}, "checkpoint": {"every": "7 steps", "keep": 9},
}  # fmt: skip
_GPTQ = "gptq"  # the model in files of GPTQ
_EXPERTS = "experts"  # a mixture of experts
_ROUTED: dict[str, Any] = {
    "model": {"path": _EXPERTS}, "adapter": None, "duration": "8 steps",
    "optim": {"lr": 1e-3, "router_loss": {"load_balancing": 0.5, "z_loss": 0.1}},
}  # fmt: skip
_WEIGHTED = "weighted"  # rows of several answers, some of which count in part
_SIMILAR = "similar texts"
_LABELLED, _SEVERAL = "one label", "several labels"  # rows to classify
KINDS: dict[str, dict[str, Any]] = {
    "lora": {
        "data": {"eval": 0.1},
        "eval": {"every": "10 steps", "exact_match": True, "samples": 1, "metrics": [f"{rewards.__file__}:longer", "rouge_l", "bleu"]},
    },
    "dropout": {"adapter": {"dropout": 0.1}},
    "full": {"adapter": None, "optim": {"lr": 1e-3}, "memory": {"gradient_checkpointing": True}},
    "compact": {"adapter": None, "optim": {"lr": 1e-3, "state_dtype": "bfloat16"}, "duration": "10 steps"},
    "dora": {"adapter": {"kind": "dora", "modules_to_save": ["norm"]}, "duration": "8 steps"},
    "mixed": {"model": {"dtype": "bfloat16"}},
    "mixed_full": {"adapter": None, "model": {"dtype": "bfloat16"}, "duration": "4 steps"},
    "weighted": {"data": {"train": _WEIGHTED}, "batch": {"global": 6, "micro": 1}, "duration": "8 steps"},
    "narrow": {"adapter": {"rank": 2}, "batch": {"global": 2, "micro": 1}, "duration": "8 steps"},
    "nan": {"duration": "6 steps"},
    "dpo": {"objective": "dpo", "data": {"packing": True, "eval": 0.2}, "duration": "8 steps"},
    "kto": {"objective": "kto", "data": {"packing": True, "eval": 0.2}, "duration": "8 steps"},
    "orpo": {"objective": "orpo", "adapter": None, "optim": {"lr": 1e-3}, "duration": "8 steps"},
    "simpo": {"objective": "simpo", "data": {"eval": 0.2}, "duration": "8 steps"},
    "reward": {"objective": "reward", "data": {"packing": True, "eval": 0.2}, "duration": "8 steps"},
    "classify": {
        "objective": "classify", "data": {"train": _LABELLED, "packing": True, "eval": 0.2}, "classify": {"class_weights": "balanced"},
        "adapter": None, "optim": {"lr": 1e-3}, "duration": "8 steps",
    },
    "labels": {"objective": "classify", "data": {"train": _SEVERAL, "eval": 0.2}, "duration": "8 steps"},
    "embed": {"objective": "embed", "data": {"train": _SIMILAR, "eval": 0.2}, "duration": "8 steps"},
    "embed_full": {
        "objective": "embed", "data": {"train": _SIMILAR, "packing": True, "eval": 0.2}, "adapter": None, "optim": {"lr": 1e-3}, "duration": "8 steps",
    },
    "nf4": {"model": {"quantize": "nf4", "dtype": "float32"}, "duration": "4 steps"},
    "int8": {"model": {"quantize": "int8", "quantize_embeddings": True, "dtype": "float32"}, "duration": "4 steps"},
    "gptq": {"model": {"path": _GPTQ, "dtype": "float32"}, "duration": "4 steps"},
    "experts": _ROUTED,
    "experts_whole": {**_ROUTED, "batch": {"global": 10, "micro": 10}},
    "grpo": {
        "objective": "grpo", "rewards": [f"{rewards.__file__}:thirds", {"use": "length", "max": 4, "weight": 0.1}],
        "rollout": {"group": 4, "max_new_tokens": 6}, "grpo": {"truncated": "keep", "beta": 0.1},
        "data": {"eval": 0.1}, "eval": {"every": "4 steps"}, "batch": {"global": 12, "micro": 2}, "duration": "8 steps",
    },
    # One prompt in a step: a rank without one makes no forward while the other samples.
    "grpo_few": {
        "objective": "grpo", "rewards": [f"{rewards.__file__}:thirds"], "rollout": {"group": 4, "max_new_tokens": 6},
        "grpo": {"truncated": "keep", "beta": 0.1}, "adapter": None, "optim": {"lr": 1e-3}, "batch": {"global": 4, "micro": 2}, "duration": "4 steps",
    },
    "rollouts": {"objective": f"{rollouts.__file__}:Reinforce", "batch": {"global": 8, "micro": 1}, "duration": "10 steps"},
}  # fmt: skip
Key = TypeVar("Key")
Value = TypeVar("Value")
_QUANTIZED = ("nf4", "int8", "gptq")  # one import of bitsandbytes, in a single start, serves two of them
CLASSIFIERS = ("classify", "labels")
PREFERENCES = ("dpo", "kto", "orpo", "simpo", "reward")


_FIGURE = re.compile("(eval_)?(loss$|kl$|accuracy$|f1$|rewards?_|logps_|router_|experts?_)")


@dataclass
class Done:
    """A run that has ended: its directory, its plan, and what each rank said."""

    plan: RunPlan
    ended: Ended

    @property
    def directory(self) -> Path:
        return Path(self.plan.output_dir)

    @property
    def figures(self) -> list[dict[str, float]]:
        """Loss and metrics of the objective, of each step and evaluation."""
        return [{key: line[key] for key in line if _FIGURE.match(key)} for line in self.metrics]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics if "loss" in line]

    @property
    def result(self) -> dict[str, Any]:
        return self.ended.last(0)

    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = [*self.directory.glob("adapter/*.safetensors"), *self.directory.glob("model/*.safetensors")]
        return load_file(file)


class _Kept(Reporter):
    def __init__(self) -> None:
        super().__init__(None)
        self.messages: list[dict[str, Any]] = []

    def send(self, message: Message) -> None:
        self.messages.append({**message})


class Workshop:
    """Makes plans and does runs."""

    kinds = KINDS

    def __init__(self, model_dir: Path, files: dict[str, Path], folder: Path) -> None:
        """`files` are the rows for an objective, and under "sft" those of the others."""
        self.model_dir, self._files, self.folder = model_dir, files, folder
        self._count = 0

    def plan(
        self, kind: str, *, world: int = 1, strategy: str = "auto", resume: Path | None = None, **more: Any
    ) -> RunPlan:
        """The plan of one run.

        Args:
            kind: one of KINDS.
            world: ranks.
            strategy: auto, ddp or fsdp.
            resume: a checkpoint.
            more: `faults`, and config sections over those of the kind.
        """
        faults = more.pop("faults", {})
        if self.kinds[kind].get("model", {}).get("quantize"):
            needs.package("bitsandbytes")
        out = self._folder()
        config = self._config(self.kinds[kind] | more, out, strategy)
        prepared = data_tasks.prepare(PrepareRequest(config, self.folder / "cache", str(out)), _Kept())
        places = [
            RankPlace(rank=rank, node_rank=0, local_rank=rank, host="here", device=_CPU)
            for rank in range(world)
        ]
        return resolve_plan(
            PlanInputs(
                config=config, run_id="test", output_dir=str(out), host="here", threads=1, threads_origin="test", device=_CPU,
                model=ModelFacts.model_validate(prepared["model"]), data=DataSummary.model_validate(prepared["data"]),
                resume=ResumePoint(step=int(resume.name.removeprefix("step-")), path=str(resume)) if resume else None,
                resume_reason="", faults=faults, ranks=places if world > 1 else [],
                code_digests=own_code_digests(config),
            )
        )  # fmt: skip

    def alone(self, plan: RunPlan) -> Done:
        """One rank, in this process."""
        report = _Kept()
        result = run_plan(plan, report, StopRequest(), hooks=faults_of(plan))
        return Done(plan, Ended([[*report.messages, {"kind": "result", **result}]], [0], [], 0.0))

    def together(self, plans: list[RunPlan], *options: str) -> list[Done]:
        """Several runs of the same ranks, one after the other."""
        found = Front(plans, self._folder(), options=options).listen()
        assert found[0].codes == [0] * plans[0].world_size, "\n".join(
            log.read_text()[-3000:] for log in found[0].logs
        )
        return [Done(plan, ended) for plan, ended in zip(plans, found, strict=True)]

    def one(self, plan: RunPlan, **options: Any) -> Done:
        """A start of real workers, however it ends."""
        (ended,) = Front([plan], self._folder(), **options).listen()
        return Done(plan, ended)

    def _in_files_of_gptq(self) -> Path:
        directory = self.folder / _GPTQ
        if not directory.exists():
            write_grouped(self.model_dir, directory, layout="gptq", shuffled=True)
        return directory

    def _with_experts(self) -> Path:
        directory = self.folder / _EXPERTS
        if not directory.exists():
            tokenizer = AutoTokenizer.from_pretrained(self.model_dir)
            config = MixtralConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, num_local_experts=4, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
            torch.manual_seed(0)
            MixtralForCausalLM(config).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        return directory

    def _weighted_rows(self) -> Path:
        file = self.folder / "weighted.jsonl"
        if not file.exists():
            rows = [json.loads(line) for line in self._files["sft"].read_text("utf-8").splitlines()]
            weights = (0.25, 1, 0.5, 0, 0.125)
            turns = [
                [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"], "weight": weights[i % 5]}]
                for i, row in enumerate(rows)
            ]  # fmt: skip
            talks = [{"messages": first + second} for first, second in itertools.pairwise(turns)]
            file.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks), encoding="utf-8")
        return file

    def _folder(self) -> Path:
        self._count += 1
        folder = self.folder / f"{self._count:03d}"
        folder.mkdir()
        return folder

    def _config(self, sections: dict[str, Any], out: Path, strategy: str) -> RunConfig:
        raw: dict[str, Any] = {
            "model": {"path": str(self.model_dir), "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8},
            "data": {"train": str(self._files.get(sections.get("objective", "sft"), self._files["sft"])), "max_length": 64, "packing": False}, "optim": {"lr": 1e-2}, "device": "cpu",
            "output_dir": str(out), "parallel": {"strategy": strategy},
        }  # fmt: skip
        for key, value in (_COMMON | sections).items():
            both = isinstance(value, dict) and isinstance(raw.get(key), dict)
            raw[key] = {**raw[key], **value} if both else value
        if raw["model"]["path"] == _GPTQ:
            raw["model"]["path"] = str(self._in_files_of_gptq())
        if raw["model"]["path"] == _EXPERTS:
            raw["model"]["path"] = str(self._with_experts())
        if raw["data"]["train"] == _SIMILAR:
            raw["data"]["train"] = str(write_rows(self.folder / "similar.jsonl", similar_rows(60)))
        if raw["data"]["train"] in (_LABELLED, _SEVERAL):
            several = raw["data"]["train"] == _SEVERAL
            raw["data"]["train"] = str(
                write_rows(self.folder / f"labelled-{several}.jsonl", labelled_rows(60, several=several))
            )
        if raw["data"]["train"] == _WEIGHTED:
            raw["data"]["train"] = str(self._weighted_rows())
        return RunConfig.model_validate(raw)


@pytest.fixture(scope="session")
def workshop(
    model_dir: Path,
    rows_file: Path,
    pair_files: tuple[Path, Path],
    rated_files: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Workshop:
    """Where runs are made."""
    files = {kind: rated_files[0] if kind == "kto" else pair_files[0] for kind in PREFERENCES}
    return Workshop(model_dir, {"sft": rows_file, **files}, tmp_path_factory.mktemp("ranks"))


class MadeOnDemand(dict[Key, Value]):
    """Runs, each made when a test first asks for it: no test waits for those of others."""

    def __init__(self, make: Callable[[Key], Mapping[Key, Value]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Key) -> Value:
        self.update(self._make(key))
        return self[key]


@pytest.fixture(scope="session")
def alone(workshop: Workshop) -> dict[str, Done]:
    """Each kind of run on one rank."""
    return MadeOnDemand(lambda kind: {kind: workshop.alone(_plan_of(workshop, kind, 1, "auto"))})


def _plan_of(workshop: Workshop, kind: str, world: int, strategy: str) -> RunPlan:
    faults = {"nan_steps": [3]} if kind == "nan" else {}
    return workshop.plan(kind, world=world, strategy=strategy, faults=faults)


def _both_ways(workshop: Workshop, world: int, kind: str) -> dict[tuple[str, str, int], Done]:
    kinds = _QUANTIZED if kind in _QUANTIZED else (kind,)
    runs = [(one, way) for one in kinds for way in ("ddp", "fsdp")]
    done = workshop.together([_plan_of(workshop, one, world, way) for one, way in runs])
    return {(one, way, world): run for (one, way), run in zip(runs, done, strict=True)}


@dataclass
class Resumed:
    """A run that went on from step 7 of another, and the run that was not stopped."""

    straight: Done
    resumed: Done


def _checkpoint(plan: RunPlan) -> Path:
    return Path(plan.output_dir) / "checkpoints" / "step-00000007"


@pytest.fixture(scope="session")
def two(workshop: Workshop) -> dict[tuple[str, str, int], Done]:
    """Each kind on two ranks, both ways in one start."""
    return MadeOnDemand(lambda key: _both_ways(workshop, 2, key[0]))


@pytest.fixture(scope="session")
def four(workshop: Workshop) -> dict[tuple[str, str, int], Done]:
    """The same on four ranks."""
    return MadeOnDemand(lambda key: _both_ways(workshop, 4, key[0]))


@pytest.fixture(scope="session")
def resumed(
    workshop: Workshop, alone: dict[str, Done], two: dict[tuple[str, str, int], Done]
) -> dict[tuple[str, str, str], Resumed]:
    """By kind, who wrote the checkpoint (one, ddp, fsdp), and who went on from it."""

    def make(key: tuple[str, str, str]) -> dict[tuple[str, str, str], Resumed]:
        kind, source, way = key
        straight = alone[kind] if source == "one" else two[kind, source, 2]
        checkpoint = _checkpoint(straight.plan)
        if way == "one":
            return {key: Resumed(straight, workshop.alone(workshop.plan(kind, resume=checkpoint)))}
        (run,) = workshop.together([workshop.plan(kind, world=2, strategy=way, resume=checkpoint)])
        return {key: Resumed(straight, run)}

    return MadeOnDemand(make)
