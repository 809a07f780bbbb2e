"""Several adapters of one base model, served at once under names of their own.

Run: pytest tests/front/serve/test_adapters.py
"""

import json
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers

from tests import front_server
from tests.front.serve.conftest import LIMIT_S, Reply, Serve, Served, wait_until

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
        ([one, "--adapter", f"two={two}"], "already has an adapter"),
        ([endless, "--adapter", f"two={endless}"], "not an adapter"),
        ([other, "--adapter", f"two={two}"], "trained on a different base model"),
        ([endless, "--adapter", f"two={tmp_path / 'missing'}"], "missing"),
    ):
        done = unisono("serve", *words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture
def folder(adapters: dict[str, Path], tmp_path: Path) -> Path:
    """A directory with the adapters, from which clients may load."""
    made = tmp_path / "allowed"
    for name, path in adapters.items():
        shutil.copytree(path, made / name)
    return made


@pytest.fixture
def loading(serve: Serve, endless: Path, folder: Path, tmp_path: Path) -> Served:
    """A server with a key that lets clients load adapters."""
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    served = serve(endless, "--key-file", key, "--adapter-folders", folder)
    served.key = "secret"
    return served


def load(served: Served, name: str, path: object) -> Reply:
    return served.send("/v1/load_lora_adapter", json.dumps({"lora_name": name, "lora_path": str(path)}))


def unload(served: Served, name: str) -> Reply:
    return served.send("/v1/unload_lora_adapter", json.dumps({"lora_name": name}))


def test_adapters_come_and_go_while_the_base_model_answers(
    loading: Served, endless: Path, adapters: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    wanted = {name: generated(path, tmp_path) for name, path in adapters.items()}
    base = generated(endless, tmp_path)
    running = loading.stream(max_tokens=400)
    events = running.events()
    next(events)
    assert load(loading, "one", "a.one").status == 200  # relative to the folder
    assert load(loading, "two", folder / "two").status == 200
    assert answers(loading, "one") == wanted["a.one"]
    assert answers(loading, "two") == wanted["two"]
    assert answers(loading, loading.model) == base
    assert {model.id for model in loading.client.models.list()} == {loading.model, "one", "two"}
    assert unload(loading, "one").status == 200
    assert load(loading, "again", "a.one").status == 200
    assert answers(loading, "again") == wanted["a.one"]
    assert unload(loading, "again").status == unload(loading, "two").status == 200
    assert answers(loading, loading.model) == base
    assert load(loading, "two", "two").status == 200  # after the last one has gone
    assert answers(loading, "two") == wanted["two"]
    texts = [event["choices"][0]["text"] for event in events if event["choices"]]
    plain = loading.post(max_tokens=400).body["choices"][0]["text"]
    assert plain.endswith("".join(texts))


def test_an_adapter_is_unloaded_after_its_last_answer(loading: Served) -> None:
    assert load(loading, "one", "a.one").status == 200
    running = loading.stream(model="one", max_tokens=300)
    events = running.events()
    next(events)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(unload, loading, "one")
        wait_until(lambda: loading.post(model="one", max_tokens=1).status == 404)
        assert unload(loading, "one").status == 404
        assert load(loading, "one", "two").status in (200, 409)
        ended = [event["choices"][0]["finish_reason"] for event in events][-1]
        assert pending.result().status == 200
    assert ended == "length"


def test_a_bad_adapter_is_refused_without_paths_and_the_server_goes_on(
    loading: Served, endless: Path, adapters: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    before = loading.post(max_tokens=8).body["choices"]
    damaged = shutil.copytree(folder / "two", folder / "damaged")
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    wrong = shutil.copytree(folder / "two", folder / "wrong")
    settings = json.loads((wrong / "adapter_config.json").read_text())
    (wrong / "adapter_config.json").write_text(json.dumps({**settings, "r": 3}))
    nowhere = shutil.copytree(folder / "two", folder / "nowhere")
    settings = {**settings, "base_model_name_or_path": str(tmp_path)}
    (nowhere / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "empty").mkdir()
    (folder / "out").symlink_to(adapters["two"])
    linked = shutil.copytree(folder / "two", folder / "linked")
    (linked / "secret.txt").symlink_to("/etc/hostname")
    paths = ("damaged", "wrong", "nowhere", "empty", "out", "linked", "missing", "../..", ".", "/etc", "a\0b")
    for path in (*paths, str(folder), adapters["two"]):
        reply = load(loading, "bad", path)
        message = reply.body["error"]["message"]
        assert reply.status == 400, (path, reply)
        assert reply.body["error"]["param"] == "lora_path"
        assert "/" not in message, message
    assert load(loading, loading.model, "two").body["error"]["code"] == "name_taken"
    assert unload(loading, loading.model).status == 404
    assert loading.post(max_tokens=8).body["choices"] == before
    assert load(loading, "good", "two").status == 200
    assert load(loading, "good", "two").body["error"]["code"] == "name_taken"
    assert answers(loading, "good") == generated(adapters["two"], tmp_path)
    assert loading.post(max_tokens=8).body["choices"] == before


def test_loaded_adapters_outlive_the_process_of_the_model(
    loading: Served, folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    wanted = generated(adapters["a.one"], tmp_path)
    assert load(loading, "one", "a.one").status == load(loading, "gone", "two").status == 200
    shutil.rmtree(folder / "two")
    loading.task().send_signal(signal.SIGKILL)
    wait_until(lambda: loading.post(model="gone", max_tokens=1).status == 404)
    assert answers(loading, "one") == wanted


def test_adapters_are_loaded_only_with_a_key_and_allowed_folders(
    server: Served, loading: Served, endless: Path, folder: Path
) -> None:
    assert load(server, "one", folder / "two").status == 404
    loading.key = "wrong"
    assert load(loading, "one", "two").status == 401
    assert unload(loading, "one").status == 401
    for words, said in (
        ([endless, "--adapter-folders", folder], "there is no key"),
        ([endless, "--adapter-folders", folder / "missing"], "is not a directory"),
    ):
        done = unisono("serve", *words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
