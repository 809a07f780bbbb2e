"""Several adapters of one base model, served at once under names of their own.

Run: pytest tests/front/serve/test_adapters.py
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers

from tests import front_server
from tests.front.serve.conftest import LIMIT_S, Serve, Served

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.slow
QUESTIONS = ["what day is it", "call me", "today"]


def unisono(*words: object) -> "subprocess.CompletedProcess[str]":
    return front_server.run([sys.executable, "-m", "unisono", *map(str, words)], timeout=LIMIT_S)


@pytest.fixture(scope="module")
def adapters(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of different rank and targets, with random weights."""
    made = {}
    with torch.random.fork_rng():
        for seed, (name, rank, targets) in enumerate(
            [("a.one", 4, ["q_proj", "v_proj"]), ("two", 2, "all-linear")]
        ):
            torch.manual_seed(seed)
            base = transformers.AutoModelForCausalLM.from_pretrained(endless)
            settings = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=targets, init_lora_weights=False)
            made[name] = tmp_path_factory.mktemp("adapter") / name
            peft.get_peft_model(base, settings).save_pretrained(made[name])
    return made


def answers(served: Served, model: str, **options: Any) -> list[str]:
    settings: Any = {"temperature": 0, "max_tokens": 12} | options
    reply = served.client.completions.create(model=model, prompt=QUESTIONS, **settings)
    assert reply.model == model
    return [choice.text for choice in reply.choices]


def generated(target: object, tmp_path: Path) -> list[str]:
    """The answers of `unisono generate`."""
    (tmp_path / "prompts.txt").write_text("\n".join(QUESTIONS) + "\n")
    done = unisono(
        "generate", target, "--file", tmp_path / "prompts.txt", "--max-tokens", 12, "--json", "--raw"
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["answer"] for line in done.stdout.splitlines()]


def test_each_adapter_answers_as_alone_also_at_once(
    serve: Serve, endless: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    import openai

    served = serve(endless, *(f"--adapter={name}={path}" for name, path in adapters.items()))
    names = [served.model, *adapters]
    wanted = {
        name: generated(target, tmp_path)
        for name, target in zip(names, [endless, *adapters.values()], strict=True)
    }
    assert len({tuple(texts) for texts in wanted.values()}) == 3
    assert {name: answers(served, name) for name in names} == wanted
    with ThreadPoolExecutor(9) as pool:  # the base model between adapters, and back
        at_once = list(pool.map(lambda name: (name, answers(served, name)), names * 3))
    assert all(texts == wanted[name] for name, texts in at_once)
    listed = {model.id: getattr(model, "parent", None) for model in served.client.models.list()}
    assert listed == {served.model: None, **dict.fromkeys(adapters, served.model)}
    with pytest.raises(openai.NotFoundError) as caught:
        answers(served, "three")
    assert caught.value.param == "model"
    assert "'two'" in caught.value.body["message"]  # type: ignore[index]


def test_what_cannot_share_a_model_is_refused(
    endless: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    one, two = adapters.values()
    other = tmp_path / "other"
    transformers.AutoModelForCausalLM.from_pretrained(endless).save_pretrained(other)
    transformers.AutoTokenizer.from_pretrained(endless).save_pretrained(other)
    for words, said in (
        ([endless, "--adapter", "one"], "NAME=DIR"),
        ([endless, "--adapter", f"one={one}", "--adapter", f"one={two}"], "two models have the name"),
        ([one, "--adapter", f"two={two}"], "has an adapter itself"),
        ([endless, "--adapter", f"two={endless}"], "not an adapter"),
        ([other, "--adapter", f"two={two}"], "trained on a different base model"),
        ([endless, "--adapter", f"two={tmp_path / 'missing'}"], "missing"),
    ):
        done = unisono("serve", *words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
