"""Attention inside rows equals dense masked attention. Run: pytest tests/trainer/model/test_attention.py"""

import faulthandler
import os
import resource
import shutil
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from unisono.base.causes.signatures import match_line
from unisono.trainer.model.attention import (
    Ends,
    FlashAttention,
    RowAttention,
    UnsupportedAttentionError,
    flat_attention,
)
from unisono.trainer.model.kernels import Heads, PackedAttention, _attention_values, load_kernels


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int | None
) -> torch.Tensor:
    tokens, heads, _ = q.shape
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(tokens)
    sees = (row[:, None] == row[None]) & (position[:, None] >= position[None])
    if window:
        sees &= position[:, None] - position[None] < window
    group = heads // k.shape[1]
    q, k, v = (
        t.transpose(0, 1)[None] for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)[0].transpose(0, 1)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 200),
    group=st.integers(1, 3),
)
def test_output_and_gradients_equal_dense_attention(
    lengths: list[int], window: int | None, group: int
) -> None:
    torch.manual_seed(0)
    tokens, kv, size = sum(lengths), 2, 8
    shapes = ((tokens, kv * group, size), (tokens, kv, size), (tokens, kv, size))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], dtype=torch.float64)
    outputs = (
        RowAttention.apply(*tensors, lengths, size**-0.5, window),
        _dense(tensors[0], tensors[1], tensors[2], lengths, window),
    )
    results = [[out.detach(), *torch.autograd.grad(out, tensors, weight)] for out in outputs]
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("heads", "window"), [(2, None), (2, 5), (4, None)])
def test_the_flash_attention_of_this_torch_takes_what_it_is_given(heads: int, window: int | None) -> None:
    """Without data, so without a GPU: a refusal would only make training slow."""
    shapes = ((9, 4, 16), (9, heads, 16), (9, heads, 16))
    q, k, v = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes
    )
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    out = FlashAttention.apply(q, k, v, Ends(ends, 5), Heads(heads, 4 // heads, 16, 0.25, window))
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [out.shape, *(grad.shape for grad in grads)] == [q.shape, *(tensor.shape for tensor in (q, k, v))]


def test_float32_on_a_gpu_says_what_flash_attention_needs() -> None:
    """It becomes the reason that a run shows for padded rows, instead of an exception's name."""
    with FakeTensorMode():
        q = torch.empty(1, 2, 9, 16, device="cuda")
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        with pytest.raises(UnsupportedAttentionError, match="bfloat16 or float16 on a GPU"):
            flat_attention(torch.nn.Module(), q, q, q, None, cu_seq_lens_q=ends, max_length_q=5)


def test_long_rows_compute_their_probabilities_again_with_the_same_result() -> None:
    torch.manual_seed(0)
    lengths = [1500, 20]  # beyond what is kept
    tensors = [torch.randn(1520, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(1520, 2, 8, dtype=torch.float64)
    mine = torch.autograd.grad(RowAttention.apply(*tensors, lengths, 0.3, None), tensors, weight)
    scaled = [tensors[0] * (0.3 * 8**0.5), tensors[1], tensors[2]]
    theirs = torch.autograd.grad(_dense(scaled[0], scaled[1], scaled[2], lengths, None), tensors, weight)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [[5, 9, 9, 30], [300, 128, 129, 1], [1100, 60]])
@pytest.mark.parametrize(
    ("kv", "group", "size"),
    [(2, 3, 16), (2, 3, 32), (1, 4, 96)],  # one function needs a multiple of 32
)
def test_packed_attention_in_bfloat16_is_as_exact_as_its_dtype(
    lengths: list[int], window: int | None, kv: int, group: int, size: int
) -> None:
    torch.manual_seed(0)
    kernels = load_kernels()
    assert kernels is not None
    tokens = sum(lengths)
    shapes = ((tokens, kv * group, size), (tokens, kv, size), (tokens, kv, size))
    tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    weight = torch.randn(shapes[0]).bfloat16()
    heads = Heads(kv, group, size, size**-0.5, window)
    outputs = (
        PackedAttention.apply(*tensors, tuple(lengths), heads, kernels),
        RowAttention.apply(*tensors, lengths, size**-0.5, window),
        RowAttention.apply(*exact, lengths, size**-0.5, window),
    )
    mine, theirs, wanted = (
        [out.detach(), *torch.autograd.grad(out, inputs, weight.to(out.dtype))]
        for out, inputs in zip(outputs, (tensors, tensors, exact), strict=True)
    )
    for a, b, c in zip(mine, theirs, wanted, strict=True):
        assert (a - c).norm() < 1.2 * (b - c).norm() + 1e-3 * c.norm()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
def test_attention_function_keeps_nan_and_its_bits_with_any_thread_count() -> None:
    kernels = load_kernels()
    assert kernels is not None
    if not kernels.has_products:
        pytest.skip("needs a processor with AVX512_BF16 and without AMX")
    torch.manual_seed(0)
    lengths, heads = (70, 1, 200), Heads(3, 2, 32, 32**-0.5, None)
    shapes = ((271, 6, 32), (271, 3, 32), (271, 3, 32))
    tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]

    def found() -> list[torch.Tensor]:
        out = PackedAttention.apply(*tensors, lengths, heads, kernels)
        return [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))]

    threads, of_threads = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            of_threads.append(found())
    finally:
        torch.set_num_threads(threads)
    for other in of_threads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_threads[0], other, strict=True))
    for tensor in tensors:
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor[100, 0, 5] = float("nan")
        odd = found()[0].isnan().any(2).any(1)
        assert odd[100]
        assert not odd[:70].any(), "of another row"
        with torch.no_grad():
            tensor.copy_(kept)


def test_process_without_memory_for_attention_ends_naming_the_cause() -> None:
    kernels = load_kernels()
    if kernels is None or not kernels.has_products:
        pytest.skip("needs a C compiler and a processor with AVX512_BF16, without AMX")
    tokens = 400_000  # 150 MB for one head
    tensors = [torch.zeros(tokens, 1, 64, dtype=torch.bfloat16) for _ in range(4)]
    rope, begins, sums = (
        (torch.zeros(tokens, 64), torch.zeros(tokens, 64)),
        torch.tensor([0, tokens]),
        torch.zeros(2, tokens),
    )
    values = _attention_values(tuple(tensors[:3]), rope, begins, Heads(1, 1, 64, 1.0, None))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.dup2(writer, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
        kernels._call("attention", *values, tensors[3], *sums)
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        printed = stream.read()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGABRT, printed
    assert "host_memory_gone" in {found.id for line in printed.splitlines() for found in match_line(line)}
