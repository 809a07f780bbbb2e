"""Which reader a config goes to, and what a plain config imports: none of them.

Run: pytest tests/trainer/readers/test_registry.py
"""

import subprocess
import sys
from pathlib import Path

import pytest

from unisono.jobs.runs.config_file import load_config, read_translation
from unisono.trainer.config.translation import Translation

PLAIN = "model: builtin:tiny\ndata: {train: rows.jsonl}\noutput_dir: out\noptim: {lr: 1.0e-4}\n"
LLAMA_FACTORY = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\noutput_dir: out\n"
LOAD = """\
import sys
from pathlib import Path
from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config

try:
    print(load_config(Path(sys.argv[1]), tuple(sys.argv[2:])).config.model.path)
except ConfigError as error:
    print(error.problems[0].what)
print(*sorted(name for name in sys.modules if name.startswith("unisono.trainer.readers") or name == "other_tool"))
"""
OTHER_TOOL = """\
from unisono.trainer.config.translation import Translation

def recognizes(raw, path):
    return "the_model" in raw or path.suffix == ".tool"

def to_config(raw, lines, path, overrides):
    model = raw.get("the_model") or path.read_text()
    config = {"model": model, "data": {"train": "rows"}, "output_dir": "out"}
    return Translation(
        name=str(path), values=raw, keys=[], config=config, origins={}, names={}, places={},
        warnings=[], problems=[], our_overrides=overrides,
    )
"""


@pytest.fixture
def other_tool(tmp_path: Path) -> Path:
    """A folder with a package that installs a reader, as pip leaves it."""
    folder = tmp_path / "site"
    metadata = folder / "other_tool-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "other_tool.py").write_text(OTHER_TOOL)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tool\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[unisono.config_readers]\nother = other_tool\n")
    return folder


def loaded(site: Path, config: Path, *overrides: str) -> tuple[str, list[str]]:
    """The model of a config or its first problem, and the modules of readers, in a fresh
    process.
    """
    program = f"import sys; sys.path.insert(0, {str(site)!r})\n{LOAD}"
    command = [sys.executable, "-c", program, str(config), *overrides]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    first, modules = ended.stdout.splitlines()
    return first, modules.split()


@pytest.mark.parametrize("suffix", ["", ".yaml", ".yml", ".json"])
def test_a_plain_config_imports_no_reader(tmp_path: Path, other_tool: Path, suffix: str) -> None:
    config = tmp_path / f"train{suffix}"
    config.write_text(PLAIN)
    assert loaded(other_tool, config, "model.dtype=float32") == ("builtin:tiny", [])


def test_a_reader_of_another_package_is_loaded_for_keys_of_nobody_else(
    tmp_path: Path, other_tool: Path
) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("the_model: m\nrows: r\n")
    model, modules = loaded(other_tool, config)
    assert (model, modules[0]) == ("m", "other_tool")
    config.write_text(LLAMA_FACTORY)
    problem, modules = loaded(other_tool, config)
    assert problem == f"{config} is not a file for training"
    assert "other_tool" not in modules


def test_a_reader_of_another_package_reads_files_that_are_not_yaml(tmp_path: Path, other_tool: Path) -> None:
    config = tmp_path / "x.tool"
    config.write_text("a/model")
    assert loaded(other_tool, config)[0] == "a/model"


def test_a_file_of_another_suffix_that_no_reader_recognizes_is_yaml(tmp_path: Path) -> None:
    config = tmp_path / "train.conf"
    config.write_text(PLAIN)
    assert load_config(config).translation is None


def test_only_files_of_other_tools_are_translated(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(PLAIN)
    assert read_translation(config) is None
    config.write_text(LLAMA_FACTORY + "overwrite_output_dir: true\n")
    translation = read_translation(config)
    assert isinstance(translation, Translation)
    assert translation.overwrites_output


def test_a_process_that_registered_no_template_does_not_take_another_one() -> None:
    program = "from unisono.trainer.config.named_templates import named_template; named_template('lf:qwen3')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "KeyError: 'lf:'" in ended.stderr
