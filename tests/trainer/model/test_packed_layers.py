"""Linear layers with packed weights. Run: pytest tests/trainer/model/test_packed_layers.py"""

import pytest
import torch

from unisono.trainer.model.packed_layers import packed_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_packed_weights_computes_what_it_computed(dtype: torch.dtype) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(48, 80), torch.nn.SiLU(), torch.nn.Linear(80, 7, bias=False)
        )
        inputs = [torch.randn(*shape, 48) for shape in ((), (1,), (3, 5), (0,), (2, 1, 9))]
    model = model.to(dtype)
    inputs = [x.to(dtype) for x in inputs] + [torch.cat([inputs[2], inputs[2]], -1).to(dtype)[..., ::2]]
    with torch.inference_mode():
        before = [model(x) for x in inputs]
        with packed_layers(model):
            assert all("forward" in vars(layer) for layer in (model[0], model[2]))
            for x, out in zip(inputs, before, strict=True):
                torch.testing.assert_close(
                    model(x),
                    out,
                    rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-4,
                    atol=1e-5 if dtype == torch.float32 else 1e-2,
                )
        assert all(torch.equal(model(x), out) for x, out in zip(inputs, before, strict=True))
    assert "forward" not in vars(model[0])


def test_layers_with_a_forward_of_their_own_or_on_another_device_are_not_packed() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = torch.nn.ModuleList(
        [Doubled(8, 8), torch.nn.Linear(8, 8, dtype=torch.float64), torch.nn.Linear(8, 8, device="meta")]
    )
    with packed_layers(model):
        assert not any("forward" in vars(layer) for layer in model)
