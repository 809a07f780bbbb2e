"""Packages that a config needs and that are missing are refused with the plan.

Run: pytest tests/jobs/runs/test_packages.py
"""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest
from fsspec.registry import known_implementations

from unisono.trainer.config import RunConfig
from unisono.trainer.config.schema import RunConfig as Schema
from unisono.trainer.plan import STORAGE_PACKAGES, needed_packages

URLS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "sftp": "paramiko", "https": "aiohttp", "oss": "ossfs"}
OPTIONAL = (
    "tensorboard",
    "wandb",
    "swanlab",
    "bitsandbytes",
    "accelerate",
    "diffusers",
    "pillow",
    *URLS.values(),
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment like this one without the optional packages."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    absent = set()
    for name in OPTIONAL:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:
            continue
        absent |= {file.parts[0] for file in files}
    (packages,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in absent:
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def light(python: Path) -> Path:
    """The same without some packages of the trainer, and with an old one."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    folder = python.parents[1] / "light"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (target,) = folder.glob("lib/python*/site-packages")
    for entry in packages.iterdir():
        if not entry.name.startswith(("pyarrow", "sacrebleu", "transformers-")):
            (target / entry.name).symlink_to(entry)
    old = target / "transformers-4.57.6.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.6\n")
    return folder / "bin" / "python"


NEEDS_TRAINER = (
    "chat x", "checkpoint export x y", "checkpoint verify x --replay 2", "data preview c.yaml", "download x", "drill",
    "eval x --data r", "export x y", "generate x y", "init --data c.yaml", "push x y", "serve x", "train c.yaml",
    "train c.yaml --dry-run", "train c.yaml --launcher slurm", "train c.yaml --rehearse",
)  # fmt: skip


@pytest.mark.parametrize("command", NEEDS_TRAINER)
def test_a_command_that_needs_the_trainer_names_its_extra(light: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "c.yaml").write_text("model: builtin:tiny\ndata: {train: rows.jsonl}\noutput_dir: out\n")
    words = [str(light), "-m", "unisono", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "missing: pyarrow, sacrebleu, transformers>=5.0 (4.57.6 is installed)\n" in done.stderr
    assert done.stderr.endswith("  fix:   pip install 'unisono[train]'\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.yaml"]


def test_a_child_that_cannot_import_the_trainer_refuses(light: Path, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    words = [str(light), "-m", "unisono.task", "preview", "request.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "pip install 'unisono[train]'" in done.stderr


def refused(python: Path, folder: Path, *words: str) -> str:
    (folder / "c.yaml").write_text(
        "model: builtin:tiny\ndata: {train: rows.jsonl}\nadapter: {rank: 4}\ndevice: cpu\n"
    )
    command = [str(python), "-m", "unisono", "train", "c.yaml", "output_dir=out", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2, done.stderr
    assert [entry.name for entry in folder.iterdir()] == ["c.yaml"]
    return done.stderr


@pytest.mark.parametrize("plan", [["--dry-run"], []], ids=["plan", "start"])
def test_each_missing_package_is_refused_with_the_command_that_installs_it(
    python: Path, tmp_path: Path, plan: list[str]
) -> None:
    data = ", ".join(f"{scheme}://bucket/rows.jsonl" for scheme in URLS)
    config = ["track=[tensorboard, wandb, swanlab]", "model.quantize=nf4", f"data.train=[{data}]"]
    said = refused(python, tmp_path, *config, "checkpoint.storage=gs://bucket/runs", *plan)
    for package in ("tensorboard", "wandb", "swanlab", "bitsandbytes accelerate", *URLS.values()):
        assert f"  fix:   pip install {package}\n" in said
    assert said.count("error: gs:// needs the package gcsfs") == 2
    assert said.count("error: ") == 4 + len(URLS) + 1


def test_image_models_are_refused_without_their_packages(python: Path, tmp_path: Path) -> None:
    said = refused(python, tmp_path, "objective=diffusion", "--dry-run")
    assert "  fix:   pip install diffusers pillow\n" in said


def test_a_config_that_names_nothing_optional_needs_nothing() -> None:
    config = RunConfig.model_validate({"model": "m", "data": {"train": "x.jsonl"}, "output_dir": "o"})
    assert needed_packages(config) == []


def test_the_table_has_every_tracker_and_every_scheme_that_needs_a_package() -> None:
    (trackers,) = get_args(Schema.model_fields["track"].annotation)
    config = RunConfig.model_validate(
        {"model": "m", "data": {"train": "x"}, "output_dir": "o", "track": list(get_args(trackers))}
    )
    assert {needed.names for needed in needed_packages(config)} == {(name,) for name in get_args(trackers)}
    foreign = {
        scheme for scheme, entry in known_implementations.items() if not entry["class"].startswith("fsspec")
    }
    with_unisono = {"hf"}
    not_of_files = {"pyscript", "asynclocal"}
    assert foreign - with_unisono - not_of_files <= STORAGE_PACKAGES.keys()
