"""GGUF files hold the model: as transformers reads them, tensor by tensor, and as llama.cpp answers. Run: pytest tests/talk/test_gguf.py"""

import json
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests import front_server, needs
from tests.talk.conftest import Listening, Trained
from unisono.data.template import ChatTemplate
from unisono.errors import IntegrityError, ModelError, UsageError
from unisono.model.gguf import Layout, find_split, read_back
from unisono.task import gguf_export
from unisono.task.inference import open_for_inference

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


def export(target: object, out: Path, **options: Any) -> dict[str, Any]:
    request = {
        "target": str(target),
        "step": None,
        "out": str(out),
        "adapter": False,
        "quantize": "f32",
        "tool": None,
    }
    return gguf_export.run(request | options, Listening())


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
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<s>{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}",
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '{{Q}} ' + m['content'] }}{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}",
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


def test_other_architectures_ropes_and_tokenizers_are_refused(
    make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="gpt2"):
        Layout.of(transformers.GPT2Config())
    with pytest.raises(ModelError, match="RoPE of type dynamic"):
        Layout.of(
            transformers.LlamaConfig(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            )
        )
    real = make_tokenizer().backend_tokenizer
    raw = json.loads(real.to_str())
    assert find_split(raw, real) == "gpt-2"
    odd = raw | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "e"}, "behavior": "Isolated", "invert": False}, raw["pre_tokenizer"]]}}  # fmt: skip
    with pytest.raises(ModelError, match="splits texts"):
        find_split(odd, type(real).from_str(json.dumps(odd)))


def test_damage_after_writing_is_found_in_its_tensor(
    make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    model = save(CONFIGS["qwen3"], tmp_path / "model", make_tokenizer())
    export(tmp_path / "model", tmp_path / "out", quantize="f16")
    file, layout = tmp_path / "out" / "model-f16.gguf", Layout.of(model.config)
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


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_the_same_logits(
    name: str, make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    llama_cpp: Any = needs.llama_cpp()
    model = save(CONFIGS[name], tmp_path / "model", make_tokenizer())
    done = export(tmp_path / "model", tmp_path / "out")
    engine = llama_cpp.Llama(
        str(tmp_path / "out" / done["file"]), n_ctx=256, n_threads=1, verbose=False, logits_all=True
    )
    ids = [5, 9, 11, 200, 33, 7, 90, 41, 6, 250] * 3
    engine.eval(ids)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([ids])).logits[0]
    difference = (torch.tensor(engine.scores[: len(ids)]) - wanted).abs().max()
    assert float(difference) < 0.02 * float(wanted.std())  # its cache of keys and values is f16
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["builtin:tiny", "qwen3", "llama with an adapter"])
def test_llama_cpp_gives_the_greedy_answers_of_generate(
    which: str, make_tokenizer: Callable[[], Any], train_here: Callable[..., Trained], tmp_path: Path
) -> None:
    llama_cpp: Any = needs.llama_cpp()
    target = whole = which
    lora = None
    if which == "qwen3":
        save(CONFIGS["qwen3"], tmp_path / "model", make_tokenizer())
        target = whole = str(tmp_path / "model")
    elif which != "builtin:tiny":
        trained = train_here()
        target, whole = str(trained.directory), str(trained.plan.config.model.path)
        lora = str(tmp_path / "lora" / export(target, tmp_path / "lora", adapter=True)["file"])
    done = export(whole, tmp_path / "out", quantize="f16" if lora is None else "f32")
    engine = llama_cpp.Llama(
        str(tmp_path / "out" / done["file"]),
        n_ctx=256,
        n_threads=1,
        verbose=False,
        lora_path=lora,
        logits_all=True,
    )
    opened = open_for_inference(target, report=Listening())
    differing = []
    for question in QUESTIONS:
        ids = gguf_prompt(opened, question)
        assert engine.tokenize(text_of_prompt(opened, question).encode(), add_bos=False, special=True) == ids
        differing += compare(engine, opened, ids)
    engine.close()
    assert differing == []


def sentencepiece_tokenizer() -> Any:
    """A tokenizer in the form that transformers gives those of SentencePiece's BPE, with bytes for unknown characters."""
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


def test_llama_cpp_splits_texts_as_a_tokenizer_of_sentencepiece_does(tmp_path: Path) -> None:
    llama_cpp: Any = needs.llama_cpp()
    tokenizer = sentencepiece_tokenizer()
    rows = len(tokenizer)
    save(transformers.LlamaConfig(**SHAPE | {"vocab_size": rows}), tmp_path / "model", tokenizer)
    done = export(tmp_path / "model", tmp_path / "out")
    engine = llama_cpp.Llama(str(tmp_path / "out" / done["file"]), vocab_only=True, verbose=False)
    for text in (*QUESTIONS, "Zürich, 你好 🙂", "two  spaces ", "\ttab\n\nlines"):
        assert engine.tokenize(text.encode(), add_bos=False) == tokenizer(text).input_ids
    engine.close()


def text_of_prompt(opened: Any, question: str) -> str:
    return str(opened.template.render([{"role": "user", "content": question}], prompt=True))


def gguf_prompt(opened: Any, question: str) -> list[int]:
    from unisono.task.inference import prompt_ids

    return prompt_ids(opened.tokenizer, opened.template, [{"role": "user", "content": question}])


def compare(engine: Any, opened: Any, ids: list[int], count: int = 12) -> list[str]:
    """The first token that differs, with both logits; a tie within the rounding of f16 is none."""
    context = list(ids)
    engine.reset()
    engine.eval(ids)
    for _ in range(count):
        theirs = torch.tensor(engine.scores[engine.n_tokens - 1])
        with opened.ready() as model, torch.no_grad():
            ours = model(input_ids=torch.tensor([context])).logits[0, -1].float()
        one, other = int(ours.argmax()), int(theirs.argmax())
        if one != other and float(ours[one] - ours[other]) > 0.02 * float(ours.std()):
            return [f"after {context}: {one} ({ours[one]}, there {theirs[one]}), {other} ({ours[other]}, there {theirs[other]})"]  # fmt: skip
        if one in opened.stops(opened.template):
            return []
        context.append(one)
        engine.eval([one])
    return []
