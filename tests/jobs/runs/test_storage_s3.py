"""Copies of checkpoints in a bucket, behind moto's S3 server on this machine.

Run: pytest tests/jobs/runs/test_storage_s3.py

Needs `pip install s3fs "moto[server]"`; without them all but one of these tests are skipped.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROWS = Path(__file__).parents[3] / "examples" / "data" / "train.jsonl"
KEY, SECRET = "AKIAUNISONOTESTS1234", "words-that-nobody-may-ever-read"
WHOEVER = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
SERVER = """
import sys, threading
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


class Bucket:
    """A server with one bucket, `bucket`; it takes every credential until it is told to be
    strict.
    """

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    def ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Content-Type", "text/plain")
        request.add_header("Authorization", WHOEVER)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return bytes(answer.read())

    def names(self) -> list[str]:
        return re.findall(r"<Key>(.*?)</Key>", self.ask("GET", "/bucket?list-type=2").decode())

    def buckets(self) -> list[str]:
        return re.findall(r"<Name>(.*?)</Name>", self.ask("GET", "/").decode())

    def copies(self) -> list[int]:
        """The steps of the checkpoints that count."""
        return sorted(
            int(found[1]) for name in self.names() if (found := re.search(r"step-(\d+)/manifest", name))
        )

    def changes(self) -> list[str]:
        """`PUT runs/out/…` and the like, in their order."""
        found = re.findall(r'"(PUT|POST|DELETE) /bucket/?(\S*) HTTP', self.transcript())
        return [f"{method} {path}" for method, path in found]

    def transcript(self) -> str:
        """All that was asked of it, as its log has it."""
        return self._log.read_text()

    def be_strict(self) -> None:
        """From now on only credentials that the server gave out count: none."""
        self.ask("POST", "/moto-api/reset-auth", b"0")


@pytest.fixture
def bucket(tmp_path_factory: pytest.TempPathFactory, until: Callable[..., None]) -> Iterator[Bucket]:
    missing = [name for name in ("moto", "s3fs", "flask") if find_spec(name) is None]
    if missing:
        pytest.skip(f'needs {", ".join(missing)}: pip install s3fs "moto[server]"')
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as file:
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: server.poll() is not None or "port " in log.read_text())
        port = re.search(r"port (\d+)", log.read_text())
        assert port, log.read_text()
        here = Bucket(f"http://127.0.0.1:{port[1]}", log)
        here.ask("PUT", "/bucket")
        yield here
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def place(front: Any, bucket: Bucket) -> Any:
    """A front that finds the server and credentials in its environment, and keeps copies in the
    bucket.
    """
    use(front, bucket.url)
    return front


def use(front: Any, url: str, *, storage: str = "s3://bucket/runs", **sections: Any) -> None:
    front.environment = {
        name: value for name, value in os.environ.items() | front.environment.items() if not name.startswith(("AWS_", "FSSPEC_"))
    } | {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url,
        "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    front.config(train="rows", checkpoint={"every": "3 steps", "keep": 2, "storage": storage}, **sections)


def holders_of_credentials(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if any(word.encode() in path.read_bytes() for word in (KEY, SECRET))]


def test_a_real_run_continues_from_the_bucket_on_a_different_machine(place: Any, bucket: Bucket) -> None:
    """Real ranks.

    The other machine has the settings folder's key and the config, and nothing else.
    """
    use(place, bucket.url, data={"train": str(ROWS), "max_length": 128})
    printed = ""
    for steps in (3, 6, 9):
        if steps == 9:
            for name in ("out", "cache"):
                shutil.rmtree(place.folder / name)
        done = place.run("--resume", f"duration={steps} steps", faults={"real": True})
        assert done.returncode == 0, done.stderr
        printed += done.stdout + done.stderr
    run_id = place.read("plan.json")["run_id"]
    assert f"step 6 of run {run_id} is downloaded from s3://bucket/runs/out" in printed
    assert f"step-00000009 is in s3://bucket/runs/out/{run_id}: " in printed
    assert "warning" not in printed
    assert place.read("plan.json")["resume"]["step"] == 6
    assert place.steps() == list(range(1, 10))

    assert bucket.copies() == [6, 9]  # keep: 2
    changes = bucket.changes()
    assert not [name for name in bucket.names() if "step-00000003" in name]
    old = f"DELETE runs/out/{run_id}/step-00000003/manifest.json"
    assert old in changes[changes.index(f"PUT runs/out/{run_id}/step-00000009/manifest.json") :]
    for step in (3, 6, 9):
        written = [line for line in changes if line.startswith(f"PUT runs/out/{run_id}/step-{step:08d}/")]
        assert len(written) == 4
        assert written[-1].endswith("/manifest.json")
    tried = [line for line in changes if line.endswith(f"/{run_id}/tried")]
    assert tried == [f"{word} runs/out/{run_id}/tried" for _ in range(3) for word in ("PUT", "DELETE")]

    assert holders_of_credentials(place.folder) == []
    there = bucket.names()
    assert {name.rpartition("/")[2] for name in there} >= {
        "plan.json",
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
    }
    kept = b"".join(bucket.ask("GET", f"/bucket/{name}") for name in there)
    assert not [word for word in (KEY, SECRET) if word in printed or word.encode() in kept]


def test_the_first_copy_of_two_ranks_is_read_back_from_the_bucket(
    place: Any, bucket: Bucket, started: Any, until: Callable[..., None]
) -> None:
    """Real ranks; what the front says is read while it runs."""
    rows = place.folder / "rows.jsonl"
    rows.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:60]))
    use(place, bucket.url, data={"train": str(rows), "max_length": 128})
    process = started(
        "--nproc", "2", "duration=2000 steps", "checkpoint.every=500 steps", faults={"real": True}
    )
    printed: list[str] = []

    def read() -> None:
        for line in process.stderr:
            printed.append(line)  # noqa: PERF402 - one by one, since they are looked at meanwhile

    reader = threading.Thread(target=read)
    reader.start()
    until(
        lambda: process.poll() is not None or any("rehearsal: copy of " in line for line in printed),
        limit_s=240,
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, printed
    reader.join(10)
    (line,) = [line for line in printed if "rehearsal: copy of " in line]
    run_id = place.read("plan.json")["run_id"]
    found = (
        rf"/s\), read back completely from s3://bucket/runs/out/{run_id}/step-00000001 in .* s; 4 more every"
        r" 500 steps, at most \d there: .* more; .* in all"
    )
    assert re.search(found, line), line
    assert f"GET /bucket/runs/out/{run_id}/step-00000001/state.json" in bucket.transcript()
    assert not [word for word in (KEY, SECRET) if word in "".join(printed)]


def test_a_large_file_goes_in_parts_and_comes_back_whole(place: Any, bucket: Bucket) -> None:
    assert place.run("duration=3 steps", faults={"weighs": 120 << 20}).returncode == 0
    assert [line for line in bucket.changes() if "trainable.safetensors?uploads" in line]
    shutil.rmtree(place.out)
    done = place.run("--resume")
    assert done.returncode == 0, done.stderr
    assert place.read("plan.json")["resume"]["step"] == 3


def no_bucket(front: Any, bucket: Bucket) -> None:
    use(front, bucket.url, storage="s3://buckte/runs")


def refused(front: Any, bucket: Bucket) -> None:
    del front
    bucket.be_strict()


def no_server(front: Any, bucket: Bucket) -> None:
    del bucket
    use(front, "http://127.0.0.1:9")


def a_secret_in_the_endpoint(front: Any, bucket: Bucket) -> None:
    use(front, bucket.url.replace("//", "//someone:hunter2@"))


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (no_bucket, "there is no bucket buckte"),
        (refused, "PermissionError: "),
        (no_server, "Could not connect to the endpoint URL"),
        (a_secret_in_the_endpoint, "HTTPClientError: "),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused_before_the_first_step(
    place: Any, bucket: Bucket, cause: Callable[[Any, Bucket], None], words: str
) -> None:
    """With --resume too: a run that began anew would go beside the one that is there.

    And no bucket is made of a mistyped name.
    """
    cause(place, bucket)
    printed = ""
    for resume in (["--resume"], []):
        refusal = place.run(*resume)
        assert refusal.returncode == 6, refusal.stderr
        assert words in refusal.stderr
        assert "where: checkpoint.storage" in refusal.stderr
        assert "fix: " in refusal.stderr
        assert not place.out.exists()
        printed += refusal.stderr

    if cause is not refused:
        assert bucket.buckets() == ["bucket"]
        assert bucket.names() == []
    assert not [word for word in (KEY, SECRET, "hunter2") if word in printed]
    assert holders_of_credentials(place.folder) == []


def test_a_bucket_that_refuses_while_the_run_continues_is_a_warning(
    place: Any, bucket: Bucket, started: Any, until: Callable[..., None]
) -> None:
    process = started(faults={"wait": 2})
    until(place.waits_before(2))
    assert bucket.names() == [], "the try has left nothing"
    bucket.be_strict()
    process.send_signal(signal.SIGTERM)
    _, reported = process.communicate(timeout=120)
    assert process.returncode == 75, reported
    (line,) = [line for line in reported.splitlines() if "step-00000002 was not copied to s3://" in line]
    assert "PermissionError: " in line
    assert "check the URL, the free space there, the network and the credentials in the environment" in line
    assert "it is complete in output_dir; the next start that resumes the run uploads it" in line
    assert not [word for word in (KEY, SECRET) if word in reported]


def test_a_missing_package_is_named_with_the_line_that_installs_it(front: Any) -> None:
    """A package of that name that cannot be imported hides one that is installed."""
    hidden = front.folder / "hidden"
    hidden.mkdir()
    (hidden / "s3fs.py").write_text("raise ImportError('not here')\n")
    use(front, "http://127.0.0.1:9")
    front.environment["PYTHONPATH"] = f"{hidden}:{front.script_environment['PYTHONPATH']}"
    for resume in (["--resume"], []):
        refusal = front.run(*resume)
        assert refusal.returncode == (6 if find_spec("s3fs") else 2), refusal.stderr
        assert "s3:// needs the package s3fs" in refusal.stderr
        assert "fix:   pip install s3fs" in refusal.stderr
        assert not front.out.exists()
