"""Tensors, values and optimizers come back to the same bits.

Run: pytest tests/trainer/checkpoint/test_state.py
"""

import math
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.checkpoint.states import load_state, save_state
from unisono.base.errors import IntegrityError
from unisono.trainer.checkpoint.state import load_optimizer, optimizer_tensors
from unisono.trainer.checkpoint.writer import StorageFull, decode_values, encode_values

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple),
    max_leaves=10,
)


@given(VALUES)
def test_values_read_back_as_they_were(value: object) -> None:
    import json

    document = json.dumps(encode_values(value, "value"), allow_nan=False)
    assert repr(decode_values(json.loads(document))) == repr(
        value
    )  # repr tells -0.0 from 0.0, and nan is equal to itself


@pytest.mark.parametrize("value", [{1: "a"}, {"$float": 1}, b"x", {1, 2}, object()])
def test_what_json_would_change_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="JSON cannot represent"):
        encode_values(value, "state")


def test_a_state_of_pythons_generator_comes_back(tmp_path: Path) -> None:
    generator = random.Random(7)
    save_state(tmp_path, tensors={}, state={"random": generator.getstate()})
    wanted = generator.random()
    generator.setstate(load_state(tmp_path)[1]["random"])
    assert generator.random() == wanted


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5)], ids=str)
def test_tensors_keep_dtype_shape_and_bits(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    save_state(tmp_path, tensors={"group": {"a.b": tensor}, "empty": {}}, state={})
    tensors, state = load_state(tmp_path)
    again = tensors["group"]["a.b"]
    assert (again.dtype, again.shape, _bits(again)) == (tensor.dtype, tensor.shape, _bits(tensor))
    assert tensors["empty"] == {}
    assert state == {}


def test_nan_infinity_and_negative_zero_keep_their_bits(tmp_path: Path) -> None:
    tensor = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-45])
    save_state(tmp_path, tensors={"group": {"a": tensor}}, state={})
    assert _bits(load_state(tmp_path)[0]["group"]["a"]) == _bits(tensor)


def test_views_of_one_storage_are_written_each(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    members = {"whole": whole, "row": whole[1], "turned": whole.T, "part": whole[:, 1:3]}
    save_state(tmp_path, tensors={"group": members}, state={})
    group = load_state(tmp_path)[0]["group"]
    assert all(torch.equal(group[name], tensor) for name, tensor in members.items())


def test_nothing_is_pickled(tmp_path: Path) -> None:
    save_state(tmp_path, tensors={"group": {"a": torch.zeros(2)}}, state={"step": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["group.safetensors", "state.json"]


@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_files_that_cannot_be_read_are_an_integrity_error(damage: str, tmp_path: Path) -> None:
    save_state(tmp_path, tensors={"group": {"a": torch.zeros(2)}}, state={"step": 1})
    file = tmp_path / "group.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:10])
    elif damage == "gone":
        file.unlink()
    else:
        (tmp_path / "state.json").write_text("[]")
    with pytest.raises(IntegrityError) as caught:
        load_state(tmp_path)
    assert caught.value.exit_code == 7


def test_no_room_is_known_before_anything_is_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False, capture_output=True
    ).returncode:
        pytest.skip("needs mounts")
    try:
        with pytest.raises(StorageFull) as caught:
            save_state(disk, tensors={"group": {"a": torch.zeros(100_000)}}, state={})
        assert list(disk.iterdir()) == []
        assert caught.value.needed_bytes > 400_000
        assert caught.value.missing_bytes == caught.value.needed_bytes - caught.value.free_bytes
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.rand(6, 6))
        self.bias = torch.nn.Parameter(torch.zeros(6))
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.low = torch.nn.Parameter(torch.rand(6, 6).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.matrix + self.bias) * self.scale @ self.low.float()).square().mean()


Build = Callable[[_Net], torch.optim.Optimizer]


def _adamw(net: _Net) -> torch.optim.Optimizer:
    groups = [
        {"params": [net.matrix], "weight_decay": 0.1},
        {"params": [net.bias, net.scale], "weight_decay": 0.0, "lr": 3e-4},
        {"params": [net.low]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


OPTIMIZERS: dict[str, Build] = {
    "adamw fused": _adamw,
    "adamw": lambda net: torch.optim.AdamW([net.matrix, net.bias, net.scale, net.low], lr=1e-2, amsgrad=True),
    "muon": lambda net: torch.optim.Muon([net.matrix, net.low], lr=0.02),
    "sgd without state": lambda net: torch.optim.SGD([net.matrix, net.bias, net.scale, net.low], lr=0.1),
}


def _train(net: _Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.rand(4, 6, generator=torch.Generator().manual_seed(step))
        loss = net(x)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("done", [0, 3])
def test_training_continues_bit_equal_after_saving_and_loading(name: str, done: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = _Net()
    optimizer = OPTIMIZERS[name](net)
    names = _names(net, optimizer)
    _train(net, optimizer, range(done))
    tensors, values = optimizer_tensors(optimizer, names)
    weights: dict[str, torch.Tensor] = dict(net.named_parameters())
    save_state(tmp_path, tensors={"model": weights, "optimizer": tensors}, state={"optimizer": values})
    wanted = _train(net, optimizer, range(done, done + 5))

    other = _Net()
    again = OPTIMIZERS[name](other)
    loaded, state = load_state(tmp_path)
    with torch.no_grad():
        for key, parameter in other.named_parameters():
            parameter.copy_(loaded["model"][key])
    load_optimizer(again, names, loaded["optimizer"], state["optimizer"])
    assert _train(other, again, range(done, done + 5)) == wanted
    for key, parameter in other.named_parameters():
        assert _bits(parameter) == _bits(net.get_parameter(key))
    assert _comparable(again, names) == _comparable(optimizer, names)


def _names(net: _Net, optimizer: torch.optim.Optimizer) -> list[str]:
    by_id = {id(parameter): name for name, parameter in net.named_parameters()}
    return [by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _comparable(optimizer: torch.optim.Optimizer, names: list[str]) -> tuple[dict[str, Any], Any]:
    tensors, values = optimizer_tensors(optimizer, names)
    return {name: (tensor.dtype, tensor.shape, _bits(tensor)) for name, tensor in tensors.items()}, values


def test_state_of_other_parameters_is_refused_by_name() -> None:
    net = _Net()
    optimizer = _adamw(net)
    _train(net, optimizer, range(1))
    tensors, values = optimizer_tensors(optimizer, _names(net, optimizer))
    with pytest.raises(IntegrityError, match="does not match") as caught:
        load_optimizer(optimizer, ["matrix", "bias", "scale", "lower"], tensors, values)
    assert "low" in caught.value.problems[0].why


def test_state_in_other_groups_is_refused() -> None:
    net = _Net()
    optimizer = _adamw(net)
    names = _names(net, optimizer)
    tensors, values = optimizer_tensors(optimizer, names)
    flat = torch.optim.AdamW([net.matrix, net.bias, net.scale, net.low])
    with pytest.raises(IntegrityError, match="does not match"):
        load_optimizer(flat, names, tensors, values)
