"""GGUF files of vision-language models: the vision part of Gemma 3 in a file of its own, computed
again from that file alone; the language part of others, with words; never half of what was trained.

Run: pytest tests/trainer/vision/test_gguf.py
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from transformers import AutoModelForImageTextToText

from tests import needs
from tests.trainer.vision.conftest import Gallery
from tests.vision_models import draw, gemma3, internvl, llava, processor_of, qwen2_5_vl
from unisono.base.errors import IntegrityError, ModelError, UsageError
from unisono.base.events import Reporter
from unisono.base.messages import Message
from unisono.trainer.plan.task_requests import GgufRequest, RequestedModel

gguf = needs.package("gguf")
from unisono.trainer.model.gguf import read_back  # noqa: E402 - needs gguf
from unisono.trainer.model.gguf_vision import VisionLayout  # noqa: E402
from unisono.trainer.task import gguf_export  # noqa: E402

pytestmark = pytest.mark.processes  # pictures are decoded in them


class _Kept(Reporter):
    def __init__(self) -> None:
        super().__init__(None)
        self.warnings: list[str] = []

    def send(self, message: Message) -> None:
        if message.get("kind") == "warning":
            self.warnings.append(str(message))


def export(
    target: Path, out: Path, *, quantize: str = "f32", converter: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    report = _Kept()
    request = GgufRequest(
        model=RequestedModel(str(target)), out=str(out), quantize=quantize, converter=converter
    )
    return dict(gguf_export.run(request, report)), report.warnings


def writable_gemma3(directory: Path) -> None:
    """Gemma 3 with the scale of attention that llama.cpp computes."""
    gemma3(directory)
    file = directory / "config.json"
    settings = json.loads(file.read_text())
    settings["text_config"]["query_pre_attn_scalar"] = settings["text_config"]["head_dim"]
    file.write_text(json.dumps(settings))


def features(file: Path, pixels: torch.Tensor) -> torch.Tensor:
    """(T, E): what llama.cpp's graph for Gemma 3 makes of pixels (1, 3, H, W) with a file's tensors
    and keys.
    """
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {one.name: torch.from_numpy(np.array(one.data, dtype=np.float32)) for one in reader.tensors}
    assert keys["clip.projector_type"] == "gemma3"
    assert keys["clip.use_gelu"]
    size, heads = keys["clip.vision.patch_size"], keys["clip.vision.attention.head_count"]
    epsilon = keys["clip.vision.attention.layer_norm_epsilon"]

    def linear(value: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(value, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def norm(value: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return functional.layer_norm(value, weight.shape, weight, bias, epsilon)

    weight, bias = tensors["v.patch_embd.weight"], tensors["v.patch_embd.bias"]
    value = functional.conv2d(pixels, weight, bias, stride=size)[0].flatten(1).T
    value = value + tensors["v.position_embd.weight"]
    for block in range(keys["clip.vision.block_count"]):
        name = f"v.blk.{block}"
        inputs = norm(value, f"{name}.ln1")
        q, k, v = (
            linear(inputs, f"{name}.attn_{part}").unflatten(1, (heads, -1)).transpose(0, 1) for part in "qkv"
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        value = value + linear(mixed, f"{name}.attn_out")
        inputs = functional.gelu(linear(norm(value, f"{name}.ln2"), f"{name}.ffn_up"), approximate="tanh")
        value = value + linear(inputs, f"{name}.ffn_down")
    value = norm(value, "v.post_ln")
    side, scale = keys["clip.vision.image_size"] // size, keys.get("clip.vision.projector.scale_factor", 4)
    pooled = functional.avg_pool2d(value.T.unflatten(1, (side, side))[None], scale)[0].flatten(1).T
    normed = functional.rms_norm(pooled, pooled.shape[1:], tensors["mm.soft_emb_norm.weight"], 1e-6)
    return normed @ tensors["mm.input_projection.weight"]


@pytest.mark.long  # xllamacpp is not a part of `dev`
@pytest.mark.parametrize("quantize", ["f32", "f16"])
def test_llama_cpp_answers_about_a_picture_as_transformers_does(tmp_path: Path, quantize: str) -> None:
    """llama.cpp's server, of the package xllamacpp. The picture has the size that the tower gets:
    it resizes others in another way.
    """
    needs.package("xllamacpp")
    writable_gemma3(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", quantize=quantize)
    processor = processor_of(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    answers: dict[str, list[int]] = {}
    for color in ("red", "blue"):
        draw(color, "circle", size=(56, 56)).save(tmp_path / f"{color}.png")
        answered = subprocess.run(
            [sys.executable, "-c", _ANSWER, str(tmp_path), quantize, color],
            check=True,
            capture_output=True,
            text=True,
        )
        picture = Image.open(tmp_path / f"{color}.png")
        pixels = processor(text=["<start_of_image>"], images=[[picture]], return_tensors="pt")["pixel_values"]
        text = "what is <start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image> in the picture"
        ids = torch.tensor([processor.tokenizer.encode(text, add_special_tokens=False)])
        feature = processor.tokenizer.convert_tokens_to_ids("<image_soft_token>")
        length = ids.shape[1]
        for _ in range(8):
            kinds = (ids == feature).long()
            with torch.no_grad():
                logits = model(input_ids=ids, pixel_values=pixels, token_type_ids=kinds).logits[0, -1]
            ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
        answers[color] = ids[0, length:].tolist()
        assert json.loads(answered.stdout.splitlines()[-1]) == answers[color]
    assert answers["red"] != answers["blue"]


_ANSWER = """
import base64, json, pathlib, sys, urllib.request
import xllamacpp
folder, quantize, color = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = f"{folder}/out/model-{quantize}.gguf"
params.mmproj.path = f"{folder}/out/mmproj-{quantize}.gguf"
params.mmproj_use_gpu = params.warmup = False
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 1
server = xllamacpp.Server(params)
address = server.listening_address
mark = json.load(urllib.request.urlopen(f"{address}/props"))["media_marker"]
picture = base64.b64encode(pathlib.Path(folder, f"{color}.png").read_bytes()).decode()
prompt = {"prompt_string": f"what is {mark} in the picture", "multimodal_data": [picture]}
body = {"prompt": prompt, "n_predict": 8, "temperature": 0.0, "return_tokens": True}
request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
answer = json.load(urllib.request.urlopen(request))
print(json.dumps(answer["tokens"]))
"""


@pytest.mark.parametrize(("quantize", "tolerance"), [("f32", 1e-5), ("f16", 1e-2)])
def test_the_file_of_the_vision_part_gives_the_features_of_the_model(
    tmp_path: Path, quantize: str, tolerance: float
) -> None:
    writable_gemma3(tmp_path / "model")

    result, warnings = export(tmp_path / "model", tmp_path / "out", quantize=quantize)

    assert not warnings
    assert {f"model-{quantize}.gguf", f"mmproj-{quantize}.gguf", "Modelfile"} == set(result["files"])
    picture = draw("red", "circle")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    pixels = processor_of(tmp_path / "model").image_processor(picture, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        expected = model.model.get_image_features(pixels).pooler_output[0]
    made = features(tmp_path / "out" / f"mmproj-{quantize}.gguf", pixels)
    assert expected.std() > 0.1
    assert (made - expected).square().mean().sqrt() < tolerance * expected.std()


def test_a_trained_vision_part_is_written_and_a_change_is_noticed(gallery: Gallery, tmp_path: Path) -> None:
    writable_gemma3(tmp_path / "gemma3")
    plan = gallery.plan(
        "gemma3", model={"path": str(tmp_path / "gemma3")}, train_parts=["vision", "projector"]
    )
    run = gallery.alone(plan).directory

    export(run, tmp_path / "out")

    file = tmp_path / "out" / "mmproj-f32.gguf"
    pixels = torch.rand(1, 3, 56, 56, generator=torch.Generator().manual_seed(0)) * 2 - 1
    export(tmp_path / "gemma3", tmp_path / "before")
    assert not torch.allclose(
        features(file, pixels), features(tmp_path / "before" / file.name, pixels), atol=1e-3
    )
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "gemma3", dtype=torch.float32)
    layout = VisionLayout.of(base.config, processor_of(tmp_path / "gemma3").image_processor)
    read_back(tmp_path / "before" / file.name, layout.tensors(base), dtype="f32")
    with pytest.raises(IntegrityError, match="is not what was written"):
        read_back(file, layout.tensors(base), dtype="f32")


@pytest.mark.parametrize("build", [llava, internvl], ids=lambda build: build.__name__)
def test_the_language_part_of_others_is_written_with_words(
    build: Callable[[Path], None], tmp_path: Path
) -> None:
    build(tmp_path / "model")

    result, warnings = export(tmp_path / "model", tmp_path / "out")

    (warning,) = warnings
    assert "the language model alone" in warning
    assert "--mmproj" in warning
    assert set(result["files"]) == {"model-f32.gguf", "Modelfile"}
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "out" / "model-f32.gguf").tensors}
    assert not any(re.match(r"(v|mm)\.", name) for name in stored)
    embeddings = base.get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(stored["token_embd.weight"].data, embeddings)
    values = sum(one.data.size for one in stored.values())
    parts = [*base.model.language_model.parameters(), *base.lm_head.parameters()]
    assert values == sum({p.data_ptr(): p.numel() for p in parts}.values())


def test_what_cannot_be_written_is_refused_by_name(gallery: Gallery, tmp_path: Path) -> None:
    qwen2_5_vl(tmp_path / "model")
    with pytest.raises(ModelError, match="qwen2_5_vl_text cannot be written as GGUF") as refused:
        export(tmp_path / "model", tmp_path / "out")
    assert "convert_hf_to_gguf.py" in refused.value.problems[0].fix
    run = gallery.alone(gallery.plan("llava", train_parts=["language", "projector"])).directory

    with pytest.raises(ModelError, match="trained the projector part") as refused:
        export(run, tmp_path / "out")

    assert "convert_hf_to_gguf.py --mmproj" in refused.value.problems[0].fix
    with pytest.raises(ModelError, match="trained the projector part"):
        export(run, tmp_path / "out", converter="convert_hf_to_gguf.py")
    writable_gemma3(tmp_path / "gemma3")
    with pytest.raises(UsageError, match="would lack the vision part"):
        export(tmp_path / "gemma3", tmp_path / "out", converter="convert_hf_to_gguf.py")
    assert not (tmp_path / "out").exists()
