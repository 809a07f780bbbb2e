"""The run's directory follows the head's, file by file. Run: pytest tests/jobs/ray/test_mirror.py"""

import json
import shutil
from pathlib import Path

import pytest

from unisono.guard.rundir import RunDir
from unisono.jobs.launchers.ray_mirror import Mirror, MirrorThread
from unisono.jobs.launchers.ray_node_actor import NodeActor
from unisono.jobs.launchers.ray_node_fronts import ActorLost


class Disks:
    """A directory on a node's disk, and where it is to be."""

    def __init__(self, folder: Path) -> None:
        self.there = folder / "node/cache/0123/demo"
        self.here = folder / "typed/runs/my demo"
        for place in (self.there, self.here):
            place.mkdir(parents=True)
        self.node_actor = NodeActor()
        self.mirror = self.anew()

    def anew(self, *only: str) -> Mirror:
        return Mirror(self.node_actor, str(self.there), RunDir(self.here), only)

    def write(self, name: str, text: str) -> None:
        path = self.there / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def add(self, name: str, text: str) -> None:
        with (self.there / name).open("a") as file:
            file.write(text)

    def read(self, name: str) -> str:
        return (self.here / name).read_text()

    def names(self) -> list[str]:
        return sorted(
            path.relative_to(self.here).as_posix() for path in self.here.rglob("*") if path.is_file()
        )


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def test_a_log_is_brought_by_whole_lines_and_at_the_end_to_its_last_byte(disks: Disks) -> None:
    disks.write("metrics.jsonl", '{"step": 1}\n{"st')
    disks.mirror.sync()
    assert disks.read("metrics.jsonl") == '{"step": 1}\n'
    disks.add("metrics.jsonl", 'ep": 2}\n{"step": 3')
    disks.mirror.sync()
    assert disks.read("metrics.jsonl") == '{"step": 1}\n{"step": 2}\n'
    disks.mirror.sync(final=True)
    assert disks.read("metrics.jsonl") == '{"step": 1}\n{"step": 2}\n{"step": 3'


@pytest.mark.parametrize("lines", [40, 2])
def test_truncated_log_is_brought_again_even_if_it_has_grown_again(disks: Disks, lines: int) -> None:
    disks.write("metrics.jsonl", "".join(f'{{"step": {n}}}\n' for n in range(20)))
    disks.mirror.sync()
    text = "".join(f'{{"step": {n}, "again": true}}\n' for n in range(lines))
    with (disks.there / "metrics.jsonl").open("r+") as file:  # the same inode
        file.truncate(0)
        file.write(text)
    disks.mirror.sync()
    assert disks.read("metrics.jsonl") == text


def test_checkpoint_is_mirrored_whole_or_not_at_all_and_goes_when_pruned(disks: Disks) -> None:
    disks.write("checkpoints/step-00000002.tmp-0a1b/weights.safetensors", "half")
    disks.mirror.sync()
    assert disks.names() == []
    (disks.there / "checkpoints/step-00000002.tmp-0a1b").rename(disks.there / "checkpoints/step-00000002")
    disks.write("checkpoints/step-00000002/deep/manifest.json", str(disks.there))
    disks.mirror.sync()
    assert disks.names() == [
        "checkpoints/step-00000002/deep/manifest.json",
        "checkpoints/step-00000002/weights.safetensors",
    ]
    assert disks.read("checkpoints/step-00000002/deep/manifest.json") == str(disks.there), (
        "what is signed is not changed"
    )
    disks.write("checkpoints/step-00000004/weights.safetensors", "newer")
    shutil.rmtree(disks.there / "checkpoints/step-00000002")
    disks.mirror.sync()
    assert [path.name for path in (disks.here / "checkpoints").iterdir()] == ["step-00000004"]


def test_what_is_lost_there_is_not_lost_here(disks: Disks) -> None:
    """Somebody cleans the node's cache, or its disk goes: here is the only copy then."""
    for name in ("config", "weights/a", "weights/b"):
        disks.write(f"checkpoints/step-00000002/{name}", name)
    disks.write("metrics.jsonl", "1\n")
    disks.mirror.sync()
    kept = disks.names()
    (disks.there / "checkpoints/step-00000002/weights/a").unlink()
    disks.mirror.sync()
    assert disks.names() == kept
    shutil.rmtree(disks.there / "checkpoints")
    disks.mirror.sync()
    assert disks.names() == kept
    shutil.rmtree(disks.there)
    with pytest.raises(ActorLost, match="is gone"):
        disks.mirror.sync()
    assert disks.names() == kept


def test_slow_node_is_followed_on_and_one_that_stays_silent_is_reported(
    disks: Disks,
) -> None:
    class Slow(NodeActor):
        def __init__(self, silent: int) -> None:
            super().__init__()
            self.silent = silent

        def listing(self, root: str) -> dict[str, tuple[int, int, int]]:
            self.silent -= 1
            if self.silent >= 0:
                raise ActorLost("no answer to `listing` in 60 s")
            return super().listing(root)

    disks.write("result.json", "{}")
    disks.mirror.node = Slow(2)
    with MirrorThread(disks.mirror) as following:
        following.finish()
    assert disks.names() == ["result.json"]
    disks.mirror.node = Slow(3)
    with MirrorThread(disks.mirror) as following, pytest.raises(ActorLost, match="no answer"):
        following.finish()


@pytest.mark.parametrize("name", ["../precious", "/etc/x", "checkpoints/step-00000002/../../../precious"])
def test_file_listed_outside_the_directory_is_not_written_here(name: str, disks: Disks) -> None:
    class Astray(NodeActor):
        def listing(self, root: str) -> dict[str, tuple[int, int, int]]:
            return {**super().listing(root), name: (1, 1, 1)}

        def read(self, path: str, offset: int, size: int) -> bytes:
            return b"" if offset else b"x"

    disks.write("metrics.jsonl", "1\n")
    disks.mirror.node = Astray()
    before = sorted(disks.mirror.run.root.parent.rglob("*"))
    with pytest.raises(ActorLost, match="lists a file outside the run's directory: the name"):
        disks.mirror.sync()
    assert sorted(disks.mirror.run.root.parent.rglob("*")) == before


def test_a_checkpoint_is_never_here_without_the_metrics_of_its_steps(disks: Disks) -> None:
    disks.write("metrics.jsonl", "1\n2\n")
    disks.write("checkpoints/step-00000002/weights", "x")

    class Gone(NodeActor):
        """A node that is lost once the metrics have been read, and has written more since they were
        listed.
        """

        def listing(self, root: str) -> dict[str, tuple[int, int, int]]:
            found = super().listing(root)
            disks.add("metrics.jsonl", "3\n")
            return found

        def read(self, path: str, offset: int, size: int) -> bytes:
            if "checkpoints" in path:
                raise OSError(path)
            return super().read(path, offset, size)

    disks.mirror.node = Gone()
    with pytest.raises(OSError, match="checkpoints"):
        disks.mirror.sync()
    assert disks.names() == ["metrics.jsonl"]
    assert disks.read("metrics.jsonl") == "1\n2\n3\n"


def test_a_checkpoint_that_is_pruned_while_it_is_brought_leaves_no_half(disks: Disks) -> None:
    disks.write("checkpoints/step-00000002/a", "a")
    disks.write("checkpoints/step-00000002/b", "b")

    class Pruned(NodeActor):
        def read(self, path: str, offset: int, size: int) -> bytes:
            if path.endswith("/b"):
                raise FileNotFoundError(path)
            return super().read(path, offset, size)

    disks.mirror.node = Pruned()
    disks.mirror.sync()
    assert disks.names() == []
    assert list((disks.here / "checkpoints").iterdir()) == []


def test_files_name_the_directory_where_they_are(disks: Disks) -> None:
    disks.write(
        "result.json", json.dumps({"output_dir": str(disks.there), "weights": f"{disks.there}/adapter"})
    )
    disks.write("adapter/adapter_config.json", str(disks.there))
    disks.mirror.sync()
    assert json.loads(disks.read("result.json")) == {
        "output_dir": str(disks.here),
        "weights": f"{disks.here}/adapter",
    }
    assert disks.read("adapter/adapter_config.json") == str(disks.there), "a model's own files are left alone"


def test_what_is_the_heads_own_business_stays_there(disks: Disks) -> None:
    for name in (
        "run.lock",
        ".plan.json.tmp-1-ab",
        "nodes/plan-00000.json",
        "checkpoints/.trash-00000002-ab/x",
        "logs/ada-front.log",
    ):
        disks.write(name, "x")
    disks.mirror.sync()
    assert disks.names() == []


def test_a_run_that_was_sent_to_a_node_is_continued(disks: Disks) -> None:
    for name in (
        "plan.json",
        "metrics.jsonl",
        "checkpoints/step-00000002/weights.safetensors",
        "logs/ada-rank-00000.log",
    ):
        path = disks.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"of before: {name}\n")
    disks.mirror.push()
    before = {name: (disks.here / name).stat().st_ino for name in disks.names()}
    disks.add("metrics.jsonl", "new\n")
    disks.mirror.sync()
    assert disks.read("metrics.jsonl") == "of before: metrics.jsonl\nnew\n"
    assert {name: (disks.here / name).stat().st_ino for name in disks.names()} == before, (
        "nothing else was brought"
    )


def test_of_other_nodes_only_what_is_of_their_ranks_is_brought(disks: Disks) -> None:
    for name in (
        "logs/bob-rank-00001.log",
        "events/rank-00001.jsonl",
        "result.json",
        "checkpoints/step-00000002/part",
    ):
        disks.write(name, "x\n")
    disks.anew("logs/", "events/").sync()
    assert disks.names() == ["events/rank-00001.jsonl", "logs/bob-rank-00001.log"]


def test_a_disk_here_that_cannot_be_written_is_reported(disks: Disks) -> None:
    disks.write("result.json", "{}")
    disks.write("checkpoints/step-00000002/weights", "x")
    (disks.here / "checkpoints").write_text("a file is in the way")
    with pytest.raises(OSError, match="checkpoints"):
        disks.mirror.sync()
