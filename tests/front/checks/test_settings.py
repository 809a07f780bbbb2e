"""Environment variables: explained, and the wrong, obsolete, misspelt and left-over ones named.

Run: pytest tests/front/checks/test_settings.py
"""

from pathlib import Path

import pytest

from tests.front.checks.doctor_process import doctor
from tests.front.checks.test_system import TWO_DEVICES
from unisono.base.causes.variables import ADVICE, VALUES, VARIABLES, find_variable

_SECRET = "hf_" + "abcdefghij" * 3


@pytest.mark.makes("settings.values", "pass")
@pytest.mark.makes("settings.suspicious", "pass")
@pytest.mark.makes("settings.misspelt", "pass")
@pytest.mark.makes("settings.left_over", "pass")
def test_good_settings_pass_and_each_is_explained(tmp_path: Path) -> None:
    env = {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5_0", "CUDA_HOME": "/usr/local/cuda", "TORCH_NEWLY": "1"}
    seen = doctor(tmp_path, env=env)
    for name in ("values", "suspicious", "misspelt", "left_over"):
        assert seen.status(f"settings.{name}") == "pass", seen.text(f"settings.{name}")
    text = seen.text("settings.values")
    assert "NCCL_DEBUG=WARN: how much NCCL logs" in text
    assert (
        "NCCL_IB_HCA=mlx5_0: which InfiniBand adapters and ports are used; it may differ, and must be valid on each node" in text
    )  # fmt: skip
    assert "TORCH_NEWLY: unknown to unisono" in text


@pytest.mark.makes("settings.values", "warn")
def test_a_value_that_is_not_understood_is_named_with_those_that_are(tmp_path: Path) -> None:
    seen = doctor(tmp_path, env={"NCCL_P2P_DISABLE": "true", "GLOO_SOCKET_IFNAME": "^docker0,lo"})
    assert seen.status("settings.values") == "warn"
    text = seen.text("settings.values")
    assert "NCCL_P2P_DISABLE=true: valid is 0 or 1" in text
    assert "gloo fails with `Unable to find address for`" in text


@pytest.mark.makes("settings.values", "fail")
def test_value_that_torch_cannot_use_fails_if_there_are_devices(tmp_path: Path) -> None:
    """With such a value, torch makes no process group."""
    answers = {"gpus": TWO_DEVICES, "packages": {"torch": "2.13.0+cu130"}}
    seen = doctor(tmp_path, env={"TORCH_NCCL_BLOCKING_WAIT": "on"}, answers=answers)
    assert (seen.status("settings.values"), seen.code) == ("fail", 6)


@pytest.mark.makes("settings.suspicious", "warn")
def test_obsolete_contradicting_and_unknown_settings_warn_with_a_remedy(tmp_path: Path) -> None:
    env = {
        "NCCL_BLOCKING_WAIT": "1", "NCCL_TIMEOUT": "1800", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_IB_DISABEL": "1",
    }  # fmt: skip
    seen = doctor(tmp_path, env=env)
    text = seen.text("settings.suspicious")
    assert seen.status("settings.suspicious") == "warn"
    for printed in (
        "deprecated name",
        "not an NCCL variable",
        "hang forever",
        "did you mean NCCL_IB_DISABLE?",
    ):
        assert printed in text
    assert "node 0" not in text


@pytest.mark.makes("settings.suspicious", "fail")
def test_a_device_that_is_named_twice_fails(tmp_path: Path) -> None:
    answers = {"gpus": TWO_DEVICES, "packages": {"torch": "2.13.0+cu130"}}
    seen = doctor(tmp_path, env={"CUDA_VISIBLE_DEVICES": "0,0"}, answers=answers)
    assert (seen.status("settings.suspicious"), seen.code) == ("fail", 6)
    assert "a device is listed twice" in seen.text("settings.suspicious")


@pytest.mark.makes("settings.misspelt", "warn")
def test_a_misspelt_name_warns_with_the_one_that_may_be_meant(tmp_path: Path) -> None:
    seen = doctor(
        tmp_path, env={"CUDA_VISIBLE_DEVICE": "0", "OMP_NUM_THREAD": "4", "PYTORCH_CUDA_ALLOC_CONFIG": "x:y"}
    )
    text = seen.text("settings.misspelt")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"):
        assert f"did you mean {name}?" in text


def test_a_right_name_that_is_almost_a_known_one_is_left_alone(tmp_path: Path) -> None:
    seen = doctor(tmp_path, env={"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True", "NCCL_IB_PKEY": "0"})
    assert (seen.status("settings.misspelt"), seen.status("settings.suspicious")) == ("pass", "pass")
    assert "PYTORCH_HIP_ALLOC_CONF: see its library's documentation" in seen.text("settings.values")


@pytest.mark.makes("settings.left_over", "warn")
def test_variables_of_a_former_job_warn_with_the_line_that_unsets_them(tmp_path: Path) -> None:
    env = {"RANK": "0", "MASTER_ADDR": "10.0.0.1", "UNISONO_GUARD": "/dev/shm/gone/guard.json"}
    seen = doctor(tmp_path, env=env)
    assert seen.status("settings.left_over") == "warn"
    assert "`unset MASTER_ADDR RANK UNISONO_GUARD`" in seen.text("settings.left_over")


def test_no_secret_is_shown_in_the_table_the_json_or_the_page(tmp_path: Path) -> None:
    env = {
        "HF_TOKEN": _SECRET, "HF_ENDPOINT": f"https://user:{_SECRET}@mirror.example", "NCCL_NET_PLUGIN": _SECRET,
        "UNISONO_TOKEN": "s3cret-of-this-job", "HTTPS_PROXY": f"http://me:{_SECRET}@proxy:3128", "NCCL_TOKEN": "plain-text-secret",
        "NCCL_TOPO_FILE": f"/data/?token={_SECRET}",
    }  # fmt: skip
    seen = doctor(tmp_path, "--report", str(tmp_path / "r.html"), env=env, as_json=False)
    json = doctor(tmp_path, env=env)
    printed = seen.out + seen.err + json.out + json.err + (tmp_path / "r.html").read_text()
    for secret in (_SECRET, "s3cret-of-this-job", "plain-text-secret"):
        assert secret not in printed


def test_what_is_set_to_get_around_faults_has_its_price_and_its_place() -> None:
    names = {variable.name for variable in VARIABLES}
    assert set(ADVICE) <= names
    assert set(VALUES) <= names
    disabling = {
        name for name in names if name.endswith("_DISABLE") and not name.startswith(("CUDA_", "HF_"))
    }
    assert disabling <= set(ADVICE)
    peer = find_variable("nccl_p2p_disable")
    assert peer is not None
    assert "tenth of the bandwidth" in ADVICE[peer.name].costs
