"""The losses of the first five steps equal those of diffusers' recipe for LoRA written by hand with
peft, with each setting of the loss.

The recipe gets latents, noise, timesteps and captions of the loader; what a setting does to them is
compared with its formula.

Run: pytest tests/trainer/diffusion/test_parity.py
"""

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.trainer.diffusion.conftest import Studio
from unisono.trainer.batches.seeds import stream_seed
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.families.pictures.latents import PictureLoader, PictureUse
from unisono.trainer.families.pictures.pipeline import fast_attention
from unisono.trainer.model.kernels import Kernels, load_kernels
from unisono.trainer.plan import RunPlan, SequenceStream

needs.package("diffusers")
Image = needs.package("PIL.Image")

Encode = Callable[[Any, Sequence[str]], torch.Tensor]
_COMMON: dict[str, Any] = {
    "adapter": {"targets": [r"to_(q|k|v|out\.0)$"]},
    "optim": {"lr": 1e-2, "schedule": "constant", "warmup": "0 steps"},
    "batch": {"global": 4, "micro": 4},
    "duration": "5 steps",
}
_PLAIN = {"buckets": False, "caption_dropout": 0.0, "noise_offset": 0.0}


def _loader(plan: RunPlan) -> PictureLoader:
    return PictureLoader(plan.config, Path(plan.data.cache_dir), directory=Path(plan.model.directory), device=torch.device("cpu"), timesteps=100, total_steps=plan.total_steps)  # fmt: skip


def _uses(plan: RunPlan) -> list[list[PictureUse]]:
    """The uses of pictures in each step, by the loader of the run."""
    loader = _loader(plan)
    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    stream, size = SequenceStream(plan.data.train.sequences, plan.config.seed), plan.global_batch
    found = []
    for step in range(plan.total_steps):
        places = list(range(step * size, (step + 1) * size))
        pictures = [int(table.columns["picture"][table.rows_of(stream.at(place))[0]]) for place in places]
        seeds = [stream_seed(plan.config.seed, "pictures", place) for place in places]
        found.append(loader.load(pictures, seeds, [step] * size).uses)
    return found


def _last_layer(pipeline: Any, captions: Sequence[str]) -> torch.Tensor:
    ids = pipeline.tokenizer(list(captions), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids  # fmt: skip
    found: torch.Tensor = pipeline.text_encoder(ids)[0]
    return found


def _by_hand(
    plan: RunPlan,
    *,
    encode: Encode = _last_layer,
    prediction: str = "epsilon",
    gamma: float | None = None,
    prior: tuple[str, float] = ("", 1.0),
    dropout: float = 0.0,
    bf16: bool = False,
) -> list[float]:
    """The losses of the recipe.

    Args:
        plan: of the run to compare with.
        encode: embeddings of captions, by a pipeline.
        prediction: what the UNet predicts.
        gamma: of min-SNR, as sd-scripts weights the loss of each picture.
        prior: a word of the captions of regularization pictures, and the weight of their loss.
        dropout: of the LoRA layers.
        bf16: frozen weights in bfloat16, and autocast.
    """
    from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from peft import LoraConfig

    from unisono.trainer.families.pictures.pipeline import quiet

    root = Path(plan.model.directory)
    with quiet():
        pipeline: Any = StableDiffusionPipeline.from_pretrained(root, safety_checker=None)
        torch.manual_seed(stream_seed(plan.config.seed, "weights"))
        unet = UNet2DConditionModel.from_pretrained(
            root / "unet", torch_dtype=torch.bfloat16 if bf16 else None
        )
    unet.requires_grad_(requires_grad=False)
    unet.add_adapter(LoraConfig(r=4, lora_alpha=2, lora_dropout=dropout, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))  # fmt: skip
    trained = [p for p in unet.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    unet.train()
    scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    losses = []
    for step, uses in enumerate(_uses(plan)):
        captions = [use.caption for use in uses]
        with torch.no_grad():
            states = encode(pipeline, captions)
        latents, noise = torch.stack([use.latents for use in uses]), torch.stack([use.noise for use in uses])
        timesteps = torch.tensor([use.timestep for use in uses])
        noisy = scheduler.add_noise(latents, noise, timesteps)
        torch.manual_seed(stream_seed(plan.config.seed, "dropout", step * plan.global_batch))
        with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext():
            predicted = unet(noisy, timesteps, states, return_dict=False)[0]
        target = noise if prediction == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
        each = torch.nn.functional.mse_loss(predicted.float(), target.float(), reduction="none").mean((1, 2, 3))  # fmt: skip
        weights = torch.tensor([prior[1] if prior[0] and prior[0] in c else 1.0 for c in captions])
        if gamma is not None:
            alphas = scheduler.alphas_cumprod[timesteps]
            snr = alphas / (1 - alphas)
            least = torch.minimum(snr, torch.full_like(snr, gamma))
            weights = weights * least / (snr + 1 if prediction == "v_prediction" else snr)
        loss = (each * weights).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def ours(studio: Studio) -> Callable[..., tuple[RunPlan, list[float]]]:
    """The plan and the losses of five steps with settings of `diffusion`, and other sections."""

    def run(section: dict[str, Any], **more: Any) -> tuple[RunPlan, list[float]]:
        adapter = _COMMON["adapter"] | more.pop("adapter", {})
        plan = studio.plan("diffusion", diffusion=_PLAIN | section, **(_COMMON | {"adapter": adapter} | more))
        return plan, studio.alone(plan).losses

    return run


Ours = Callable[..., tuple[RunPlan, list[float]]]


def test_the_first_five_losses_equal_the_recipe_by_hand(ours: Ours) -> None:
    plan, losses = ours({})
    assert losses == pytest.approx(_by_hand(plan), rel=1e-5)
    assert len(set(losses)) == 5


def test_v_prediction_and_min_snr_have_their_formulas(ours: Ours) -> None:
    plan, losses = ours({"prediction": "v_prediction", "min_snr_gamma": 5.0})
    assert losses == pytest.approx(_by_hand(plan, prediction="v_prediction", gamma=5.0), rel=1e-5)
    plan, losses = ours({"min_snr_gamma": 1.0})
    assert losses == pytest.approx(_by_hand(plan, gamma=1.0), rel=1e-5)
    assert losses[0] != pytest.approx(_by_hand(plan)[0], rel=1e-2)


def test_regularization_pictures_are_weighted_and_as_many_as_the_others(ours: Ours, tmp_path: Path) -> None:
    folder = tmp_path / "prior" / "1_grey"
    folder.mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 32), (60 + number, 90, 90)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a grey thing")
    plan, losses = ours({"prior": str(folder.parent), "prior_weight": 0.25}, duration="8 steps")
    captions = [use.caption for step in _uses(plan) for use in step]
    assert plan.data.train.sequences == 2 * 20
    assert 8 <= sum("grey" in caption for caption in captions) <= 24  # of 32
    wanted = _by_hand(plan, prior=("grey", 0.25))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert losses[:3] != pytest.approx(_by_hand(plan)[:3], rel=1e-2)


def test_noise_offset_adds_a_constant_to_each_channel(studio: Studio) -> None:
    without, with_ = (
        _loader(studio.plan("diffusion", diffusion=_PLAIN | {"noise_offset": offset}))
        for offset in (0.0, 0.1)
    )
    pictures, seeds = [i % 12 for i in range(200)], list(range(200))
    constants = []
    for plain, moved in zip(without.load(pictures, seeds, seeds).uses, with_.load(pictures, seeds, seeds).uses, strict=True):  # fmt: skip
        assert torch.equal(plain.latents, moved.latents)
        assert plain.timestep == moved.timestep
        change = (moved.noise - plain.noise).flatten(1) / 0.1  # (C, H * W)
        assert torch.allclose(change, change[:, :1].expand_as(change), atol=1e-4)
        constants.append(change[:, 0])
    drawn = torch.stack(constants)
    assert abs(float(drawn.mean())) < 4 / math.sqrt(drawn.numel())
    assert abs(float(drawn.std()) - 1) < 4 / math.sqrt(2 * drawn.numel())
    assert without.load_evaluation([0], [0]).uses[0].noise.equal(with_.load_evaluation([0], [0]).uses[0].noise)  # fmt: skip


def test_captions_are_dropped_and_shuffled_by_their_place_alone(studio: Studio, tmp_path: Path) -> None:
    folder = tmp_path / "pictures" / "1_all"
    folder.mkdir(parents=True)
    Image.new("RGB", (32, 32), (200, 0, 0)).save(folder / "a.png")
    (folder / "a.txt").write_text("aki, red, blue, green, wide")
    section = _PLAIN | {"caption_dropout": 0.25, "shuffle_captions": True, "keep_tokens": 2}
    plan = studio.plan("diffusion", data={"train": str(folder.parent)}, diffusion=section)
    loader, seeds = _loader(plan), list(range(400))
    captions = [use.caption for use in loader.load([0] * 400, seeds, seeds).uses]
    dropped = captions.count("")
    assert abs(dropped - 100) < 4 * math.sqrt(400 * 0.25 * 0.75)
    kept = [caption.split(", ") for caption in captions if caption]
    assert all(parts[:2] == ["aki", "red"] and sorted(parts[2:]) == ["blue", "green", "wide"] for parts in kept)  # fmt: skip
    assert len({tuple(parts) for parts in kept}) == 6
    alone = [loader.load([0], [seed], [seed]).uses[0].caption for seed in reversed(seeds)]
    assert alone[::-1] == captions
    assert {use.caption for use in loader.load_evaluation([0], [0]).uses} == {"aki, red, blue, green, wide"}


def test_dropped_captions_train_on_the_empty_one(ours: Ours) -> None:
    plan, losses = ours({"caption_dropout": 0.5})
    assert 3 < sum(use.caption == "" for step in _uses(plan) for use in step) < 17
    assert losses == pytest.approx(_by_hand(plan), rel=1e-5)


def test_growing_captions_and_mirrored_pictures_match_the_recipes_losses(ours: Ours) -> None:
    plan, losses = ours({"tag_warmup": "3 steps", "flip": True})
    parts = [{len(use.caption.split(", ")) for use in step} for step in _uses(plan)]
    assert parts == [{1}, {1}, {1}, {2}, {2}]
    assert losses == pytest.approx(_by_hand(plan), rel=1e-5)


def _second_last_in_two_parts(pipeline: Any, captions: Sequence[str]) -> torch.Tensor:
    """150 tokens in two parts of 75, each between begin and end, of the layer before the last with
    the last norm, as sd-scripts encodes them.
    """
    encoder, tokenizer = pipeline.text_encoder, pipeline.tokenizer
    body = getattr(encoder, "text_model", encoder)
    found = []
    for caption in captions:
        tokens = tokenizer(caption, add_special_tokens=False).input_ids[:150]
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        row = [begin, *tokens, end]
        row += [tokenizer.pad_token_id] * (152 - len(row))
        states = []
        for first in (1, 76):
            ids = torch.tensor([[begin, *row[first : first + 75], row[-1]]])
            hidden = encoder(ids, output_hidden_states=True).hidden_states[-2]
            states.append(body.final_layer_norm(hidden)[0])
        found.append(torch.cat([states[0][:-1], states[1][1:]]))
    return torch.stack(found)  # (U, 152, E)


def test_long_captions_and_clip_skip_are_encoded_as_by_hand(
    ours: Ours, studio: Studio, tmp_path: Path
) -> None:
    folder = tmp_path / "pictures" / "1_all"
    folder.mkdir(parents=True)
    for number, text in enumerate(
        ["short", "a caption of many words " * 5, "one that is cut at its end " * 12]
    ):
        Image.new("RGB", (32, 32), (50 * number, 0, 90)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(text)
    plan, losses = ours({"max_tokens": 150, "clip_skip": 2}, data={"train": str(folder.parent)})
    assert losses == pytest.approx(_by_hand(plan, encode=_second_last_in_two_parts), rel=1e-5)
    assert losses[0] != pytest.approx(_by_hand(plan)[0], rel=1e-5)
    longest = studio.plan("diffusion", diffusion=_PLAIN | {"max_tokens": 225}, data={"train": str(folder.parent)})  # fmt: skip
    states = next(iter(_loader(longest).load([2], [0], [0]).states.values()))["states"]
    assert states.shape[0] == 227


def test_dropout_and_gradient_checkpointing_change_no_loss(ours: Ours) -> None:
    plan, losses = ours({}, adapter={"dropout": 0.3}, memory={"gradient_checkpointing": True})
    assert plan.gradient_checkpointing
    assert losses == pytest.approx(_by_hand(plan, dropout=0.3), rel=1e-5)
    assert losses[1] != pytest.approx(_by_hand(plan)[1], rel=1e-5)


def test_bfloat16_has_the_losses_of_autocast(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    called, softmax = [], Kernels.softmax

    def seen(kernels: Kernels, scores: torch.Tensor, **more: Any) -> None:
        called.append(scores.shape)
        softmax(kernels, scores, **more)

    monkeypatch.setattr(Kernels, "softmax", seen)
    plan, losses = ours({}, model={"dtype": "bfloat16"})
    assert bool(called) == bool(load_kernels()), "attention is computed by the compiled functions"
    assert losses == pytest.approx(_by_hand(plan, bf16=True), rel=1e-3)
    assert losses != pytest.approx(_by_hand(plan), rel=1e-6)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
@pytest.mark.parametrize(("heads", "queries", "keys"), [(1, 64, 0), (2, 200, 77), (3, 1024, 0), (2, 7, 1024)])
def test_attention_in_bfloat16_is_as_exact_as_its_dtype(heads: int, queries: int, keys: int) -> None:
    """A layer of diffusers, its output and all gradients, with and without it, against float64;
    without `keys` the layer attends to itself.
    """
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0

    kernels = load_kernels()
    assert kernels is not None
    torch.manual_seed(0)
    layer = Attention(24, 16 if keys else None, heads=heads, dim_head=20)
    x, context = torch.randn(2, queries, 24), torch.randn(2, keys, 16) if keys else None
    weight = torch.randn(2, queries, 24)

    def found(processor: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        layer.to(dtype).set_processor(processor)
        inputs = [one.to(dtype).requires_grad_() for one in (x, context) if one is not None]
        out = layer(*inputs)
        return [
            out.detach(),
            *torch.autograd.grad(out, [*inputs, *layer.parameters()], weight.to(dtype)),
        ]

    mine = found(fast_attention(kernels), torch.bfloat16)
    theirs = found(AttnProcessor2_0(), torch.bfloat16)
    exact = found(AttnProcessor2_0(), torch.float64)
    assert not torch.equal(mine[0], theirs[0])
    for a, b, c in zip(mine, theirs, exact, strict=True):
        assert (a - c).norm() < 2 * (b - c).norm() + 2e-3 * c.norm()


def test_attention_to_many_keys_or_with_a_mask_is_torchs() -> None:
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0

    kernels = load_kernels() or pytest.skip("needs cc")
    layer = Attention(16, heads=2, dim_head=8).bfloat16()
    for tokens, mask in ((1025, None), (12, torch.zeros(2, 12).bfloat16())):
        x = torch.randn(2, tokens, 16).bfloat16()
        layer.set_processor(fast_attention(kernels))
        mine = layer(x, attention_mask=mask)
        layer.set_processor(AttnProcessor2_0())
        assert torch.equal(mine, layer(x, attention_mask=mask))
