"""`unisono download` with a stand-in of the hub that fails in every way.

Run: pytest tests/front/hub/test_download.py
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from tests.front.hub.standin import TOKEN, Fault, Hub, Repo, environment, running_hub
from tests.needs import need

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
MODEL = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle"}  # fmt: skip


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with a model, a dataset, a gated and a private model, and one with pickles only."""
    with running_hub() as hub:
        hub.repos = {
            "a/model": Repo(),
            "datasets/a/rows": Repo(),
            "a/gated": Repo(gated=True),
            "a/private": Repo(private=True),
            "a/old": Repo(),
        }
        for name in ("a/model", "a/gated", "a/private"):
            hub.repos[name].commit(MODEL)
        hub.repos["datasets/a/rows"].commit({"train.jsonl": b'{"text": "x"}\n', "data/part.parquet": b"PAR1"})
        hub.repos["a/old"].commit({"config.json": b"{}", "pytorch_model.bin": b"pickle"})
        yield hub


def download(hub: Hub, home: Path, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "unisono", "download", *words]
    return front_server.run(command, env=environment(hub.url, home, **more), timeout=300)


def result(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def cached(home: Path) -> Path:
    """The blob of the weights."""
    (found,) = list(home.rglob("snapshots/*/model.safetensors"))
    return found.resolve()


def test_a_model_fills_the_cache_is_verified_and_found_without_a_network(hub: Hub, tmp_path: Path) -> None:
    got = result(download(hub, tmp_path, "a/model", "--json"))
    assert (got["kind"], got["commit"], got["files"], got["verified"]) == (
        "model",
        hub.repos["a/model"].head,
        3,
        3,
    )
    assert got["skipped"] == ["pytorch_model.bin"]
    assert (Path(got["path"]) / "model.safetensors").read_bytes() == WEIGHTS
    assert not (Path(got["path"]) / "pytorch_model.bin").exists()
    requests = len([request for request in hub.seen if request.startswith("GET") and "resolve" in request])
    again = download(hub, tmp_path, "a/model")  # with plain lines
    assert again.returncode == 0
    assert "3 files" in again.stdout
    assert "model a/model@" in again.stderr
    assert len([r for r in hub.seen if r.startswith("GET") and "resolve" in r]) == requests
    offline = download(hub, tmp_path, "a/model", "--verify", "--json", HF_HUB_OFFLINE="1")
    assert result(offline)["verified"] == 3
    script = (
        "from huggingface_hub import snapshot_download; print(snapshot_download('a/model',"
        " allow_patterns='*.json'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment(hub.url, tmp_path, HF_HUB_OFFLINE="1"), capture_output=True, text=True, check=True
    )  # fmt: skip
    assert found.stdout.strip() == got["path"]


def test_a_dataset_is_found_by_its_name_and_by_its_prefix(hub: Hub, tmp_path: Path) -> None:
    got = result(download(hub, tmp_path, "a/rows", "--json"))
    assert (got["kind"], got["verified"]) == ("dataset", 2)
    assert (Path(got["path"]) / "train.jsonl").read_bytes() == b'{"text": "x"}\n'
    hub.repos["a/rows"] = Repo()
    hub.repos["a/rows"].commit(MODEL)
    assert result(download(hub, tmp_path, "datasets/a/rows", "--json"))["kind"] == "dataset"


def test_a_revision_is_a_branch_or_a_commit(hub: Hub, tmp_path: Path) -> None:
    first = hub.repos["a/model"].head
    hub.repos["a/model"].commit({**MODEL, "config.json": b'{"new": 1}'})
    got = result(download(hub, tmp_path, "a/model", "--revision", first, "--json"))
    assert got["commit"] == first
    assert json.loads((Path(got["path"]) / "config.json").read_text()) == {"model_type": "llama"}
    done = download(hub, tmp_path, "a/model", "--revision", "nobody")
    assert done.returncode == 2
    assert "no revision nobody" in done.stderr


def test_pickled_weights_alone_are_refused_without_trust(hub: Hub, tmp_path: Path) -> None:
    done = download(hub, tmp_path, "a/old")
    assert done.returncode == 2
    assert "only pickled weights: pytorch_model.bin" in done.stderr
    assert "--trust" in done.stderr
    assert not list(tmp_path.rglob("pytorch_model.bin"))
    assert result(download(hub, tmp_path, "a/old", "--trust", "--json"))["files"] == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a/gated", "access to a/gated is restricted"),
        ("a/private", "there is no a/private at"),
        ("a/nothing", "there is no a/nothing at"),
        ("not a name", "is not a name of the hub"),
    ],
)
def test_what_the_hub_does_not_give_is_refused_in_clear_words(
    name: str, words: str, hub: Hub, tmp_path: Path
) -> None:
    done = download(hub, tmp_path, name)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "fix:" in done.stderr


def test_a_token_opens_gated_and_private_models_and_is_never_shown(hub: Hub, tmp_path: Path) -> None:
    for name in ("a/gated", "a/private"):
        done = download(hub, tmp_path, name, "--debug", HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
    assert hub.tokens == {TOKEN}
    wrong = "hf_" + "wrongTokenOfTheTests987654321098"
    done = download(hub, tmp_path / "other", "a/gated", "--debug", HF_TOKEN=wrong)
    assert done.returncode == 2
    assert "the token of HF_TOKEN was sent" in done.stderr
    assert wrong not in done.stdout + done.stderr


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_answer_that_may_pass_is_asked_for_again(status: int, hub: Hub, tmp_path: Path) -> None:
    hub.faults = [
        Fault("GET /api/models", status, times=1),
        Fault("GET .*resolve.*safetensors", status, times=1),
    ]
    assert result(download(hub, tmp_path, "a/model", "--json"))["verified"] == 3
    assert [fault.times for fault in hub.faults] == [0, 0]


def test_an_answer_that_stays_wrong_ends_with_its_number(hub: Hub, tmp_path: Path) -> None:
    hub.faults = [Fault("GET .*resolve.*safetensors", 500)]
    done = download(hub, tmp_path, "a/model")
    assert done.returncode == 2
    assert "it answers 500, after several attempts" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cut_connection_is_resumed_where_it_was_cut(hub: Hub, tmp_path: Path) -> None:
    hub.faults = [Fault("GET .*resolve.*safetensors", 0, times=2, after=300_000)]
    assert result(download(hub, tmp_path, "a/model", "--json"))["verified"] == 3
    assert cached(tmp_path).read_bytes() == WEIGHTS


def test_wrong_bytes_are_found_and_not_kept(hub: Hub, tmp_path: Path) -> None:
    hub.faults = [Fault("GET .*resolve.*safetensors", flip=True, times=1)]
    done = download(hub, tmp_path, "a/model")
    assert done.returncode == 7, done.stderr
    assert "model.safetensors: its content does not have the digest" in done.stderr
    assert not list(tmp_path.rglob("snapshots/*/model.safetensors"))
    assert result(download(hub, tmp_path, "a/model", "--json"))["verified"] == 3


def test_damage_in_the_cache_is_found_by_verify(hub: Hub, tmp_path: Path) -> None:
    result(download(hub, tmp_path, "a/model", "--json"))
    blob = cached(tmp_path)
    blob.chmod(0o644)
    blob.write_bytes(WEIGHTS[:-1] + b"x")
    done = download(hub, tmp_path, "a/model", "--verify")
    assert done.returncode == 7
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr
    done = download(hub, tmp_path, "a/none", "--verify")
    assert done.returncode == 2
    assert "is not in the cache" in done.stderr


def test_a_full_disk_is_exit_6_and_leaves_no_part(hub: Hub, tmp_path: Path) -> None:
    need("mount", root=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", disk], check=True)
    try:
        done = download(hub, disk, "a/model")
        assert done.returncode == 6, done.stderr
        assert "Traceback" not in done.stderr
        assert not list(disk.rglob("*.incomplete"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_without_a_hub_it_is_refused_at_once(hub: Hub, tmp_path: Path) -> None:
    done = download(hub, tmp_path, "a/model", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "unset HF_HUB_OFFLINE" in done.stderr
    done = download(hub, tmp_path, "a/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "http://127.0.0.1:9 does not answer" in done.stderr


def sibling(name: Any, size: Any) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "blobId": "0" * 40}


LEADS_OUT = "../../../../../precious"  # from the snapshot's directory to the parent of HF_HOME


@pytest.mark.parametrize("size", [5, 8], ids=["wrong-size", "right-size"])
@pytest.mark.parametrize(
    "name", [LEADS_OUT, "{outside}", "a/../" + LEADS_OUT, "x\\..\\y", "x\x1b[31m", "n" * 5000, "", 7]
)
def test_a_name_that_leads_out_of_the_cache_is_refused_before_any_download(
    name: Any, size: int, hub: Hub, tmp_path: Path
) -> None:
    outside = tmp_path / "precious"
    outside.write_text("precious")
    listed = name.format(outside=outside) if isinstance(name, str) else name
    hub.described["siblings"] = [sibling("config.json", 21), sibling(listed, size)]
    done = download(hub, tmp_path / "home", "a/model")
    assert done.returncode == 2, done.stderr
    assert "the file list of a/model cannot be used" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "\x1b" not in done.stderr
    assert len(done.stderr) < 1000
    assert outside.read_text() == "precious"
    assert not [request for request in hub.seen if "resolve" in request]


@pytest.mark.parametrize("size", [10**18, -5, "5", 1.5])
def test_an_impossible_size_is_refused_before_any_download(size: Any, hub: Hub, tmp_path: Path) -> None:
    hub.described["siblings"] = [sibling("big.bin", size)]
    done = download(hub, tmp_path, "a/model")
    assert done.returncode == 2, done.stderr
    assert f"the size of big.bin is {size}" in done.stderr
    assert not [request for request in hub.seen if "resolve" in request]


@pytest.mark.parametrize(
    "sha", ["../../../../../out", "/srv/x", "\x1b]52;c;ZXZpbA==\x07", "main", "", None, 7]
)
def test_non_digest_commit_is_refused_without_control_characters(sha: Any, hub: Hub, tmp_path: Path) -> None:
    hub.described["sha"] = sha
    done = download(hub, tmp_path / "home", "a/model")
    assert done.returncode == 2, done.stderr
    assert "a/model" in done.stderr or "cannot be a file in the cache" in done.stderr
    assert "Traceback" not in done.stderr
    assert not set(done.stderr) & {"\x1b", "\x07"}
    assert not list(tmp_path.rglob("*out*"))


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
def test_huggingface_hub_gets_no_path_out_of_the_cache_from_a_header(
    header: str, hub: Hub, tmp_path: Path
) -> None:
    hub.headers[header] = '"../../../../written"' if header != "X-Repo-Commit" else "../../../../written"
    done = download(hub, tmp_path / "home", "a/model")
    assert done.returncode == 2, done.stderr
    assert "the hub gives a name that cannot be a file in the cache" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("written*"))


def test_a_warning_in_a_header_is_shown_without_control_characters(hub: Hub, tmp_path: Path) -> None:
    hub.headers["X-HF-Warning"] = "topic; use \x9b31mthe new version\x7f"
    done = download(hub, tmp_path, "a/model")
    assert done.returncode == 0, done.stderr
    assert "the new version\n" in done.stderr
    assert not set(done.stderr) & {"\x9b", "\x7f"}


@pytest.mark.parametrize(
    "words",
    [
        ["a/model", "--revision", "../../../../x"],
        ["a/model", "--revision", "/srv/x"],
        ["../../x"],
        ["a/model/../.."],
        ["a/model", "--verify", "--revision", "../../.."],
        ["../../x", "--verify"],
    ],
    ids=" ".join,
)
def test_names_and_revisions_that_lead_out_of_the_cache_are_refused(
    words: list[str], hub: Hub, tmp_path: Path
) -> None:
    before = set(tmp_path.rglob("*"))
    done = download(hub, tmp_path / "home", *words)
    assert done.returncode == 2, done.stderr
    assert "is not a relative path without `..`" in done.stderr or "has more than 2 parts" in done.stderr
    assert not hub.seen
    assert set(tmp_path.rglob("*")) == before


def test_note_of_a_branch_has_its_commit_and_is_not_followed_elsewhere(hub: Hub, tmp_path: Path) -> None:
    got = result(download(hub, tmp_path, "a/model", "--json"))
    note = Path(got["path"]).parents[1] / "refs/main"
    assert note.read_text() == got["commit"]
    for text in ("../../..", str(tmp_path), "x\0", "\x1b[31m", got["commit"] + "\n../x"):
        note.write_text(text)
        done = download(hub, tmp_path, "a/model", "--verify")
        assert done.returncode == 2, text
        assert "is not in the cache" in done.stderr


def test_of_a_damaged_file_only_what_lies_in_the_cache_is_removed(hub: Hub, tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "precious"
    outside.write_text("precious")
    blob = cached_blob_of(result(download(hub, home, "a/model", "--json")))
    blob.unlink()
    blob.symlink_to(outside)
    done = download(hub, home, "a/model")
    assert done.returncode == 7, done.stderr
    assert outside.read_text() == "precious"
    assert not blob.is_symlink()
    assert result(download(hub, home, "a/model", "--json"))["verified"] == 3


def test_blob_in_the_shared_store_is_verified_by_the_digest_of_its_link(hub: Hub, tmp_path: Path) -> None:
    blob = cached_blob_of(result(download(hub, tmp_path, "a/model", "--json")))
    shared = tmp_path / "hub/blobs/ab" / "ab".ljust(64, "0")
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(shared)
    assert result(download(hub, tmp_path, "a/model", "--verify", "--json"))["verified"] == 3
    shared.write_bytes(WEIGHTS[:-1] + b"x")
    assert download(hub, tmp_path, "a/model").returncode == 7
    assert not shared.exists()


def cached_blob_of(got: dict[str, Any]) -> Path:
    """The weights in `blobs`, to which the snapshot links."""
    return (Path(got["path"]) / "model.safetensors").resolve()
