"""`unisono push` with a stand-in of the hub: what is uploaded, what the card shows and hides, and
what is refused.

Run: pytest tests/front/hub/test_push.py
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests import front_server
from tests.front.hub.standin import TOKEN, Fault, Hub, Repo, environment, running_hub
from tests.ports import free_port
from tests.session_server import start_server
from tests.shared_fork_server import SHARED
from unisono.base.files import read_object, write_json
from unisono.front.hub.publish import public_config
from unisono.guard.supervise.child_process import child_environment

if TYPE_CHECKING:
    import subprocess

Push = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[3]
CONFIG = {
    "model": "builtin:tiny", "adapter": {"rank": 2}, "data": {"train": "secret-place/rows.jsonl", "eval": 0.2, "max_length": 128},
    "duration": "3 steps", "batch": {"global": 4}, "eval": {"every": "2 steps", "samples": 0}, "checkpoint": {"every": "1 steps"}, "output_dir": "runs/demo",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run with three checkpoints."""
    folder = tmp_path_factory.mktemp("pushed")
    (folder / "secret-place").mkdir()
    rows = (ROOT / "examples" / "data" / "train.jsonl").read_text().splitlines()[:40]
    (folder / "secret-place" / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "train.yaml").write_text(yaml.safe_dump(CONFIG))
    env = os.environ | {"XDG_CONFIG_HOME": str(folder / "keys"), "OMP_NUM_THREADS": "1"}
    done = front_server.run([sys.executable, "-m", "unisono", "train", "train.yaml"], cwd=folder, env=env, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "demo"


@dataclass(frozen=True)
class Exports:
    """Where what `push` exports is forked: by a server of its own, as the session's has imported
    the address of a different hub.

    Attributes:
        port: of the hub, for all tests of the file.
        home: HF_HOME.
        socket: of the server.
    """

    port: int
    home: Path
    socket: Path


@pytest.fixture(scope="module")
def exports(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exports]:
    folder, port, home = tmp_path_factory.mktemp("exports"), free_port(), finished.parent / "hf"
    hub = environment(f"http://127.0.0.1:{port}", home, XDG_CONFIG_HOME=str(finished.parents[1] / "keys"))
    ours = {
        name: value for name, value in child_environment(threads=1).items() if os.environ.get(name) != value
    }
    process, socket = start_server(folder, hub | ours)
    yield Exports(port, home, socket)
    process.kill()
    process.wait()


@pytest.fixture
def hub(exports: Exports) -> Iterator[Hub]:
    """An empty hub, at the port of the file."""
    with running_hub(exports.port) as hub:
        yield hub


@pytest.fixture
def push(hub: Hub, exports: Exports, finished: Path) -> Push:
    """`unisono push RUN anna/small …`, by somebody who is logged in, or is not."""
    front_server.wait_for_rank_server(str(exports.socket))

    def give(
        run: Path, *words: str, logged_in: bool = True, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        login = exports.home / "token"
        login.parent.mkdir(exist_ok=True)
        login.write_text(TOKEN) if logged_in else login.unlink(missing_ok=True)
        given = {"XDG_CONFIG_HOME": str(finished.parents[1] / "keys"), SHARED: str(exports.socket)} | more
        command = [sys.executable, "-m", "unisono", "push", str(run), "anna/small", *words]
        return front_server.run(command, env=environment(hub.url, exports.home) | given, timeout=300)

    return give


def test_the_adapter_and_its_card_are_uploaded_and_compared(hub: Hub, push: Push, finished: Path) -> None:
    dry = push(finished, "--dry-run", "--json", logged_in=False)
    assert dry.returncode == 0, dry.stderr
    shown: dict[str, Any] = json.loads(dry.stdout)
    assert not hub.created
    done = push(finished, "--private", "--json", logged_in=False, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    repo = hub.repos["anna/small"]
    files = repo.commits[repo.head]
    assert repo.private
    assert told["commit"] == repo.head
    assert told["files"] == shown["files"]
    assert {file["path"] for file in shown["files"]} == set(files)
    assert files["README.md"].decode() == shown["card"]
    final = finished / "adapter" / "adapter_model.safetensors"
    assert files["adapter_model.safetensors"] == final.read_bytes()
    everything = b"\n".join(
        body for name, body in files.items() if not name.endswith(".safetensors")
    ).decode()
    for hidden in (str(finished.parent), str(ROOT), "secret-place", TOKEN):
        assert hidden not in everything, hidden
    assert TOKEN not in done.stdout + done.stderr


def test_the_card_is_made_from_the_run(push: Push, finished: Path) -> None:
    dry = push(finished, "--dry-run", logged_in=False)
    card = dry.stdout
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["unisono", "sft", "lora"]}  # fmt: skip
    plan = read_object(finished / "plan.json")
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert "LORA adapter (rank 2) of `builtin:tiny`" in text
    assert "| rows.jsonl | 40 |" in text
    assert plan["data"]["files_digest"] in text
    assert f"loss: {losses[0]:.4f} at step 1, {losses[-1]:.4f} at step 3" in text
    assert re.search(r"\| 2 \| \d+\.\d{4} \|", text)
    assert "torch " in text
    config = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert config["adapter"]["rank"] == 2
    assert config["data"]["train"] == "rows.jsonl"
    assert "output_dir" not in config
    assert re.search(r"^ *\d.*B  adapter_model.safetensors$", text, re.MULTILINE)


def test_a_run_without_a_readable_plan_is_not_uploaded(push: Push, finished: Path) -> None:
    plan = finished / "plan.json"
    whole = plan.read_text()
    try:
        plan.write_text(whole[:-40])
        done = push(finished, "--dry-run", logged_in=False)
    finally:
        plan.write_text(whole)
    assert done.returncode == 2, done.stderr
    assert "the plan of the run cannot be read, and the card is made from it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_merged_model_is_uploaded(hub: Hub, push: Push, finished: Path) -> None:
    done = push(finished, "--merge")
    assert done.returncode == 0, done.stderr
    files = hub.repos["anna/small"].commits[hub.repos["anna/small"].head]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert "adapter_config.json" not in files
    assert b"library_name: transformers" in files["README.md"]
    assert "compared with the hub's digests" in done.stdout


def test_an_unfinished_run_is_refused_unless_a_checkpoint_is_named(
    hub: Hub, push: Push, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "demo"
    shutil.copytree(finished, run)
    result = read_object(run / "result.json")
    write_json(run / "result.json", result | {"outcome": "died", "exit_code": 5})
    done = push(run)
    assert done.returncode == 2
    assert "its outcome is died" in done.stderr
    assert "--step N" in done.stderr
    assert not hub.created
    done = push(run, "--step", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "steps: 2 of 3" in done.stdout
    done = push(run, "--step", "99", "--dry-run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_damaged_or_unlisted_result_is_refused(
    hub: Hub, push: Push, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "demo"
    shutil.copytree(finished, run)
    weights = run / "adapter" / "adapter_model.safetensors"
    body = weights.read_bytes()
    weights.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    done = push(run)
    assert done.returncode == 7
    assert "adapter_model.safetensors" in done.stderr
    weights.write_bytes(body)
    (run / "adapter" / "unisono_manifest.json").unlink()
    done = push(run)
    assert done.returncode == 2
    assert "cannot be verified" in done.stderr
    assert not hub.created


UPLOAD = """
import sys
from pathlib import Path
from unisono.front.cli.app import main
from unisono.front.hub import publish
from unisono.front.hub.download import RemoteFile, digest_of
folder = Path(sys.argv[1])
files = tuple(RemoteFile(p.name, p.stat().st_size, digest_of(p, git=False)) for p in sorted(folder.iterdir()))
made = publish.Publication("anna/small", folder, "adapter", "", files)
publish.prepare = lambda *_, **__: made
publish.refuse_unready = lambda *_: None
main(["push", "--debug", str(folder), "anna/small"])
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory as `prepare` writes it; the upload needs no run."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n# small\n")
    return folder


def upload(hub: Hub, files: Path) -> "subprocess.CompletedProcess[str]":
    """The end of `push`, from the upload on."""
    env = environment(hub.url, files.parent / "hf", HF_TOKEN=TOKEN)
    program = files.parent / "upload.py"
    program.write_text(UPLOAD)
    return front_server.run([sys.executable, str(program), str(files)], env=env, timeout=300)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST /api/repos/create", 401),
        Fault("POST /api/models/anna/small/commit", 403),
        Fault("PUT /lfs", 403),
    ],
    ids=lambda fault: fault.where,
)
def test_a_hub_that_refuses_is_reported_in_clear_words(fault: Fault, hub: Hub, files: Path) -> None:
    hub.faults = [fault]
    done = upload(hub, files)
    assert done.returncode == 2, done.stderr
    assert "does not let you write to anna/small" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_what_the_hub_stores_differently_is_found(hub: Hub, files: Path) -> None:
    hub.lost_uploads = True
    done = upload(hub, files)
    assert done.returncode == 7, done.stderr
    assert "adapter_model.safetensors: the hub lists different content" in done.stderr


def test_an_upload_that_fails_once_is_tried_again(hub: Hub, files: Path) -> None:
    hub.repos["anna/small"] = Repo()
    hub.repos["anna/small"].commit({"old.txt": b"kept"})
    hub.faults = [Fault("PUT /lfs", 503, times=1), Fault("POST .*preupload", 500, times=1)]
    done = upload(hub, files)
    assert done.returncode == 0, done.stderr
    stored = hub.repos["anna/small"].commits[hub.repos["anna/small"].head]
    assert stored == {"old.txt": b"kept"} | {path.name: path.read_bytes() for path in files.iterdir()}


def test_without_token_or_network_nothing_is_begun(push: Push, finished: Path, tmp_path: Path) -> None:
    done = push(finished, logged_in=False)
    assert done.returncode == 2
    assert "uploads need a token" in done.stderr
    done = push(finished, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "does not answer" in done.stderr
    done = push(tmp_path)
    assert done.returncode == 2
    assert "is not a run" in done.stderr


def test_a_config_loses_secrets_outputs_and_directories() -> None:
    secret = "hf_" + "aB3dE5gH7jK9mN1pQ3rS5tU7vW"
    config = {
        "model": {"path": "/home/anna/models/qwen", "revision": None},
        "data": {"train": [{"path": "~/rows.jsonl", "weight": 2.0}, "org/rows"]},
        "output_dir": "/home/anna/runs", "checkpoint": {"storage": "s3://bucket/x", "keep": 3}, "note": secret, "api_key": "plain",
    }  # fmt: skip
    assert public_config(config) == {
        "model": {"path": "qwen"},
        "data": {"train": [{"path": "rows.jsonl", "weight": 2.0}, "org/rows"]},
        "checkpoint": {"keep": 3}, "note": "…", "api_key": "…",
    }  # fmt: skip
