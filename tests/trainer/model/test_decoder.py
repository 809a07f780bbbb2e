"""The fast layers give the outputs and gradients of transformers and peft.

Run: pytest tests/trainer/model/test_decoder.py
"""

import copy
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import peft
import pytest
import torch
import transformers

from unisono.trainer.config.training_sections import OptimSection
from unisono.trainer.model.attention import FLAT_ATTENTION, register
from unisono.trainer.model.decoder import (
    Product,
    Scratch,
    Trained,
    release_originals,
    slow_down_layers,
    speed_up_layers,
)
from unisono.trainer.model.forward import Rows, _flat_inputs
from unisono.trainer.model.kernels import LayerWeights, load_kernels, product, product_back
from unisono.trainer.model.layers import _on_gpu, _rows_in_place, head_loss, speed_up_lora, why_no_kernels
from unisono.trainer.training.gradient_sync import NoSync
from unisono.trainer.training.optim import build_optimizers, clipping_factor, total_norm

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")

_ROOT = Path(__file__).parents[3]
_LENGTHS = [
    5,
    9,
    9,
    30,
    300,
    128,
    129,
    1,
    1100,
]  # groups with pads, rows of several blocks, one that keeps no probabilities
_SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
_MODELS = {  # attention as one function needs a head size of 32, the functions for adapters such widths and a rank of 8
    "llama": (transformers.LlamaConfig(**_SMALL), 9),
    "mistral with a window of 100": (
        transformers.MistralConfig(**_SMALL, sliding_window=100, head_dim=32),
        9,
    ),
    "qwen2, whose products have a bias": (transformers.Qwen2Config(**_SMALL), 7),
    "qwen3, whose queries and keys have norms": (transformers.Qwen3Config(**_SMALL, head_dim=32), 11),
}


def _model(
    config: Any, *, dtype: torch.dtype, targets: str | list[str] = "all-linear", rank: int | None = None
) -> Any:
    """A LoRA model on the same weights for every dtype; what is adapted is never at its start,
    where B is 0.
    """
    register()
    torch.manual_seed(0)
    rank = rank or (8 if getattr(config, "head_dim", None) == 32 else 4)
    settings = peft.LoraConfig(r=rank, lora_alpha=1.5 * rank, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16().to(dtype)
    speed_up_lora(model)
    model.get_base_model().set_attn_implementation(FLAT_ATTENTION)
    return model


def _full_model(config: Any) -> Any:
    """A model whose float32 weights are all trained, but those of its last MLP."""
    register()
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1, std=0.1)
        parameter.requires_grad_("layers.1.mlp" not in name)
    model.set_attn_implementation(FLAT_ATTENTION)
    return model


def _inputs(vocabulary: int = 97) -> dict[str, Any]:
    ids = torch.randint(0, vocabulary, (sum(_LENGTHS),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in _LENGTHS])
    return _flat_inputs(Rows(ids, positions, _LENGTHS, ids[:1], ids[:1]), None)


def _outcome(model: Any) -> dict[str, torch.Tensor]:
    """The logits, and the gradient of each parameter of the adapter."""
    logits = model(**_inputs()).logits[0].float()
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weight).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("kind", "targets", "count"),
    [
        *((kind, "all-linear", count) for kind, (_, count) in _MODELS.items()),
        ("llama", ["q_proj", "v_proj"], 7),  # attentions have layers of two kinds, MLPs are frozen
    ],
)
def test_outputs_and_gradients_are_as_near_to_float32_as_those_of_torch(
    kind: str, targets: str | list[str], count: int
) -> None:
    config, _ = _MODELS[kind]
    exact = _outcome(_model(config, dtype=torch.float32, targets=targets))
    slow, fast = (_model(config, dtype=torch.bfloat16, targets=targets) for _ in range(2))
    with torch.no_grad():
        fast(**_inputs())  # attentions note their settings
    assert len(speed_up_layers(fast)) == count
    theirs, mine = _outcome(slow), _outcome(fast)
    assert mine.keys() == exact.keys()
    for name, wanted in exact.items():
        assert _error(mine[name], wanted) < 1.3 * _error(theirs[name], wanted) + 0.002, name


_CHANGED_OF_FULL = {
    "llama": 25,  # the embedding, 5 norms, 2 MLPs, 2 attentions, 15 products
    "mistral with a window of 100": 25,
    "qwen2, whose products have a bias": 17,
    "qwen3, whose queries and keys have norms": 27,
}


@pytest.mark.parametrize("kind", _MODELS)
def test_fast_layers_in_full_fine_tuning_are_as_near_float32_as_autocast(kind: str) -> None:
    config, _ = _MODELS[kind]
    exact = _outcome(_full_model(config))
    slow, fast = (_full_model(config) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            fast(**_inputs())  # attentions note their settings
        assert len(speed_up_layers(fast)) == _CHANGED_OF_FULL[kind]
        theirs, mine = _outcome(slow), _outcome(fast)
    assert mine.keys() == exact.keys()
    assert all(found.dtype == torch.float32 for found in mine.values())
    for name, wanted in exact.items():
        assert _error(mine[name], wanted) < 1.2 * _error(theirs[name], wanted) + 0.002, name
    # Without autocast they compute in float32, as those of torch do.
    assert torch.equal(fast(**_inputs()).logits, slow(**_inputs()).logits)


@pytest.mark.parametrize("kind", _MODELS)
def test_fast_frozen_model_is_as_near_to_float32_as_that_of_torch(
    kind: str,
) -> None:
    """In its outputs and in the gradients of its inputs."""
    config, count = _MODELS[kind]
    exact, slow, fast = (_full_model(config).bfloat16().requires_grad_(requires_grad=False) for _ in range(3))
    exact.float()
    before = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    with torch.no_grad():
        fast(**_inputs())  # attentions note their settings
    assert len(speed_up_layers(fast)) == count
    assert all(torch.equal(before[name], tensor) for name, tensor in fast.state_dict().items())
    outcomes = []
    for model in (exact, slow, fast):
        inputs = _inputs()
        given = model.get_input_embeddings()(inputs.pop("input_ids")).requires_grad_()
        logits = model(inputs_embeds=given, **inputs).logits[0].float()
        logits.square().sum().backward()
        outcomes.append((logits.detach(), given.grad))
    for wanted, theirs, mine in zip(*outcomes, strict=True):
        assert _error(mine, wanted) < 1.3 * _error(theirs, wanted) + 0.002


def test_full_fine_tuning_gradients_do_not_depend_on_thread_count() -> None:
    threads = torch.get_num_threads()
    kernels = load_kernels()
    assert kernels is not None
    torch.manual_seed(0)
    x, weight, grad = torch.randn(700, 100), torch.rand(100), torch.randn(700, 100).bfloat16()
    _, factor = kernels.wide_norm(x, weight, 1e-5)
    found = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(kernels.wide_norm_backward(grad, x, weight, factor))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("tokens", "widths", "rank"), [(701, (160, 96), 8), (64, (32,), 24), (1, (64, 32, 32), 16)]
)
def test_products_of_adapters_are_exact_with_any_number_of_threads(
    tokens: int, widths: tuple[int, ...], rank: int
) -> None:
    kernels = load_kernels()
    assert kernels is not None
    if not all(kernels.has_low_rank(rank, width) for width in widths):
        pytest.skip("needs a processor with AVX512_BF16 and without AMX")
    torch.manual_seed(0)
    sizes = (sum(widths), rank * len(widths), 224)
    y, low, x = (torch.randn(tokens, n + 3).bfloat16()[:, :n] for n in sizes)
    bs, scales = [torch.randn(width, rank) for width in widths], [0.75, 2.0, 0.5][: len(widths)]
    layers = [
        LayerWeights(torch.randn(width, 224).bfloat16(), torch.randn(rank, 224), b, scale)
        for width, b, scale in zip(widths, bs, scales, strict=True)
    ]
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            added, projected = y.clone(), torch.empty_like(low)
            kernels.add_low_rank(low, bs, added)
            kernels.project_low_rank(y, bs, projected)
            joint, lows, d_lows, d_x = (torch.empty_like(tensor) for tensor in (y, low, low, x))
            kernels.multiply(x, layers, joint, lows)
            kernels.multiply_back(y, layers, d_lows, d_x)
            gradients = kernels.low_rank_gradients((x, low), (y, low), bs, scales)
            found.append([added, projected, joint, lows, d_lows, d_x, *gradients])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
    added, projected, joint, ours, d_lows, d_x, *gradients = found[0]
    assert torch.equal(d_lows, projected)
    wanted_x = torch.zeros(tokens, 224, dtype=torch.float64)
    columns = [part.double() for part in y.split(widths, 1)]
    lows = [part.double() for part in low.split(rank, 1)]
    for i, b in enumerate(bs):
        of, rounded = slice(i * rank, (i + 1) * rank), b.bfloat16().double()
        outs = added.split(widths, 1)[i].double()
        assert _error(outs, columns[i] + lows[i] @ rounded.t()) < 0.002  # of rounding the result
        assert _error(projected[:, of].double(), columns[i] @ rounded) < 0.003
        down, weight = (layers[i].a * scales[i]).bfloat16().double(), layers[i].weight.double()
        assert _error(ours[:, of].double(), x.double() @ down.t()) < 0.003
        product = x.double() @ weight.t() + ours[:, of].double() @ rounded.t()
        assert _error(joint.split(widths, 1)[i].double(), product) < 0.002
        wanted_x += columns[i] @ weight + d_lows[:, of].double() @ down
        d_a, d_b = gradients[i].double(), gradients[len(bs) + i].double()
        assert _error(d_a, scales[i] * lows[i].t() @ x.double()) < 1e-5
        assert _error(d_b, columns[i].t() @ lows[i]) < 1e-5
    assert _error(d_x.double(), wanted_x) < 0.002


@pytest.mark.parametrize(("tokens", "out", "in_"), [(16, 32, 64), (701, 160, 224), (520, 64, 96)])
def test_products_with_a_weight_alone_are_exact_with_any_number_of_threads(
    tokens: int, out: int, in_: int
) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(tokens, n + 3).bfloat16()[:, :n] for n in (in_, out))
    weight = torch.randn(out, in_).bfloat16()
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append((product(x, weight), product_back(y, weight)))
    finally:
        torch.set_num_threads(threads)
    for forward, back in found:
        assert torch.equal(forward, found[0][0])
        assert torch.equal(back, found[0][1])
        assert _error(forward.double(), x.double() @ weight.double().t()) < 0.002
        assert _error(back.double(), y.double() @ weight.double()) < 0.002


def test_products_are_those_of_torch_where_those_in_c_do_not_fit() -> None:
    """A gradient is wanted, float32, sizes that are no multiples of 32, a weight that is a view,
    few rows.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    wanted = x.clone().requires_grad_()
    product(wanted, weight).sum().backward()
    assert wanted.grad is not None
    assert torch.equal(wanted.grad, torch.ones(40, 96).bfloat16() @ weight)
    pairs = [
        (x.float(), weight.float()),
        (x[:, :30], weight[:, :30].contiguous()),
        (x, weight[::2]),
        (x, weight[:50]),
        (x[:5], weight),
    ]
    for left, right in [*pairs, (x.t().contiguous().t(), weight)]:
        found = product(left, right)
        assert torch.equal(found, left @ right.t())
        assert torch.equal(product_back(found, right), found @ right)


@pytest.mark.parametrize("vocabulary", [1 << 12, 1 << 15, 1 << 18])
def test_logits_in_bfloat16_stay_few_and_their_chunks_have_one_size(vocabulary: int) -> None:
    weight = torch.empty(vocabulary, 8, device="meta")
    for rows in (1, 127, 128, 129, 511, 1021, 4096):
        size = _rows_in_place(torch.empty(rows, 8, dtype=torch.bfloat16), weight, 128)
        assert size * vocabulary <= max(128 * vocabulary, 15 << 20)
        assert 1 <= size <= min(rows, 510)
        chunks = -(-rows // size)
        assert chunks * size - rows < chunks
    assert (
        _rows_in_place(torch.empty(0, 8, dtype=torch.bfloat16), weight, 128) == 1
    )  # of no rows, a step of range
    assert not _rows_in_place(torch.empty(300, 8), weight, 128)  # float32 logits have copies


def test_first_layer_gradients_are_equal_with_and_without_input_gradient() -> None:
    found = []
    for hooked in (False, True):
        model = _model(_MODELS["llama"][0], dtype=torch.bfloat16)
        if hooked:
            model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: out.requires_grad_())
        with torch.no_grad():
            model(**_inputs())  # attentions note their settings
        assert speed_up_layers(model)
        found.append(_outcome(model))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("width", [96, 75, 7])
def test_silu_and_its_gradients_are_exact_and_nan_stays_nan(width: int) -> None:
    kernels = load_kernels()
    assert kernels is not None
    torch.manual_seed(0)
    gate, up, grad = (3 * torch.randn(300, width) for _ in range(3))
    gate[0] = torch.tensor([-1e30, -100.0, -90.0, 0.0, 90.0, 1e30, 1.0]).repeat(width)[:width]
    gate, up, grad = (tensor.bfloat16() for tensor in (gate, up, grad))
    wide = [tensor.double().requires_grad_() for tensor in (gate, up)]
    wanted = torch.nn.functional.silu(wide[0]) * wide[1]
    wanted.backward(grad.double())
    found = kernels.gate(gate, up)
    assert torch.equal(kernels.gate_backward(grad, gate, up), found)  # the gradients replace both
    for mine, exact in zip((found, gate, up), (wanted, *(tensor.grad for tensor in wide)), strict=True):
        assert torch.allclose(mine.double(), exact, rtol=0.01, atol=1e-5)
    gate[1] = float("nan")
    assert kernels.gate(gate, up)[1].isnan().all()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_updates_with_bfloat16_gradients_have_the_bits_of_float32_ones(
    optimizer: Literal["adamw", "muon"], max_grad_norm: float | None
) -> None:
    outcomes = []
    for keeps in (False, True):
        model = _full_model(transformers.LlamaConfig(**_SMALL, tie_word_embeddings=True, pad_token_id=3))
        with torch.no_grad():
            model(**_few())
        speed_up_layers(model)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        NoSync(trainable.values() if keeps else ())
        optimizers = build_optimizers(OptimSection(kind=optimizer), trainable, not_matrices=set())
        norms, dtypes = [], set()
        for _ in range(3):
            _tied_loss(model).backward()
            gradients = [p.grad for p in trainable.values() if p.grad is not None]
            dtypes |= {gradient.dtype for gradient in gradients}
            norms.append(total_norm(gradients))
            optimizers.step(clipping_factor(norms[-1], max_grad_norm))
            optimizers.zero_grad()
        assert dtypes == ({torch.float32, torch.bfloat16} if keeps else {torch.float32})
        states = [v for part in optimizers.parts.values() for s in part.state.values() for v in s.values()]
        assert all(group["params"] for part in optimizers.parts.values() for group in part.param_groups)
        outcomes.append([*norms, *model.state_dict().values(), *states])
    assert len(outcomes[0]) == len(outcomes[1])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*outcomes, strict=True))


def _few() -> dict[str, Any]:
    """Two rows, with the padding token and others several times."""
    ids, lengths = torch.tensor([5, 3, 7, 5, 5, 96, 3, 3, 8, 9, 5, 11, 2, 0]), [5, 9]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return _flat_inputs(Rows(ids, positions, lengths, ids[:1], ids[:1]), None)


def _tied_loss(model: Any) -> torch.Tensor:
    """As in training: the head at some tokens, in chunks, with the weight of the embedding."""
    inputs = _few()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(**inputs).last_hidden_state[0][1::2]
        labels = inputs["input_ids"][0][: len(hidden)]
        return head_loss(hidden, model.lm_head.weight, labels, count=9, dtype=torch.bfloat16)


def test_weight_with_several_uses_sums_its_gradients_in_float32() -> None:
    """By the fast layers twice, and by torch's own product before and after them."""
    gradients = []
    for keeps in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 96, bias=False)
        NoSync([layer.weight] if keeps else [])
        fast = Trained([layer], Scratch(torch.device("cpu")))
        x = torch.randn(50, 64, requires_grad=True)
        rows = x @ layer.weight.t() @ layer.weight
        for _ in range(2):
            rows = Product.apply(rows.bfloat16(), fast, layer.weight).float() @ layer.weight
        (rows @ layer.weight.t()).square().sum().backward()
        gradients.append(layer.weight.grad)
    plain, kept = gradients
    assert plain is not None
    assert kept is not None
    assert kept.dtype == torch.float32
    assert _error(kept, plain) < 1e-5


def digest_of_steps() -> str:
    """Of all weights after three steps with two threads."""
    model = _model(_MODELS["mistral with a window of 100"][0], dtype=torch.bfloat16)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizers = build_optimizers(OptimSection(), trainable, not_matrices=set())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            model(**_inputs())
        speed_up_layers(model)
        for _ in range(3):
            _outcome(model)
            optimizers.step()
            optimizers.zero_grad()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    weights = b"".join(tensor.detach().float().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


def test_steps_with_two_threads_give_the_same_bits_in_every_process() -> None:
    """A resume depends on it.

    The threads of the compiled functions are those of torch: its OpenMP library is the only one.
    """
    # not the test
    program = (
        "import tests.trainer.model.test_decoder as t; print(t.digest_of_steps(), len(t.openmp_libraries()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "2"}, cwd=_ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [digest_of_steps(), "1"]


def openmp_libraries() -> set[str]:
    """Those that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if re.search(r"/lib(gomp|iomp|omp)\b", line)}


def test_the_gradient_of_a_trained_head_is_not_rounded_over_its_chunks() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(900, 32).bfloat16(), (torch.randn(5000, 32) * 0.5).requires_grad_()
    labels = torch.randint(0, 5000, (900,))
    (mine,) = torch.autograd.grad(head_loss(hidden, weight, labels, count=77, dtype=torch.bfloat16), weight)
    logits = hidden.float() @ weight.bfloat16().float().t()
    theirs = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / 77
    (exact,) = torch.autograd.grad(theirs, weight)
    assert mine.dtype == torch.float32
    assert _error(mine, exact) < 0.006  # of the bfloat16 logits alone; rounding each sum adds to it


def test_what_needs_the_original_layers_gets_them() -> None:
    config, _ = _MODELS["llama"]
    slow, fast = (_model(config, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        fast(**_inputs())
    changed = speed_up_layers(fast)
    with torch.no_grad():
        with fast.disable_adapter(), slow.disable_adapter():
            assert _error(fast(**_inputs()).logits, slow(**_inputs()).logits) < 0.02
        prompt = {
            "input_ids": torch.arange(7)[None],
            "max_new_tokens": 5,
            "do_sample": False,
            "pad_token_id": 0,
        }
        for model in (fast, slow):
            model.get_base_model().set_attn_implementation("sdpa")
        outputs = [model.generate(**prompt) for model in (fast, slow)]
        assert outputs[0].shape == outputs[1].shape
        slow_down_layers(changed)
        assert torch.equal(
            fast(input_ids=prompt["input_ids"]).logits, slow(input_ids=prompt["input_ids"]).logits
        )


def test_base_weights_keep_their_values_and_names() -> None:
    config, _ = _MODELS["llama"]
    model = _model(config, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model(**_inputs())
    speed_up_layers(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_file_of_joined_weights_does_not_stay_in_memory(tmp_path: Path) -> None:
    _full_model(_MODELS["llama"][0]).bfloat16().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.requires_grad_(requires_grad=False)
    model.set_attn_implementation(FLAT_ATTENTION)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model(**_inputs())
    assert len(speed_up_layers(model)) == 9
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    release_originals(model)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_nan_in_the_weights_is_a_nan_in_the_outputs() -> None:
    model = _model(_MODELS["llama"][0], dtype=torch.bfloat16)
    with torch.no_grad():
        model(**_inputs())
        speed_up_layers(model)
        for name, parameter in copy.deepcopy(dict(model.named_parameters())).items():
            if "lora_A" not in name or "layers.1" not in name:
                continue
            dict(model.named_parameters())[name].fill_(float("nan"))
            assert model(**_inputs()).logits.isnan().any(), name
            dict(model.named_parameters())[name].copy_(parameter)


@pytest.mark.parametrize("needs_weight", [False, True])
@pytest.mark.parametrize(("rows", "vocabulary"), [(300, 1000), (300, 1024), (1100, 1024), (3, 64)])
def test_the_loss_of_bfloat16_logits_equals_that_of_torch(
    *, rows: int, vocabulary: int, needs_weight: bool
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 32).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, 32) * 3).bfloat16().requires_grad_(needs_weight)
    labels = torch.randint(0, vocabulary, (rows,))
    mine = head_loss(hidden, weight, labels, count=77, dtype=torch.bfloat16)
    logits = (hidden @ weight.t()).float()
    theirs = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / 77
    assert abs(float((mine - theirs).detach())) < 1e-5 * float(theirs.detach())
    wanted = [hidden, weight] if needs_weight else [hidden]
    for a, b in zip(torch.autograd.grad(mine, wanted), torch.autograd.grad(theirs, wanted), strict=True):
        assert _error(a.float(), b.float()) < 0.01


@pytest.mark.parametrize("refused", ["-fopenmp", "libgomp"])
def test_a_compiler_without_openmp_builds_functions_with_one_thread(tmp_path: Path, refused: str) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"""#!/bin/sh
for word; do case "$word" in {refused}|*/{refused}*) exit 1;; esac; done
exec {shutil.which("cc")} "$@"
""")
    compiler.chmod(0o755)
    program = """
import torch
from unisono.trainer.model.kernels import _built, load_kernels
kernels = load_kernels()
torch.set_num_threads(2)
x = torch.arange(65536).view(64, 1024).bfloat16()
print(b"libgomp" in _built().read_bytes(), kernels.norm(x, torch.ones(1024).bfloat16(), 1e-5)[0].double().sum().item())
"""
    kernels = load_kernels()
    assert kernels is not None
    x = torch.arange(65536).view(64, 1024).bfloat16()
    wanted = kernels.norm(x, torch.ones(1024).bfloat16(), 1e-5)[0].double().sum().item()
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"False {wanted}\n"


def test_without_a_compiler_torch_does_the_work(tmp_path: Path) -> None:
    program = "from unisono.trainer.model.kernels import load_kernels; print(load_kernels())"
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
    assert load_kernels() is not None


def test_without_triton_the_reason_is_given_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "unisono.trainer.model.cuda_kernels", raising=False)
    assert _on_gpu.__wrapped__() == (None, "Triton is not installed (pip install triton)")
    for dtype, device in (("float32", "cuda"), ("bfloat16", "cpu")):
        assert why_no_kernels(dtype, torch.device(device)) == ""
