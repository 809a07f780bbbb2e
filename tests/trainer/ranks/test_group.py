"""The process group, replicas and shards in one process, over gloo, and over NCCL where there is a
CUDA device.

Run: pytest tests/trainer/ranks/test_group.py. NCCL refuses two ranks on one device, so there is one rank
here; tests/trainer/ranks has more, over gloo.
"""

import threading
from collections.abc import Iterator

import peft
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainer.ranks.conftest import Workshop
from unisono.base.errors import Disagreed, ModelError
from unisono.trainer.config.training_sections import OptimSection
from unisono.trainer.model.forward import Rows, choose_forward
from unisono.trainer.model.layers import has_kernels
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.plan import Mesh
from unisono.trainer.training import sharding
from unisono.trainer.training.gradient_sync import ReplicaSync
from unisono.trainer.training.join import check_world, checksum
from unisono.trainer.training.optim import build_optimizers
from unisono.trainer.training.process_group import Listener, Ranks, close_group, device_mesh
from unisono.trainer.training.sharding import full_tensor, shard_model

_CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
_LENGTHS = [40, 7, 300]


@pytest.fixture(params=["cpu", _CUDA])
def group(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A group of one rank."""
    device = torch.device("cpu")
    if request.param == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    listener = Listener("127.0.0.1")
    store = ("127.0.0.1", listener.port)
    yield Ranks("test", rank=0, world_size=1, device=device, store=store, listener=listener)
    assert close_group(orderly=True)
    assert close_group(orderly=True), "closing twice is once"


def _model() -> LoadedModel:
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip
    base.config.use_cache = False
    return LoadedModel(base, base, None, dict(base.named_parameters()), 0)


def _rows(device: torch.device) -> Rows:
    ids = torch.arange(sum(_LENGTHS), device=device) * 7 % 512
    positions = torch.cat([torch.arange(n) for n in _LENGTHS]).to(device)
    index = (positions[1:] > 0).nonzero()[:, 0]
    return Rows(ids, positions, _LENGTHS, index, ids[index + 1])


def test_sums_flags_and_barriers_go_over_the_group(group: Ranks) -> None:
    tensor = torch.ones(3, device=group.device)
    group.sum(tensor)
    group.broadcast(tensor)
    group.barrier()
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert group.any(True)
    assert not group.any(False)


def test_a_note_is_seen_once_it_is_left_from_any_thread(group: Ranks) -> None:
    assert not group.has_note("gave up step-00000005.tmp-1")
    leaving = threading.Thread(target=group.leave_note, args=("gave up step-00000005.tmp-1",))
    leaving.start()
    leaving.join()
    assert group.has_note("gave up step-00000005.tmp-1")
    assert not group.has_note("gave up step-00000010.tmp-2")


def test_gradients_in_buffers_are_those_of_one_device(group: Ranks) -> None:
    plain, summed = _model(), _model()
    for loaded in (plain, summed):
        loaded.model.to(group.device)
    replicas = ReplicaSync(group, group.device, list(summed.trainable.values()), scalars=4)
    replicas.begin()
    replicas.before_last_backward()
    rows = _rows(group.device)
    for loaded in (plain, summed):
        forward = choose_forward(loaded, dtype="bfloat16", quick_adapter=False, gradient_checkpointing=False)
        forward.loss(rows, count=len(rows.labels)).backward()
    assert replicas.finish(torch.ones(4, device=group.device)).tolist() == [1.0] * 4
    assert replicas.wait_and_time() >= 0
    for name, parameter in plain.trainable.items():
        torch.testing.assert_close(summed.trainable[name].grad, parameter.grad, rtol=1e-2, atol=1e-4)


def test_sharded_model_moves_to_its_device_with_same_loss_and_gradient(group: Ranks) -> None:
    plain, sharded = _model(), _model()
    plain.model.to(group.device)
    root = shard_model(sharded, device_mesh(Mesh.of("fsdp", 1), group.device))
    assert {p.device.type for p in sharded.trainable.values()} == {group.device.type}
    rows = _rows(group.device)
    losses, fast = [], []
    for loaded, module in ((plain, None), (sharded, root.module)):
        forward = choose_forward(
            loaded, dtype="bfloat16", quick_adapter=False, gradient_checkpointing=False, root=module
        )
        assert (forward.layout, forward.head) == ("flat", "chunked"), forward.why
        loss = forward.loss(rows, count=len(rows.labels))
        loss.backward()
        losses.append(loss.item())
        fast.append(forward.fast_layers)
    assert fast[0] == fast[1]
    assert (fast[0] > 0) == has_kernels("bfloat16", group.device)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    for name, parameter in plain.trainable.items():
        mine = sharded.trainable[name].grad
        assert mine is not None
        torch.testing.assert_close(full_tensor(mine), parameter.grad, rtol=1e-2, atol=1e-4)


def _adapted_model(rank: int) -> LoadedModel:
    """LoRA on frozen bfloat16 weights; B is not at its start, where it is 0."""
    base = _model().base.bfloat16()
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=rank, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, settings)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    loaded = LoadedModel(model, base, None, {}, 0)
    loaded.collect_trainable()
    return loaded


def _update(loaded: LoadedModel) -> None:
    section = OptimSection.model_validate({"lr": 0.01})
    build_optimizers(section, loaded.trainable, not_matrices=set()).step()


@pytest.mark.parametrize("rank", [4, 8])  # the products of adapters in C are for multiples of 8
@pytest.mark.parametrize("kept", [0, 2, 4])
def test_adapter_on_sharded_weights_has_fast_layers_and_the_same_update(
    group: Ranks, kept: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen weights of the last `kept` of four layers, and those outside of layers, are not
    sharded; all of the adapter is.
    """
    plain, sharded = _adapted_model(rank), _adapted_model(rank)
    plain.model.to(group.device)
    layers = sharded.base.model.layers
    size = sum(p.nbytes for p in layers[0].parameters())
    monkeypatch.setattr(sharding, "KEPT_WHOLE_BYTES", kept * size)
    root = shard_model(sharded, device_mesh(Mesh.of("fsdp", 1), group.device))
    assert [isinstance(layer.mlp.up_proj.base_layer.weight, DTensor) for layer in layers] == [
        number < 4 - kept for number in range(4)
    ]
    assert not isinstance(sharded.base.model.embed_tokens.weight, DTensor)
    assert {p.device.type for p in sharded.model.parameters()} == {group.device.type}
    assert {b.device.type for b in sharded.model.buffers()} == {group.device.type}
    rows = _rows(group.device)
    losses, fast = [], []
    for loaded, module in ((plain, None), (sharded, root.module)):
        forward = choose_forward(
            loaded, dtype="bfloat16", quick_adapter=True, gradient_checkpointing=False, root=module
        )
        assert forward.quick, forward.why
        loss = forward.loss(rows, count=len(rows.labels))
        loss.backward()
        losses.append(loss.item())
        fast.append(forward.fast_layers)
    assert fast[0] == fast[1]
    assert (fast[1] > 0) == has_kernels("bfloat16", group.device)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    for name, parameter in plain.trainable.items():
        mine = sharded.trainable[name].grad
        assert mine is not None
        torch.testing.assert_close(full_tensor(mine), parameter.grad, rtol=3e-2, atol=1e-4)
        parameter.grad = full_tensor(mine)  # AdamW divides by it, which makes much of a rounding
    _update(plain)
    _update(sharded)
    for name, parameter in plain.trainable.items():
        mine = sharded.trainable[name]
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(full_tensor(mine), parameter)


def test_only_the_last_layers_stay_whole_after_a_forward(
    group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = _model()
    layers = loaded.base.model.layers
    monkeypatch.setattr(sharding, "KEPT_WHOLE_BYTES", 2 * sum(p.nbytes for p in layers[0].parameters()) + 1)
    root = shard_model(loaded, device_mesh(Mesh.of("fsdp", 1), group.device))
    forward = choose_forward(
        loaded, dtype="float32", quick_adapter=False, gradient_checkpointing=False, root=root.module
    )
    rows = _rows(group.device)
    with torch.no_grad():
        forward.loss(rows, count=len(rows.labels))
    assert [_is_sharded(layer) for layer in layers] == [True, True, False, False]
    root.reshard()
    assert _is_sharded(loaded.base), "an update would make whole weights stale"
    forward.loss(rows, count=len(rows.labels)).backward()
    assert _is_sharded(loaded.base)


def _is_sharded(module: torch.nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in module.parameters())


def test_a_world_that_is_not_the_planned_one_is_refused(group: Ranks, workshop: Workshop) -> None:
    """A real group of one, and plans of one and of two ranks."""
    plan = workshop.plan("narrow")
    check_world(plan, plan.ranks[0], group)
    plan = workshop.plan("narrow", world=2, strategy="ddp")
    with pytest.raises(Disagreed) as caught:
        check_world(plan, plan.ranks[0], group)
    assert caught.value.exit_code == 3
    assert caught.value.verdict is not None
    assert caught.value.verdict.cause == "world_mismatch"
    assert "has 1 ranks, but the plan has 2" in caught.value.problems[0].what


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_checksum_is_the_same_on_the_device() -> None:
    tensor = torch.randn(1000, 777)
    assert checksum(tensor) == checksum(tensor.cuda())


def test_a_torch_that_cannot_shard_packed_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11, which makes each shard a parameter with a gradient."""

    def refuse(module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            torch.nn.Parameter(parameter.data)
        raise RuntimeError("another reason")

    monkeypatch.setattr(sharding, "fully_shard", refuse)
    with pytest.raises(RuntimeError, match="another reason"):
        sharding._shard(torch.nn.Linear(2, 2))
    packed = torch.nn.Module()
    packed.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ModelError, match="cannot shard quantized weights") as found:
        sharding._shard(packed)
    assert "require gradients" in found.value.problems[0].why
