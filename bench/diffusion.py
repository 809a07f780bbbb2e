"""Steps per CPU second of LoRA training on pictures, against diffusers' recipe written by hand; and
the memory estimate against a measured run.

Run: .venv/bin/python bench/diffusion.py speed [ROUNDS], and bench/diffusion.py memory Writes
bench/results/diffusion.json. One thread; the ways take turns in one process, which has loaded all
code before.

The model has the proportions of Stable Diffusion 1.5 with an eighth of its channels and attention
heads, and random weights: UNet, autoencoder and text encoder then share the work about as in the
real model. The recipe is that of diffusers' `train_text_to_image_lora.py` as a loop: a data loader
that decodes, resizes and cuts each picture to a square, autoencoder and text encoder in each step,
the UNet with peft's LoRA, AdamW. Both do the same number of pictures of about the same area in a
step, on the same layers and rank. The recipe's default is float32, ours bfloat16 where the
processor has it: both are done in both. The ways `square` cut all pictures to a square, as the
recipe does; with `buckets` pictures keep one of four aspect ratios, those of a step have one size,
and share a forward. `times_by_hand_if_all_else_were_free` is the bound: the recipe's step over the
part of ours that convolutions, matrix products and attention of the UNet take, which are the same
in both.
"""

import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = Path(__file__).parent / "results" / "diffusion.json"
SIDE, BATCH, STEPS, FIRST = 256, 4, 8, 2
SIZES = ((256, 256), (352, 176), (176, 352), (304, 208))
LAYERS = r"attn\d\.to_(q|k|v|out\.0)$"
_ARM_STEPS = FIRST + STEPS


def write_pictures(folder: Path) -> None:
    """64 photographs of noise and shapes in four aspect ratios, larger than they are trained on,
    with captions.
    """
    import numpy as np
    from PIL import Image

    draw, noise = random.Random(0), np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(64):
        width, height = (2 * side for side in SIZES[number % 4])
        picture = Image.fromarray(
            noise.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
        ).resize((width, height))
        picture.paste(
            tuple(draw.choices(range(256), k=3)), (width // 4, height // 4, width // 2, height // 2)
        )
        picture.save(folder / f"{number:02d}.jpg", quality=90)
        (folder / f"{number:02d}.txt").write_text(f"picture {number}, a shape on noise, {width} by {height}")


def write_model(root: Path, *, divisor: int = 8) -> Path:
    """A pipeline with the channels and heads of Stable Diffusion 1.5 divided by a number."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    from tests.trainer.diffusion.making import write_tokenizer

    size = write_tokenizer(root / "vocabulary")
    torch.manual_seed(0)
    width = 768 // divisor
    text = CLIPTextConfig(
        vocab_size=size, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=12, num_attention_heads=width // 48,
        max_position_embeddings=77, projection_dim=width, bos_token_id=size - 2, eos_token_id=size - 1, pad_token_id=size - 1,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=[c // divisor for c in (128, 256, 512, 512)], down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4, layers_per_block=2, latent_channels=4, norm_num_groups=8, sample_size=SIDE,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=SIDE // 8, block_out_channels=[c // divisor for c in (320, 640, 1280, 1280)], layers_per_block=2, norm_num_groups=8,
        # heads, in spite of its name: of 40 channels, as in the real model
        cross_attention_dim=width, attention_head_dim=8 // divisor,
    )  # fmt: skip
    names = (str(root / "vocabulary" / name) for name in ("vocab.json", "merges.txt"))
    pipeline = StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), tokenizer=CLIPTokenizer(*names, model_max_length=77), unet=unet,
        scheduler=DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(root / "model")
    return root / "model"


def by_hand(model: Path, pictures: Path, dtype: str) -> dict[str, float]:
    """The recipe, with the option mixed_precision: float32 is `no`, its default.

    Gives CPU seconds of a step after the first ones.
    """
    import numpy as np
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from peft import LoraConfig
    from PIL import Image
    from transformers import CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(str(model / "tokenizer"))
    text = CLIPTextModel.from_pretrained(str(model / "text_encoder")).requires_grad_(requires_grad=False)
    vae = AutoencoderKL.from_pretrained(str(model / "vae")).requires_grad_(requires_grad=False)
    unet = UNet2DConditionModel.from_pretrained(str(model / "unet")).requires_grad_(requires_grad=False)
    scheduler = DDPMScheduler.from_pretrained(str(model / "scheduler"))
    names = [name for name, _ in unet.named_modules() if re.search(LAYERS, name)]
    unet.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights="gaussian", target_modules=names))
    trained = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    weights = getattr(torch, dtype)
    for part in (text, vae, unet):
        part.to(weights)
    for parameter in trained:
        parameter.data = parameter.data.float()

    class Pictures(torch.utils.data.Dataset):
        files = sorted(pictures.glob("*.jpg"))

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, number: int) -> dict[str, Any]:
            file = self.files[number]
            picture = Image.open(file).convert("RGB")
            scale = SIDE / min(picture.size)
            picture = picture.resize(
                (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS
            )
            left, top = (picture.width - SIDE) // 2, (picture.height - SIDE) // 2
            pixels = np.asarray(picture.crop((left, top, left + SIDE, top + SIDE)))
            ids = tokenizer(
                file.with_suffix(".txt").read_text(),
                padding="max_length",
                max_length=77,
                truncation=True,
                return_tensors="pt",
            ).input_ids[0]
            return {"pixels": torch.tensor(pixels).permute(2, 0, 1).float() / 127.5 - 1, "ids": ids}

    def forever() -> Any:
        loader = torch.utils.data.DataLoader(Pictures(), batch_size=BATCH, shuffle=True)
        while True:
            yield from loader

    unet.train()
    batches, began = forever(), 0.0
    for step in range(_ARM_STEPS):
        if step == FIRST:
            began = time.process_time()
        batch = next(batches)
        with torch.no_grad():
            latents = vae.encode(batch["pixels"].to(weights)).latent_dist.sample() * vae.config.scaling_factor
            states = text(batch["ids"])[0]
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 1000, (len(latents),))
        with torch.autocast("cpu", weights, enabled=dtype != "float32"):
            noisy = scheduler.add_noise(latents, noise, timesteps)
            predicted = unet(noisy, timesteps, states, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"cpu_s": (time.process_time() - began) / STEPS}


_PRODUCTS = ("conv", "mm", "scaled_dot_product")


def share_of_products(model: Path) -> float:
    """Of the CPU time of a UNet step with LoRA, the share in convolutions, matrix products and
    attention, which caches do not change.
    """
    import torch
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig
    from torch.profiler import ProfilerActivity, profile

    unet = UNet2DConditionModel.from_pretrained(str(model / "unet")).requires_grad_(requires_grad=False)
    names = [name for name, _ in unet.named_modules() if re.search(LAYERS, name)]
    unet.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights="gaussian", target_modules=names))
    latents, states = torch.randn(BATCH, 4, SIDE // 8, SIDE // 8), torch.randn(BATCH, 77, 96)
    timesteps = torch.randint(0, 1000, (BATCH,))

    def step() -> None:
        unet(latents, timesteps, states, return_dict=False)[0].square().mean().backward()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    found = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    products = sum(time_ for key, time_ in found.items() if key.startswith("aten::") and any(w in key for w in _PRODUCTS))  # fmt: skip
    return products / sum(found.values())


def studio_of(model: Path, pictures: Path, folder: Path) -> Any:
    """What plans and does runs in this process, as tests do."""
    from tests.trainer.diffusion.conftest import Studio

    return Studio(model, {"sft": pictures}, folder)


def sections(
    *, cache: bool, steps: int, batch: int = BATCH, buckets: bool = True, dtype: str = "float32"
) -> dict[str, Any]:
    """The same work in our config."""
    return {
        "model": {"dtype": dtype},
        "adapter": {"rank": 16, "alpha": 16, "targets": [LAYERS]}, "data": {"resolution": SIDE}, "optim": {"lr": 1e-4},
        "diffusion": {"bucket_step": 8, "min_side": 64, "max_side": 512, "buckets": buckets, "cache": cache, "caption_dropout": 0.0, "noise_offset": 0.0},
        "batch": {"global": batch, "micro": batch}, "duration": f"{steps} steps", "checkpoint": {"every": "1000 steps"},
    }  # fmt: skip


def ours(studio: Any, *, cache: bool, buckets: bool, dtype: str) -> dict[str, float]:
    """A run; gives CPU seconds of a step after the first ones, and those of everything before the
    run.
    """
    from tests.trainer.ranks.conftest import _Kept
    from unisono.base.messages import Message
    from unisono.trainer.training.front_io import StopRequest
    from unisono.trainer.training.rank_run import run_plan

    class Clocked(_Kept):
        times: dict[int, float] = {}  # noqa: RUF012 - one instance

        def send(self, message: Message) -> None:
            if message["kind"] == "step":
                self.times[message["step"]] = time.process_time()

    began = time.process_time()
    plan = studio.plan("diffusion", **sections(cache=cache, steps=_ARM_STEPS, buckets=buckets, dtype=dtype))
    prepared, report = time.process_time() - began, Clocked()
    run_plan(plan, report, StopRequest())
    return {"cpu_s": (report.times[_ARM_STEPS] - report.times[FIRST]) / STEPS, "prepare_cpu_s": prepared}


def speed(rounds: int) -> dict[str, Any]:
    """The ways in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures = folder / "pictures" / "1_all"
        write_pictures(pictures)
        model = write_model(folder)
        studio = studio_of(model, pictures.parent, folder)
        shares = [share_of_products(model) for _ in range(3)]
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "by_hand": lambda: by_hand(model, pictures, "float32"),
            "cached_square": lambda: ours(studio, cache=True, buckets=False, dtype="float32"),
            "not_cached_square": lambda: ours(studio, cache=False, buckets=False, dtype="float32"),
            "cached_buckets": lambda: ours(studio, cache=True, buckets=True, dtype="float32"),
            "by_hand_bfloat16": lambda: by_hand(model, pictures, "bfloat16"),
            "cached_square_bfloat16": lambda: ours(studio, cache=True, buckets=False, dtype="bfloat16"),
            "not_cached_square_bfloat16": lambda: ours(studio, cache=False, buckets=False, dtype="bfloat16"),
            "cached_buckets_bfloat16": lambda: ours(studio, cache=True, buckets=True, dtype="bfloat16"),
        }
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(rounds):
            for way, measure in ways.items():
                found[way].append(measure())
                print(f"round {number + 1}, {way}: {found[way][-1]['cpu_s']:.3f} CPU s a step", flush=True)
    steps = {way: [one["cpu_s"] for one in all_] for way, all_ in found.items()}
    ratios = {recipe: _ratios(steps, recipe) for recipe in ("by_hand", "by_hand_bfloat16")}
    middle = {way: statistics.median(all_) for way, all_ in steps.items()}
    share = statistics.median(shares)
    return {
        "share_of_products": round(share, 3),
        "times_by_hand_if_all_else_were_free": round(middle["by_hand"] / (share * middle["cached_square"]), 2),
        "pictures": 64, "sizes": SIZES, "batch": BATCH, "steps": STEPS, "rounds": rounds,
        "cpu_seconds_of_a_step": {way: [round(value, 4) for value in all_] for way, all_ in steps.items()},
        "steps_per_cpu_second": {way: round(1 / value, 3) for way, value in middle.items()},
        "times_by_hand": ratios["by_hand"], "times_by_hand_bfloat16": ratios["by_hand_bfloat16"],
        "first_start_cpu_s": {"caches_of_64_pictures": round(found["cached_square"][0]["prepare_cpu_s"], 2), "again": round(found["cached_square"][-1]["prepare_cpu_s"], 2)},
    }  # fmt: skip


def _ratios(steps: dict[str, list[float]], recipe: str) -> dict[str, dict[str, float]]:
    """Steps per CPU second of each of our ways over those of a recipe: round by round, the median
    and the least.
    """
    found = {}
    for way, all_ in steps.items():
        if not way.startswith("by_hand"):
            times = [a / b for a, b in zip(steps[recipe], all_, strict=True)]
            found[way] = {"median": round(statistics.median(times), 3), "least": round(min(times), 3)}
    return found


_CHILD = """
import json, re, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from bench.diffusion import sections, studio_of
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
now = lambda: 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
model, pictures, folder, batch, checkpointing, dtype = sys.argv[1:]
more = sections(cache=True, steps=2, batch=int(batch), dtype=dtype) | {{"memory": {{"gradient_checkpointing": checkpointing == "1"}}}}
if folder.endswith("filled"):
    import diffusers, peft, transformers.models.clip.modeling_clip
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from unisono.trainer.training import rank_run
studio = studio_of(Path(model), Path(pictures), Path(folder))
plan = studio.plan("diffusion", **more)
if not folder.endswith("filled"):
    sys.exit()
before = now()
Path("/proc/self/clear_refs").write_text("5")
studio.alone(plan)
print(json.dumps({{"parameters": plan.model.parameters, "estimate": plan.memory.model_dump(), "measured": peak() - before}}))
"""


def memory() -> list[dict[str, Any]]:
    """Estimate and growth of the peak resident memory of two steps, in a process of its own that
    has filled its caches before.
    """
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures = folder / "pictures" / "1_all"
        write_pictures(pictures)
        for label, divisor in (("an eighth", 8), ("a quarter", 4)):
            model = write_model(folder / label, divisor=divisor)
            studios = {end: folder / f"{label}-{end}" for end in ("fill", "filled")}
            for studio in studios.values():
                studio.mkdir()
            (studios["filled"] / "cache").symlink_to(studios["fill"] / "cache")
            runs = ((4, 0, "float32"), (4, 1, "float32"), (4, 0, "bfloat16"), (4, 1, "bfloat16"))
            for number, (batch, checkpointing, dtype) in enumerate(runs):
                printed = ""
                for studio in [*studios.values()][number > 0 :]:
                    for old in studio.glob("0*"):
                        shutil.rmtree(old)
                    words = [
                        str(model),
                        str(pictures.parent),
                        str(studio),
                        str(batch),
                        str(checkpointing),
                        dtype,
                    ]
                    command = [sys.executable, "-c", _CHILD.format(root=str(ROOT)), *words]
                    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                one = json.loads(printed.splitlines()[-1])
                one = {
                    "model": label,
                    "batch": batch,
                    "dtype": dtype,
                    "gradient_checkpointing": bool(checkpointing),
                    **one,
                }
                one["estimate_over_measured"] = round(one["estimate"]["total"] / one["measured"], 2)
                found.append(one)
                print(json.dumps(one), flush=True)
    return found


def main(what: str, rounds: int) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread"
    found = speed(rounds) if what == "speed" else {"runs": memory()}
    report = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"schema": 1}
    RESULTS.write_text(
        json.dumps(report | {what: {"machine": machine, **found}}, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
