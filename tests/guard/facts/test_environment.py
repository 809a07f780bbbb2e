"""What is told of the environment, and what never is.

Run: pytest tests/guard/facts/test_environment.py
"""

import os
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.facts import read_environment, take_token
from unisono.guard.facts.environment import _job_variables, read_nccl_files


def test_variables_of_the_catalogue_and_misspelt_ones_are_reported() -> None:
    env = {
        "NCCL_ALGO": "Ring", "NCCL_ALGOO": "Ring", "TORCH_NCCL_FOO": "1", "GLOO_BAR": "2", "CUDA_VISIBLE_DEVICES": "", "PATH": "/bin",
        "HOME": "/root", "OMP_NUM_THREADS": "1", "nccl_algo": "tree", "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }  # fmt: skip
    assert set(_job_variables(env)) == set(env) - {"PATH", "HOME", "nccl_algo"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "hf_x"), ("NCCL_SECRET_KEY", "x"), ("GLOO_PASSWORD", "x"), ("HTTPS_PROXY", "http://user:pass@proxy:3128"),
        ("HTTPS_PROXY", "user:pass@proxy:3128"), ("HF_ENDPOINT", "https://tok@mirror"), ("NCCL_X", "hf_" + "a" * 30),
        ("HF_ENDPOINT", "https://m/x?token=abc"), ("UNISONO_TOKEN", "x"),
    ],
)  # fmt: skip
def test_secrets_are_not_reported(name: str, value: str) -> None:
    assert _job_variables({name: value}) == {}


@given(st.text(string.ascii_letters, min_size=3), st.text(string.ascii_letters, min_size=3))
def test_no_password_in_a_url_is_ever_reported(user: str, password: str) -> None:
    assert (
        _job_variables({"HTTPS_PROXY": f"http://{user}:{password}@proxy", "NCCL_X": f"{user}:{password}@h"})
        == {}
    )


def test_the_token_is_read_once_and_is_then_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TOKEN", " secret \n")
    assert take_token() == "secret"
    assert "UNISONO_TOKEN" not in os.environ
    assert take_token() is None


def test_an_empty_token_is_none_and_is_gone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TOKEN", "")
    assert take_token() is None
    assert "UNISONO_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"), ({"HF_HOME": "/b"}, "/b/hub"), ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
    ],
)  # fmt: skip
def test_the_hub_cache_is_where_the_hub_keeps_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_environment().hub_cache == Path(folder)


def test_ncclls_files_are_read_the_users_before_the_systems(tmp_path: Path) -> None:
    system = tmp_path / "nccl.conf"
    system.write_text("# site\nNCCL_IB_DISABLE=1\n NCCL_ALGO = Tree # why\n\nnonsense\nNCCL_TOKEN=x\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\nNCCL_ALGO=Tree\n")
    assert read_nccl_files(named=None, home=tmp_path, system=system) == {
        "NCCL_IB_DISABLE": "1",
        "NCCL_ALGO": "Ring",
    }
    named = tmp_path / "mine"
    named.write_text("NCCL_PROTO=LL\n")
    assert read_nccl_files(named=str(named), home=tmp_path, system=tmp_path / "none") == {"NCCL_PROTO": "LL"}
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        assert read_nccl_files(named=str(other), home=tmp_path, system=other) == {}
