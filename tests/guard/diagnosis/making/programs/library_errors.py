# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors
"""Errors that torch, datasets, peft, accelerate and TRL raise themselves; MODE is which one.

Each is brought about as users do it: a file that is not what its name says, a class that PyTorch no
longer loads, a model on two devices, a prompt without a terminal.
"""

import argparse
import json
import os
import sys
from pathlib import Path

MODE, WORK = os.environ["MODE"], Path.cwd()


def tiny(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes, **more))


def json_rows(first, second):
    from datasets import load_dataset

    folder = WORK / "data"
    folder.mkdir(exist_ok=True)
    for name, rows in (("a.jsonl", first), ("b.jsonl", second)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("loading data/*.jsonl", flush=True)
    load_dataset("json", data_files=str(folder / "*.jsonl"), split="train", cache_dir=str(WORK / "cache"))


def schema():
    json_rows([{"prompt": "a", "answer": "b"}] * 3, [{"prompt": "a", "answer": "b", "score": 1}] * 3)


def types():
    from datasets import load_dataset

    rows = [{"prompt": "a", "answer": "b"}] * 3 + [{"prompt": "a", "answer": {"text": "b"}}]
    (WORK / "rows.json").write_text(json.dumps(rows[:3]) + "\n" + json.dumps(rows[3]) + "\n{")
    load_dataset("json", data_files=str(WORK / "rows.json"), cache_dir=str(WORK / "cache"))


def parquet():
    from datasets import load_dataset

    (WORK / "part-0.parquet").write_bytes(b"<html>404</html>" * 30)
    load_dataset("parquet", data_files=str(WORK / "part-0.parquet"), cache_dir=str(WORK / "cache"))


def csv():
    from datasets import load_dataset

    (WORK / "rows.csv").write_text("prompt,answer\na,b\na,b,c,d\n")
    load_dataset("csv", data_files=str(WORK / "rows.csv"), cache_dir=str(WORK / "cache"))


def weights_only():
    import torch

    torch.save({"args": argparse.Namespace(lr=1e-4), "step": 40}, WORK / "step_40.pt")
    print("resuming from step_40.pt", flush=True)
    torch.load(WORK / "step_40.pt")


def no_grad():
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.print_trainable_parameters()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "adapter" in name
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model._require_grads_hook.remove() if hasattr(model, "_require_grads_hook") else None
    model.train()
    tokens = torch.arange(16)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()


def targets():
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny(), LoraConfig(r=4, target_modules=["query_key_value", "dense"]))


def all_frozen():
    import torch

    model = tiny().requires_grad_(requires_grad=False)
    tokens = torch.arange(16)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()


def shared():
    from safetensors.torch import save_file

    model = tiny(tie_word_embeddings=True)
    save_file(model.state_dict(), str(WORK / "model.safetensors"))


def bf16():
    from transformers import TrainingArguments

    TrainingArguments(output_dir=str(WORK / "out"), bf16=True)


def cuda_home():
    from torch.utils.cpp_extension import CUDAExtension

    CUDAExtension("fused_rope", ["fused_rope.cu"])


def ninja():
    from torch.utils.cpp_extension import load_inline

    source = "#include <aio.h>\n#include <libaio_missing.h>\nint f() { return 0; }"
    load_inline("async_io", cpp_sources=source, functions=["f"], build_directory=str(WORK), verbose=True)


def split():
    from accelerate import Accelerator

    model = tiny()
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1}
    Accelerator(cpu=True).prepare_model(model)


def trl_batch():
    from trl import GRPOConfig

    GRPOConfig(
        output_dir=str(WORK / "out"),
        per_device_train_batch_size=3,
        num_generations=8,
        use_cpu=True,
        bf16=False,
    )


def accelerate_batch():
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    accelerator.prepare(torch.utils.data.DataLoader(list(range(12)), batch_size=3))
    print("prepared", flush=True)


def pdb():
    for step in range(3):
        print(f"step {step} loss {2.1 - step / 10}", flush=True)
    breakpoint()  # noqa: T100


def remote_code():
    from transformers import AutoConfig

    folder = WORK / "custom-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "custom", "auto_map": {"AutoConfig": "configuration_custom.C"}})
    )
    (folder / "configuration_custom.py").write_text("from transformers import PretrainedConfig as C\n")
    AutoConfig.from_pretrained(str(folder))


def answers():
    print("The output directory is not empty.", flush=True)
    if input("Overwrite? [y/N] ") != "y":
        sys.exit(1)


def steps():
    import time

    for step in range(2000):
        print(f"step {step} loss {2.1 - step / 4000:.4f}", flush=True)
        time.sleep(0.02)


def wandb():
    import wandb as tracker

    tracker.init(project="sft", dir=str(WORK))


if __name__ == "__main__":
    globals()[MODE]()
