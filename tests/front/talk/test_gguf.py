"""GGUF files hold the model: as transformers reads them, tensor by tensor, and as llama.cpp
answers.

Run: pytest tests/front/talk/test_gguf.py
"""

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests import front_server, needs
from tests.front.talk.conftest import Listening, Trained
from unisono.base.errors import IntegrityError, ModelError, UsageError
from unisono.trainer.data.template import ChatTemplate
from unisono.trainer.model.directory import locate_model
from unisono.trainer.model.gguf import (
    _SPLITS,
    TEXTS,
    GgufLayout,
    Spaces,
    find_spaces,
    find_split,
    read_back,
)
from unisono.trainer.model.gguf_families import FAMILIES
from unisono.trainer.model.result_logits import ResultLogits, fixed_rows
from unisono.trainer.plan.task_requests import GenerateRequest, GgufRequest, RequestedModel
from unisono.trainer.task import generation, gguf_export, llama_logits
from unisono.trainer.task.inference import decode, open_for_inference
from unisono.trainer.task.llama_logits import read_in_llama_cpp

SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama 3": transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**SHAPE, head_dim=16, query_pre_attn_scalar=16),
    "gemma3": transformers.Gemma3TextConfig(**SHAPE, head_dim=16, query_pre_attn_scalar=16),
    "phi3": transformers.Phi3Config(**SHAPE),
}
SQUARE = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
SCALED = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
FAMILIES_TRIED: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "internlm3": SQUARE, "iquestcoder": SQUARE, "helium": SQUARE, "arcee": SQUARE, "jais2": SQUARE, "seed_oss": SQUARE, "ernie4_5": SQUARE,
    "smollm3": {"num_hidden_layers": 4}, "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 56},
    "qwen3_moe": EXPERTS | SQUARE | {"num_experts": 4, "norm_topk_prob": True}, "phi": {}, "olmo": {"clip_qkv": 0.5}, "olmo2": {}, "olmo3": {"num_hidden_layers": 4, "sliding_window": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}, "granite": SCALED, "granitemoe": SCALED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": SCALED | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40}, "stablelm": {"use_qkv_bias": True}, "starcoder2": {},
    "glm": SQUARE, "glm4": SQUARE, "glm4_moe": EXPERTS | SQUARE | {"n_routed_experts": 4, "routed_scaling_factor": 1.5, "use_qk_norm": True}, "solar_open": EXPERTS | SQUARE | {"n_routed_experts": 4},
    "minimax_m2": SQUARE | {"num_local_experts": 4, "num_experts_per_tok": 2}, "cohere": {}, "cohere2": SQUARE | {"num_hidden_layers": 4, "sliding_window": 8},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2}, "nemotron": SQUARE,
    "hunyuan_v1_dense": SQUARE | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    "hunyuan_v1_moe": SQUARE | {"num_experts": 4, "moe_topk": 2}, "lfm2": {"layer_types": ["conv", "full_attention"]}, "gpt2": {"tie_word_embeddings": False}, "gpt_bigcode": {}, "gpt_neox": {}, "falcon": {},
}  # fmt: skip
"""Beside the sizes, what makes a random model of the other families."""


def family_config(kind: str) -> Any:
    """A config of one of FAMILIES_TRIED."""
    usual = transformers.AutoConfig.for_model(kind)
    known = {*usual.to_dict(), *usual.attribute_map}
    sizes = {name: value for name, value in SHAPE.items() if name in known}
    return type(usual)(**sizes | FAMILIES_TRIED[kind])


QUESTIONS = [f"{what} {when}" for what in ("call me", "what day is it", "remind", "the fox", "it's 9:15, (ok)") for when in ("today", "at 5", "on tuesday please", "?")]  # fmt: skip


def save(config: Any, directory: Path, tokenizer: Any) -> Any:
    state = torch.get_rng_state()
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases are trained, too
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.set_rng_state(state)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def export(target: object, out: Path, *, quantize: str = "f32", **options: Any) -> dict[str, Any]:
    model = RequestedModel(str(target), options.pop("step", None))
    request = GgufRequest(model=model, out=str(out), quantize=quantize, **options)
    return dict(gguf_export.run(request, Listening()))


def settings_of(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_the_same_model_from_the_file(
    name: str, make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    model = save(CONFIGS[name], tmp_path / "model", make_tokenizer())
    done = export(tmp_path / "model", tmp_path / "out")
    assert done["files"] == ["Modelfile", "model-f32.gguf"]
    file = tmp_path / "out" / "model-f32.gguf"
    ids = torch.tensor([[5, 9, 11, 200, 33, 7, 90, 41, 6, 250]])
    with torch.no_grad():  # its reader knows neither the factors of Llama 3, nor all sizes of heads
        again = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=CONFIGS[name] if name != "mistral" else None
        )
        difference = (again.eval()(ids).logits - model(ids).logits).abs().max()
    assert float(difference) < 2e-4
    found = settings_of(file)
    config, kind = CONFIGS[name], done["architecture"]
    for key, value in {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size, "context_length": 256, "vocab_size": 300,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": getattr(config, "head_dim", None) or 16,
    }.items():  # fmt: skip
        assert found[f"{kind}.{key}"] == value
    if name == "llama 3":
        factors = next(t.data for t in gguf.GGUFReader(file).tensors if t.name == "rope_freqs.weight")
        steps = torch.arange(0, 16, 2) / 16
        plain = 1 / LLAMA3["rope_theta"] ** steps
        assert np.allclose(plain.numpy() / factors, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)


def test_the_template_and_its_end_of_turn_are_those_of_the_model(model_dir: Path, tmp_path: Path) -> None:
    export(model_dir, tmp_path / "out")
    found = settings_of(tmp_path / "out" / "model-f32.gguf")
    opened = open_for_inference(str(model_dir), report=Listening())
    assert opened.template is not None
    assert found["tokenizer.chat_template"] == opened.template.source()
    assert found["tokenizer.ggml.tokens"][found["tokenizer.ggml.eos_token_id"]] == "<|end|>"
    assert len(found["tokenizer.ggml.tokens"]) == 300
    modelfile = (tmp_path / "out" / "Modelfile").read_text()
    assert 'PARAMETER stop "<|end|>"' in modelfile
    assert "{{ .Content }}" in modelfile


@pytest.mark.parametrize(
    "text",
    [
        (
            "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if"
            " add_generation_prompt %}<|assistant|>{% endif %}"
        ),
        (
            "<s>{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}\n\n{% endfor %}{% if"
            " add_generation_prompt %}[assistant]\n{% endif %}"
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ '{{Q}} ' + m['content'] }}{% else %}{{"
            " m['content'] + '</s>' }}{% endif %}{% endfor %}"
        ),
    ],
)
def test_a_go_template_writes_what_the_jinja_writes(text: str, make_tokenizer: Callable[[], Any]) -> None:
    template = ChatTemplate(make_tokenizer(), text, "the test")
    found = gguf_export.go_template(template)
    assert found is not None
    messages = [
        {"role": role, "content": f"about {role}"} for role in ("system", "user", "assistant", "user")
    ]
    assert run_go(found, messages) == template.render(messages, prompt=True)


def run_go(template: str, messages: list[dict[str, str]]) -> str:
    """What Go's text/template writes, for the few forms that are used."""
    match = re.fullmatch(
        r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template, re.DOTALL
    )
    assert match
    begin, body, prompt = match.groups()
    parts = re.split(r"\{\{ (?:else )?if eq \.Role \"(\w+)\" \}\}", body)
    by_role = dict(zip(parts[1::2], parts[2::2], strict=True))
    written = (
        begin + "".join(by_role[m["role"]].replace("{{ .Content }}", m["content"]) for m in messages) + prompt
    )
    return written.replace('{{ "{{" }}', "{{")


def test_a_template_that_looks_at_more_than_roles_has_no_go_template(
    make_tokenizer: Callable[[], Any],
) -> None:
    text = "{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}"
    assert gguf_export.go_template(ChatTemplate(make_tokenizer(), text, "the test")) is None


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_an_adapter_alone_is_what_the_merged_model_adds(
    kind: str, train_here: Callable[..., Trained], tmp_path: Path
) -> None:
    trained = train_here(adapter={"kind": kind, "rank": 4, "alpha": 8})
    export(trained.directory, tmp_path / "adapter", adapter=True)
    export(trained.directory, tmp_path / "merged")
    export(trained.plan.config.model.path, tmp_path / "base")
    adapter, merged, base = (
        {tensor.name: np.asarray(tensor.data) for tensor in gguf.GGUFReader(next((tmp_path / name).glob("*.gguf"))).tensors}
        for name in ("adapter", "merged", "base")
    )  # fmt: skip
    found = settings_of(tmp_path / "adapter" / "adapter-f32.gguf")
    assert (found["general.type"], found["adapter.type"]) == ("adapter", "lora")
    assert {name.rpartition(".lora_")[0] for name in adapter} == {
        name for name in base if "blk" in name and "norm" not in name
    }
    for name in {name.rpartition(".lora_")[0] for name in adapter}:
        a, b = adapter[f"{name}.lora_a"], adapter[f"{name}.lora_b"]
        assert np.allclose(base[name] + b @ a * found["adapter.lora.alpha"] / len(a), merged[name], atol=1e-5)
    assert "ADAPTER ./adapter-f32.gguf" in (tmp_path / "adapter" / "Modelfile").read_text()


def test_what_a_gguf_adapter_cannot_hold_is_refused(
    train_here: Callable[..., Trained], model_dir: Path, tmp_path: Path
) -> None:
    dora = train_here(adapter={"kind": "dora", "rank": 4, "alpha": 8})
    with pytest.raises(ModelError, match="magnitude"):
        export(dora.directory, tmp_path / "out", adapter=True)
    with pytest.raises(UsageError, match="no adapter"):
        export(model_dir, tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


def test_other_architectures_and_tokenizers_are_refused(
    make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="bloom"):
        GgufLayout.of(transformers.BloomConfig())
    real = make_tokenizer().backend_tokenizer
    raw = json.loads(real.to_str())
    assert find_split(raw, real) == ("gpt-2", True)
    odd = raw | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "e"}, "behavior": "Isolated", "invert": False}, raw["pre_tokenizer"]]}}  # fmt: skip
    with pytest.raises(ModelError, match="splits texts"):
        find_split(odd, type(real).from_str(json.dumps(odd)))


OTHER_TEXTS = (
    "", " ", "  ", "\t", "\n", "\n\n", "\t\n \n", " (normal)", "\n =", "' era", "Ça va, Zoë? 3 33 333 3333 33333 333333", "🚀 (normal) 😶‍🌫️ ✅ 🦙🦙",
    "Việt Nam  ពិសេស  кири ლლა", "if x:\n\tpass\n\n\n    else:\n  y", "we'Ve I'll 'D 'tis", "......!!!!!!?????? I've been 'told he's there", "HTTPServer2Go v1.2.3-rc4",
)  # fmt: skip
"""What vocabularies of llama.cpp are tested with: white space, numbers, apostrophes, scripts, emoji, code."""


def test_words_with_combining_marks_that_llama_cpp_splits_otherwise_are_said(tmp_path: Path) -> None:
    """Mistral's Tekken keeps them together, and llama.cpp does not."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    pattern = (
        f"{first}{upper}*{lower}+|{first}{upper}+{lower}*|"
        + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = bytes_tokenizer((pattern,), ignore_merges=True)
    save(transformers.LlamaConfig(**SHAPE | {"vocab_size": len(tokenizer)}), tmp_path / "model", tokenizer)
    request = GgufRequest(
        model=RequestedModel(str(tmp_path / "model")), out=str(tmp_path / "out"), quantize="f32"
    )
    listening = Listening()
    gguf_export.run(request, listening)
    assert [told["code"] for told in listening.messages if told["kind"] == "warning"] == ["tokens_differ"]


def bytes_tokenizer(patterns: tuple[str, ...], *, ignore_merges: bool) -> Any:
    """Byte-level BPE, trained on all texts, that splits them by patterns first."""
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, whole])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([*TEXTS, *OTHER_TEXTS] * 2, trainer)
    made.add_special_tokens(["<|end|>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


@pytest.mark.parametrize("name", _SPLITS)
def test_llama_cpp_splits_texts_as_the_tokenizer_does(name: str, tmp_path: Path) -> None:
    llama_cpp = needs.llama_cpp()
    patterns, ignore_merges = _SPLITS[name]
    tokenizer = bytes_tokenizer(patterns, ignore_merges=ignore_merges)
    save(transformers.LlamaConfig(**SHAPE | {"vocab_size": len(tokenizer)}), tmp_path / "model", tokenizer)
    done = export(tmp_path / "model", tmp_path / "out")
    with llama_cpp.Llama(tmp_path / "out" / done["file"]) as engine:
        for text in (*TEXTS, *OTHER_TEXTS):
            assert engine.tokenize(text) == tokenizer(text).input_ids, text


def test_damage_after_writing_is_found_in_its_tensor(
    make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    model = save(CONFIGS["qwen3"], tmp_path / "model", make_tokenizer())
    export(tmp_path / "model", tmp_path / "out", quantize="f16")
    file, layout = tmp_path / "out" / "model-f16.gguf", GgufLayout.of(model.config)
    assert read_back(file, layout.tensors(model), dtype="f16") == 0
    tensor = gguf.GGUFReader(file).tensors[4]
    with file.open("r+b") as stream:
        stream.seek(tensor.data_offset + 6)
        (byte,) = stream.read(1)
        stream.seek(tensor.data_offset + 6)
        stream.write(bytes([byte ^ 1]))
    with pytest.raises(IntegrityError, match=re.escape(tensor.name)):
        read_back(file, layout.tensors(model), dtype="f16")


@pytest.mark.slow
def test_quantizing_needs_the_tool_of_llama_cpp(model_dir: Path, tmp_path: Path) -> None:
    def unisono(*words: object, path: str) -> Any:
        command = [
            sys.executable,
            "-m",
            "unisono",
            "export",
            str(model_dir),
            str(tmp_path / "out"),
            *map(str, words),
        ]
        return front_server.run(command, timeout=120, env={**os.environ, "PATH": path})

    refused = unisono("--format", "gguf", "--quantize", "q4_k_m", path="/usr/bin:/bin")
    assert refused.returncode == 2
    assert "llama-quantize" in refused.stderr
    assert "OUT/model-f16.gguf model-q4_k_m.gguf Q4_K_M" in refused.stderr
    tools = tmp_path / "tools"
    tools.mkdir()
    tool = tools / "llama-quantize"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("quantizes.py")} "$@"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    done = unisono("--format", "gguf", "--quantize", "q8_0", "--json", path=f"{tools}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["file"] == "model-q8_0.gguf"
    assert 0 < result["differs_by"] < 0.02
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["Modelfile", "model-q8_0.gguf"]


def roped(**rope: Any) -> dict[str, Any]:
    return SHAPE | {"rope_parameters": {"rope_theta": 10000.0, **rope}}


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
VARIANTS = {
    "llama linear": transformers.LlamaConfig(**roped(rope_type="linear", factor=2.0)),
    "llama yarn": transformers.LlamaConfig(**roped(**YARN)),
    "llama biases and wide heads": transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=32, rms_norm_eps=1e-3),
    "qwen2 yarn": transformers.Qwen2Config(**roped(**YARN)),
    "qwen3 linear": transformers.Qwen3Config(**roped(rope_type="linear", factor=2.0), head_dim=32),
    "phi3 partial": transformers.Phi3Config(**roped(rope_type="default", partial_rotary_factor=0.5)),
    "gemma2 window": transformers.Gemma2Config(**SHAPE, **GEMMA, sliding_window=8),
    "gemma3 window": transformers.Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 6}, **GEMMA, sliding_window=8,
        rope_parameters={"full_attention": {**PLAIN, "rope_type": "linear", "factor": 8.0}, "sliding_attention": {**PLAIN, "rope_theta": 500.0}},
    ),
    "gemma3 untied": transformers.Gemma3TextConfig(**SHAPE, **GEMMA, tie_word_embeddings=False),
    "stablelm parallel": transformers.StableLmConfig(**SHAPE, use_parallel_residual=True),
    "gpt_neox not parallel": transformers.GPTNeoXConfig(**SHAPE | {"num_key_value_heads": 4}, use_parallel_residual=False),
    "olmo2 tied": transformers.Olmo2Config(**SHAPE, tie_word_embeddings=True),
    "seed_oss yarn": transformers.SeedOssConfig(**roped(**YARN), head_dim=16),
    "granite 3 tied": transformers.GraniteConfig(**SHAPE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "olmo3 yarn": transformers.Olmo3Config(**SHAPE, rope_parameters={"full_attention": {"rope_theta": 10000.0, **YARN}, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}),
    "glm4_moe partial": transformers.Glm4MoeConfig(**roped(rope_type="default", partial_rotary_factor=0.5), **EXPERTS, head_dim=16, n_routed_experts=4),
    "gemma2 of 46 layers": transformers.Gemma2Config(**SHAPE | {"num_hidden_layers": 46, "initializer_range": 0.02}, head_dim=32, query_pre_attn_scalar=16),
    "gemma3 of 62 layers": transformers.Gemma3TextConfig(**SHAPE | {"num_hidden_layers": 62, "initializer_range": 0.02}, head_dim=32, query_pre_attn_scalar=16),
}  # fmt: skip
"""Settings that llama.cpp reads, or computes as they are here."""
GELU = 5e-3  # of the spread of logits: llama.cpp has the function as a table of f16
WITH_GELU = ("gemma", "phi", "starcoder2", "gpt", "falcon")


@pytest.mark.parametrize("name", [*CONFIGS, *VARIANTS, *FAMILIES_TRIED])
def test_llama_cpp_computes_the_same_logits(
    name: str, make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    llama_cpp = needs.llama_cpp()
    config = family_config(name) if name in FAMILIES_TRIED else (CONFIGS | VARIANTS)[name]
    model = save(config, tmp_path / "model", make_tokenizer())
    done = export(tmp_path / "model", tmp_path / "out")
    ids = [5, 9, 11, 200, 33, 7, 90, 41, 6, 250] * 3
    with llama_cpp.Llama(tmp_path / "out" / done["file"]) as engine:
        found = torch.tensor(engine.read(ids))
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([ids])).logits[0]
    assert float((found - wanted).abs().max()) < (
        GELU if name.startswith(WITH_GELU) and "phi3" not in name else 2e-5
    ) * float(wanted.std())


def test_each_family_is_tried() -> None:
    tried = {*FAMILIES_TRIED, *(config.model_type for config in (CONFIGS | WHOLE).values())}
    assert tried == {*FAMILIES}


def test_without_llama_cpp_python_the_export_says_so(model_dir: Path, tmp_path: Path) -> None:
    if find_spec("llama_cpp") is not None:
        pytest.skip("needs a machine without llama-cpp-python")
    done = export(model_dir, tmp_path / "out")
    assert done["read_back"]["compared"] == "tensors"
    assert "llama-cpp-python is not installed" in done["read_back"]["why"]
    assert export(model_dir, tmp_path / "other", read_back=False)["read_back"] is None


@pytest.mark.long
@pytest.mark.parametrize("quantize", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_is_loaded_in_llama_cpp_where_its_package_is_installed(
    name: str, quantize: str, make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    needs.package("llama_cpp")
    save(CONFIGS[name], tmp_path / "model", make_tokenizer())
    found = export(tmp_path / "model", tmp_path / "out", quantize=quantize)["read_back"]
    assert found["compared"] == "logits"
    assert found["differs_by"] < (5e-3 if quantize == "f32" else 2e-2)


@pytest.mark.long
def test_what_llama_cpp_computes_otherwise_is_not_written(
    make_tokenizer: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs.package("llama_cpp")
    model = save(CONFIGS["gemma2"], tmp_path / "model", make_tokenizer())
    done = export(tmp_path / "model", tmp_path / "out")
    file = tmp_path / "out" / done["file"]
    model.config.query_pre_attn_scalar = 1
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.0
    wanted = ResultLogits.of(model.eval(), fixed_rows(300), dtype="float32")
    with pytest.raises(IntegrityError, match=r"llama\.cpp does not compute the model that was written"):
        read_in_llama_cpp(file, wanted, dtype="f32")
    file.write_bytes(file.read_bytes()[:4000])
    with pytest.raises(IntegrityError, match=r"llama\.cpp does not compute") as caught:
        read_in_llama_cpp(file, wanted, dtype="f32")
    assert "llama.cpp cannot load it" in caught.value.problems[0].why
    assert "--no-read-back" in caught.value.problems[0].fix
    monkeypatch.setattr(llama_logits, "_ROOM", 1e12)
    assert read_in_llama_cpp(file, wanted, dtype="f32").why.endswith("are free")


REFUSED = {
    "rope_type": transformers.LlamaConfig(**roped(rope_type="dynamic", factor=2.0)),
    "rope_type llama3": transformers.Qwen3Config(**SHAPE, rope_parameters=LLAMA3),
    "rope_type yarn": transformers.Gemma3TextConfig(
        **SHAPE, **GEMMA, rope_parameters={"full_attention": {**PLAIN, **YARN}, "sliding_attention": PLAIN}
    ),
    "rope_type of sliding_attention": transformers.Gemma3TextConfig(
        **SHAPE, **GEMMA, rope_parameters={"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_type": "linear", "factor": 2.0}}
    ),
    "partial_rotary_factor": transformers.LlamaConfig(**roped(rope_type="default", partial_rotary_factor=0.5)),
    "attention_factor": transformers.LlamaConfig(**roped(**YARN, attention_factor=1.0)),
    "beta_fast": transformers.LlamaConfig(**roped(**YARN, beta_fast=16)),
    "hidden_act": transformers.LlamaConfig(**SHAPE, hidden_act="gelu"),
    "hidden_activation": transformers.Gemma2Config(**SHAPE, **GEMMA, hidden_activation="gelu"),
    "attention_bias": transformers.Qwen3Config(**SHAPE, attention_bias=True),
    "use_bidirectional_attention": transformers.Gemma3TextConfig(**SHAPE, **GEMMA, use_bidirectional_attention=True),
    "query_pre_attn_scalar": transformers.Gemma2Config(**SHAPE, head_dim=16, query_pre_attn_scalar=64),
    "query_pre_attn_scalar 32": transformers.Gemma3TextConfig(**SHAPE | {"num_hidden_layers": 62}, head_dim=32, query_pre_attn_scalar=32),
    "layer_types": transformers.Gemma2Config(**SHAPE, **GEMMA, layer_types=["full_attention"] * 2),
    "layer_types in this order": transformers.Gemma3TextConfig(**SHAPE, **GEMMA, layer_types=["full_attention"] * 2),
    "norm_topk_prob": transformers.Qwen3MoeConfig(**SHAPE),
    "mlp_only_layers": transformers.Qwen3MoeConfig(**SHAPE, norm_topk_prob=True, mlp_only_layers=[0]),
    "tie_word_embeddings": transformers.CohereConfig(**SHAPE, tie_word_embeddings=False),
    "head_dim": transformers.GlmConfig(**SHAPE, head_dim=32),
    "alpha": transformers.HunYuanDenseV1Config(**roped(rope_type="dynamic", factor=2.0), head_dim=16),
    "rope_theta of sliding_attention": transformers.Olmo3Config(**SHAPE, rope_parameters={"full_attention": PLAIN, "sliding_attention": PLAIN | {"rope_theta": 500.0}}),
    "qk_layernorm": transformers.StableLmConfig(**SHAPE, qk_layernorm=True),
    "n_group": transformers.Glm4MoeConfig(**SHAPE, n_group=2),
    "multi_query": transformers.FalconConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, multi_query=False),
    "sliding_window": transformers.Exaone4Config(**SHAPE, sliding_window=8),
    "attn_logit_softcapping": transformers.Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=None),
    "final_logit_softcapping": transformers.Gemma3TextConfig(**SHAPE, **GEMMA, final_logit_softcapping=1.0),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_llama_cpp_has_no_field_for_is_refused(words: str) -> None:
    """Each of these was written, read back as equal, and answered otherwise by llama.cpp, or was
    not loaded.
    """
    with pytest.raises(ModelError, match=f"llama.cpp has nothing for {words}") as caught:
        GgufLayout.of(REFUSED[words])
    assert caught.value.problems[0].where.startswith("config.json: ")


@pytest.mark.parametrize(
    "config",
    [
        transformers.MistralConfig(**SHAPE, sliding_window=8),
        transformers.Phi3Config(**SHAPE, sliding_window=8),
        transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=0),
    ],
    ids=["mistral", "phi3", "qwen2"],
)
def test_where_llama_cpp_has_no_window_the_context_ends_with_it(
    config: Any, make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    llama_cpp = needs.llama_cpp()
    model = save(config, tmp_path / "model", make_tokenizer())
    done = export(tmp_path / "model", tmp_path / "out")
    file = tmp_path / "out" / done["file"]
    assert settings_of(file)[f"{done['architecture']}.context_length"] == 8
    ids = [5, 9, 11, 200, 33, 7, 90, 41]
    with llama_cpp.Llama(file) as engine:
        found = torch.tensor(engine.read(ids))
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([ids])).logits[0]
    assert float((found - wanted).abs().max()) < 2e-5 * float(wanted.std())


WHOLE = {
    **CONFIGS,
    "gemma": transformers.GemmaConfig(**SHAPE, head_dim=16),
    "gemma3": VARIANTS["gemma3 untied"],  # tied and random, it repeats a token
}


# Their logits are compared in every run; of answers, those of each kind of layer and tokenizer.
_ANSWERED = ("qwen3_moe", "olmo2", "granite", "cohere2", "gpt_neox", "lfm2")
_FAMILIES = [
    pytest.param(name, marks=() if name in _ANSWERED else pytest.mark.long) for name in FAMILIES_TRIED
]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["builtin:tiny", "a llama with an adapter", *WHOLE, *_FAMILIES])
def test_llama_cpp_gives_the_greedy_answers_of_generate(
    which: str, make_tokenizer: Callable[[], Any], train_here: Callable[..., Trained], tmp_path: Path
) -> None:
    llama_cpp = needs.llama_cpp()
    target = whole = which
    lora = None
    if which in {**WHOLE, **FAMILIES_TRIED}:
        save(WHOLE.get(which) or family_config(which), tmp_path / "model", make_tokenizer())
        target = whole = str(tmp_path / "model")
    elif which == "builtin:tiny":  # in float32: `generate` would round as its files do, to bfloat16
        target = whole = str(shutil.copytree(locate_model(which), tmp_path / "model"))
        transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).save_pretrained(whole)
    else:
        trained = train_here()
        target, whole = str(trained.directory), str(trained.plan.config.model.path)
        lora = tmp_path / "lora" / export(target, tmp_path / "lora", adapter=True)["file"]
    done = export(whole, tmp_path / "out")
    (tmp_path / "prompts.txt").write_text("\n".join(QUESTIONS), encoding="utf-8")
    asked = GenerateRequest(model=RequestedModel(target), file=str(tmp_path / "prompts.txt"), max_tokens=16)
    wanted = [answer["answer"] for answer in generation.run_generate(asked, Listening())["answers"]]
    opened = open_for_inference(target, report=Listening())
    template = opened.template
    assert template is not None
    with llama_cpp.Llama(tmp_path / "out" / done["file"], lora=lora) as engine:
        for question, answer in zip(QUESTIONS, wanted, strict=True):
            prompt = template.render([{"role": "user", "content": question}], prompt=True)
            found = greedy(engine, engine.tokenize(prompt, special=True), opened.stops(template), 16)
            assert decode(opened.tokenizer, found) == answer
    assert len(set(wanted)) > 2, "the answers tell models apart"


def greedy(engine: Any, ids: list[int], stops: set[int], count: int) -> list[int]:
    """The most likely tokens, one after the other, up to one that ends the answer."""
    engine.reset()
    found: list[int] = []
    for _ in range(count):
        best = int(engine.read(ids)[-1].argmax())
        if best in stops:
            break
        found.append(best)
        ids = [best]
    return found


def sentencepiece_tokenizer() -> Any:
    """A tokenizer in the form that transformers gives those of SentencePiece's BPE, with bytes for
    unknown characters.
    """
    texts = [
        "the quick brown fox jumps over the lazy dog",
        "what day is it today",
        "call me on tuesday at five please",
    ]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(texts * 4, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    raw = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in raw["merges"]]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *map("".join, merges)]
    pieces += [text for text in raw["vocab"] if text not in pieces]
    vocabulary = {text: number for number, text in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def metaspace_tokenizer(*, scheme: str) -> Any:
    """The same in the form that transformers gives newer ones, and with special tokens for
    turns.
    """
    raw = json.loads(sentencepiece_tokenizer().backend_tokenizer.to_str())
    raw |= {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
    }
    return with_turns(Tokenizer.from_str(json.dumps(raw)))


def with_turns(raw: Tokenizer, *, rstrip: bool = False) -> Any:
    turns = ["<|user|>", "<|assistant|>", "<|end|>"]
    raw.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    raw.add_special_tokens([AddedToken(turn, normalized=False, rstrip=rstrip) for turn in turns])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="<|end|>", pad_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "prepended": lambda: with_turns(sentencepiece_tokenizer().backend_tokenizer),
    "always": lambda: metaspace_tokenizer(scheme="always"),
    "first": lambda: metaspace_tokenizer(scheme="first"),
    "never": lambda: metaspace_tokenizer(scheme="never"),
    "strips": lambda: with_turns(sentencepiece_tokenizer().backend_tokenizer, rstrip=True),
}


@pytest.mark.parametrize("folder", ["model", "my-Phi-3-clone"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_splits_conversations_as_a_sentencepiece_tokenizer_does(
    name: str, folder: str, tmp_path: Path
) -> None:
    """llama.cpp has special tokens take the white space after them where the model's name has
    `phi-3` in it, which may be a folder's.
    """
    llama_cpp = needs.llama_cpp()
    tokenizer = TOKENIZERS[name]()
    save(transformers.LlamaConfig(**SHAPE | {"vocab_size": len(tokenizer)}), tmp_path / folder, tokenizer)
    done = export(tmp_path / folder, tmp_path / "out")
    file = tmp_path / "out" / done["file"]
    assert ("phi-3" in settings_of(file)["general.name"].lower()) == (name == "strips")
    template = open_for_inference(str(tmp_path / folder), report=Listening()).template
    assert template is not None
    with llama_cpp.Llama(file) as engine:
        for text in (*QUESTIONS, "Zürich, 你好 🙂", "two  spaces", "tab\tand\n\nlines"):
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            shown = template.render([*turns, turns[0]], prompt=True)
            assert (
                engine.tokenize(shown, special=True) == tokenizer(shown, add_special_tokens=False).input_ids
            )


def test_spaces_by_special_tokens_that_llama_cpp_cannot_treat_are_refused(
    make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    """Without the tokens of Phi-3, no name makes special tokens take the white space after them."""
    tokenizer = make_tokenizer()
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["rstrip"] = True
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(raw))
    with pytest.raises(ModelError, match="spaces beside special tokens"):
        find_spaces(tokenizer, ["<|user|> what day is it<|assistant|>"])
    assert find_spaces(tokenizer, ["<|user|>what day is it<|assistant|>"]) == Spaces(
        prefix=False, strips=False
    )


def test_llama_cpp_splits_texts_as_a_tokenizer_of_sentencepiece_does(tmp_path: Path) -> None:
    llama_cpp = needs.llama_cpp()
    tokenizer = sentencepiece_tokenizer()
    save(transformers.LlamaConfig(**SHAPE | {"vocab_size": len(tokenizer)}), tmp_path / "model", tokenizer)
    done = export(tmp_path / "model", tmp_path / "out")
    with llama_cpp.Llama(tmp_path / "out" / done["file"]) as engine:
        for text in (*QUESTIONS, "Zürich, 你好 🙂", "two  spaces ", "\ttab\n\nlines"):
            assert engine.tokenize(text) == tokenizer(text).input_ids
