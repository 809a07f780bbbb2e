"""LLaMA-Factory from PyPI in an environment of its own, which shares torch with this one; and a
tiny training for it.
"""

import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import yaml

_VERSION = "0.9.5"
# What it asks for, and ours are too new for it; then what it imports, and we do not have.
_OWN = (
    "transformers==5.6.0", "accelerate==1.11.0", "peft==0.18.1", "trl==0.24.0", "datasets==4.0.0", "torchdata==0.11.0",
    "tokenizers>=0.22,<0.23", "huggingface_hub>=1.0,<2", "fsspec<=2025.3.0", "dill<0.3.9", "multiprocess<0.70.17", "xxhash",
    "av<=16.0.0", "einops", "fire", "termcolor", "tyro<0.9.0", "docstring-parser", "shtab", "typeguard", "sentencepiece", "tiktoken",
)  # fmt: skip
_PURE = ("omegaconf", "antlr4-python3-runtime==4.9.3")  # not there as wheels
_WITH_DEPENDENCIES = ("matplotlib", "scipy", "httpx")
_LIMIT_S = 540.0


class NotInstalled(Exception):  # noqa: N818 - said as the reason of a skip
    """LLaMA-Factory cannot be had here."""


def install() -> Path:
    """Makes the environment below the system's folder for temporary files, once; gives its folder
    of programs.

    Raises:
        NotInstalled: with the reason.
    """
    folder = Path(tempfile.gettempdir()) / f"unisono-tests-{os.getuid()}-llama-factory-{_VERSION}"
    programs = folder / "bin"
    marker = folder / "installed"
    if marker.exists():
        return programs
    venv.create(folder, with_pip=True)
    for options, packages in (
        (("--no-deps", "--only-binary=:all:"), (f"llamafactory=={_VERSION}", *_OWN)), (("--no-deps",), _PURE), (("--only-binary=:all:",), _WITH_DEPENDENCIES),
    ):  # fmt: skip
        _pip(programs / "python", *options, *packages)
    asks = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([programs / "python", "-c", asks], capture_output=True, text=True, check=True)
    own = Path(done.stdout.strip())
    shared = dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages()])
    # Only now: pip must not see, let alone replace, what is ours. `addsitedir` also reads our own
    # .pth files.
    (own / "shared.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in shared))
    torchrun = programs / "torchrun"
    torchrun.write_text(f"#!{programs / 'python'}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    (own / "torchaudio.py").write_text("")  # imported for sound, of which there is none
    marker.touch()
    return programs


def _pip(python: Path, *words: str) -> None:
    try:
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words], capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"pip install {words[-1]} … took longer than {_LIMIT_S:.0f} s") from error
    if done.returncode:
        raise NotInstalled(f"pip install {words[-1]} …: {done.stderr.strip().splitlines()[-1]}")


def environment(programs: Path) -> dict[str, str]:
    """What a shell has in which that environment is active."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {
        "PATH": path,
        "VIRTUAL_ENV": str(programs.parent),
        "FORCE_TORCHRUN": "1",
        "DISABLE_VERSION_CHECK": "1",
    }


def write_training(folder: Path, *, steps: int, model: Path) -> Path:
    """A file for `llamafactory-cli train`, with its data; the model is a folder of Hugging Face's
    layout.
    """
    rows = [
        {"instruction": f"say w{number}", "input": "", "output": f"w{number} w{number + 1}"}
        for number in range(64)
    ]
    (folder / "tiny.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    asked = {
        "model_name_or_path": str(model), "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "tiny", "dataset_dir": str(folder),
        "template": "default", "cutoff_len": 64, "output_dir": str(folder / "saves"), "overwrite_output_dir": True, "max_steps": steps,
        "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "overwrite_cache": True, "preprocessing_num_workers": 1, "ddp_timeout": 1800, "disable_tqdm": True, "plot_loss": False,
    }  # fmt: skip
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(asked))
    return path


def make_model(folder: Path) -> Path:
    """A tiny model with its tokenizer, in Hugging Face's layout; made by a process of its own,
    since it needs their libraries.
    """
    programs = Path(__file__).parent / "programs"
    script = (
        "import sys, tiny, trl_sft; tiny.model().save_pretrained(sys.argv[1]);"
        " trl_sft.tokenizer().save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", script, folder], cwd=programs, check=True, capture_output=True)
    return folder


if __name__ == "__main__":
    print(install())
