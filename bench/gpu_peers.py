"""Fine-tuning by TRL and unisono on one CUDA device, in turn in one run, on the same rows and the
same random weights.

    python bench/gpu_peers.py [m135 1b 8b] [--arms unisono,trl-tuned,unsloth] [--out FILE]
    [--profile 1b] [--rehearse]

Each arm is a process of its own, with the Python that runs this script: it needs trl, peft and
datasets, and for `trl-tuned` liger-kernel. An arm that cannot be imported is recorded with the last
line of its error. Results are written after each arm, so what was measured stays if the time ends
(--limit seconds in all).

- Shapes: SmolLM 135M, Llama 3.2 1B, Llama 3.1 8B; weights are random, bfloat16, made on the device.
  The tokenizer has 8,192 tokens and the head as many rows as the real model, so the head costs what
  it really does.
- Rows: bench/workload.py, 181 tokens on average. Every arm has about 16 × 1,024 real tokens in an
  optimizer step, LoRA of rank 16 on all linear layers (or all weights), AdamW, and the loss on
  answers.
- unisono: the config that a user writes, with its defaults. trl-default: SFTTrainer's defaults, 8
  rows in a forward. trl-tuned: packing, torch's variable-length flash attention (TRL has it from
  the package flash-attn), Liger's layers, bfloat16 weights, no gradient checkpointing, and as many
  sequences in a forward as fit.
- unsloth, only on request: its layers and its trainer, packing, no gradient checkpointing. It wants
  older packages than the others: run it alone, with a PYTHONPATH of its own; its import and
  compilation take a minute or two. It takes its fast attention for packed rows where torch's
  varlen_attn has the argument enable_gqa (torch 2.12); torch 2.11's takes fewer heads of keys
  without it, so there the argument is added from outside.
- tokens per second: real tokens of the steps after the warm-up / their wall time. Peaks: torch's
  own counts of the process that trains, and what nvidia-smi shows for the whole device.
- share of the peak: model FLOPs / (989.4 TFLOP/s, dense bfloat16 of an H100 SXM). Model FLOPs of a
  token are 4 × the weights of the linear layers (6 × for full fine-tuning), 4 × (6 ×) those of the
  head for each loss token, and 6 × layers × heads × head size × the mean number of tokens before it
  × 2 of attention; what is recomputed does not count.
- --profile SIZE: steps of unisono under torch's profiler: its longest kernels, the operations that
  take the CPU's time, and the share of time in which the device idles.
- --rehearse: tiny shapes on the CPU, to try the script itself.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGAN = time.time()
SHAPES: dict[str, dict[str, Any]] = {
    "m135": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
    },
}  # fmt: skip
ARMS = {
    "m135": ["unisono", "trl-default", "trl-tuned"],
    "1b": ["unisono", "trl-tuned", "trl-default", "unisono-full"],
    "8b": ["unisono", "trl-tuned", "trl-default"],
    "tiny": ["unisono", "trl-tuned"],
}
# Optimizer steps of an arm: (warm-up, measured). TRL's arms also end after so many seconds of
# measured steps.
STEPS = {"m135": (5, 40), "1b": (5, 30), "8b": (3, 10), "tiny": (1, 2)}
MEASURED_S = 10.0
LIMIT_S = {"m135": 60, "1b": 90, "8b": 120, "tiny": 120}
UNSLOTH_LIMIT_S = 240
MAX_LENGTH, SEQUENCES = 1024, 16
PEAK_FLOPS = 989.4e12
# Packed sequences in a forward of trl-tuned; the rest of the step's is accumulated.
TUNED_BATCH = {"m135": 16, "1b": 16, "8b": 4, "tiny": 2}


# ---- the workload


def make_model(out: Path, shape: dict[str, Any], tokenizer: Path, device: str) -> None:
    """Writes a random bfloat16 model: tensors are drawn on the device, one after the other."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **shape, max_position_embeddings=8192, bos_token_id=0, eos_token_id=2, pad_token_id=3,
        rope_theta=500000.0, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and shape["tie_word_embeddings"]:
            continue
        tensor = torch.empty(value.shape, dtype=torch.bfloat16, device=device)
        tensors[name] = (
            tensor.fill_(1) if value.ndim == 1 else tensor.normal_(0, 0.02, generator=generator)
        ).cpu()
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(out)
    for file in tokenizer.iterdir():
        (out / file.name).write_bytes(file.read_bytes())


def model_flops(shape: dict[str, Any], *, full: bool, loss_share: float, row_tokens: float) -> float:
    """Of one token, on average; see the top of this file.

    `row_tokens` is the mean over tokens of the length of their row.
    """
    hidden, size = shape["hidden_size"], shape["head_dim"]
    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * shape["intermediate_size"]
    factor = 6 if full else 4
    attention = 6 * shape["num_hidden_layers"] * heads * size * row_tokens
    return (
        factor * shape["num_hidden_layers"] * layer
        + factor * hidden * shape["vocab_size"] * loss_share
        + attention
    )


# ---- arms, each in a process of its own


def trl_arm(name: str, size: str, model: Path, rows_file: Path, device: str) -> dict[str, Any]:
    """TRL's SFTTrainer as a user calls it, or Unsloth's."""
    on_gpu, unsloth = device == "cuda", None
    if name == "unsloth":  # first: it changes the others
        take_gqa()
        unsloth = importlib.import_module("unsloth").FastLanguageModel

    import torch
    from datasets import Dataset
    from peers import trl_row  # type: ignore[import-not-found]  # beside this script
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    warmup, measured = STEPS[size]
    sequences = SEQUENCES if size != "tiny" else 2
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    adapter: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
    trained: Any = str(model)
    more: dict[str, Any] = {}
    if unsloth is not None:
        trained, more["processing_class"] = unsloth.from_pretrained(
            str(model), max_seq_length=MAX_LENGTH, dtype=torch.bfloat16, load_in_4bit=False, use_gradient_checkpointing=False,
            local_files_only=True,
        )  # fmt: skip
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        trained = unsloth.get_peft_model(
            trained, **adapter, bias="none", target_modules=names, use_gradient_checkpointing=False
        )
    else:
        more["peft_config"] = LoraConfig(**adapter, target_modules="all-linear", task_type="CAUSAL_LM")
        more["processing_class"] = AutoTokenizer.from_pretrained(model)
    settings: dict[str, Any] = {}
    if name != "trl-default":
        micro = TUNED_BATCH[size]
        settings = {
            "per_device_train_batch_size": micro, "gradient_accumulation_steps": sequences // micro, "packing": True,
            "gradient_checkpointing": False, "dataloader_num_workers": 2 * on_gpu,
        }  # fmt: skip
    if name == "trl-tuned":
        init = {"dtype": "bfloat16", "attn_implementation": register_flash()}
        settings |= {"use_liger_kernel": on_gpu, "model_init_kwargs": init}
    if name == "trl-default":  # as many tokens in a step: 8 rows have about 1.4 of the 16 sequences
        settings = {"gradient_accumulation_steps": max(1, round(sequences * MAX_LENGTH / (8 * 181)))}
    times: list[float] = []
    counts: list[Any] = []
    so_far: list[Any] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            counts.append(list(so_far))
            so_far.clear()
            late = len(times) > warmup and time.time() - times[warmup - 1] > MEASURED_S
            last = len(times) + 1 == warmup + measured or late
            if on_gpu and (len(times) in (0, warmup - 1) or last):
                torch.cuda.synchronize()
            times.append(time.time())
            control.should_training_stop = last
            return control

    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            output_dir=out, max_steps=1000, bf16=True, use_cpu=not on_gpu, report_to="none", save_strategy="no", learning_rate=2.0e-4,
            max_length=MAX_LENGTH, disable_tqdm=True, **settings,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=trained, args=config, train_dataset=Dataset.from_list([trl_row(row) for row in rows]), callbacks=[Clock()], **more,
        )  # fmt: skip
        step = trainer.training_step

        def counting(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            so_far.append(mask.sum() if mask is not None else inputs["input_ids"].numel())
            return step(model, inputs, *args, **kwargs)

        trainer.training_step = counting
        trainer.train()
    tokens = [int(sum(int(count) for count in step)) for step in counts]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "ends": times, "tokens": tokens, "loss": losses[-1] if losses else None,
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "settings": {key: value for key, value in settings.items() if key != "model_init_kwargs"},
    }  # fmt: skip


def take_gqa() -> None:
    """Gives torch 2.11's varlen_attn the argument enable_gqa, which Unsloth looks for; its kernel
    takes fewer heads of keys without it.
    """
    import inspect

    from torch.nn.attention import varlen

    original = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(original).parameters:
        return

    def varlen_attn(*args: Any, window_size: Any = (-1, -1), enable_gqa: bool = False, **more: Any) -> Any:
        del enable_gqa
        return original(*args, window_size=window_size, **more)

    varlen.varlen_attn = varlen_attn


def register_flash() -> str:
    """Registers torch's flash attention for packed rows with transformers, which knows only that of
    other packages; gives its name.
    """
    import inspect

    import torch
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface

    # From torch 2.12 on fewer heads of keys must be asked for.
    asks = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, scaling: float | None = None,
        cu_seq_lens_q: Any = None, max_length_q: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        del module, attention_mask, kwargs
        q, k, v = (tensor[0].transpose(0, 1).to(torch.bfloat16) for tensor in (query, key, value))
        if not query.is_cuda:
            parts = [
                torch.nn.functional.scaled_dot_product_attention(
                    *(part.transpose(0, 1)[None] for part in row),
                    is_causal=True,
                    scale=scaling,
                    enable_gqa=True,
                )[0].transpose(0, 1)
                for row in zip(*(x.split(cu_seq_lens_q.diff().tolist()) for x in (q, k, v)), strict=True)
            ]
            return torch.cat(parts)[None].to(query.dtype), None
        longest = int(max_length_q)
        more = {"enable_gqa": True} if asks else {}
        out = varlen_attn(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            longest,
            longest,
            scale=scaling,
            window_size=(-1, 0),
            **more,
        )
        return out[None], None

    AttentionInterface.register("torch_varlen", attend)
    return "torch_varlen"


def unisono_config(work: Path, name: str, size: str, model: Path, rows: Path, device: str) -> Path:
    """The config of an arm, in a file."""
    run = work / f"run-{size}-{name}"
    shutil.rmtree(run, ignore_errors=True)  # of a former call
    config = work / f"{size}-{name}.yaml"
    adapter = "null" if name == "unisono-full" else "{kind: lora, rank: 16, alpha: 32}"
    batch = "batch: {global: 2}\n" if size == "tiny" else ""
    config.write_text(
        f"model: {model}\nadapter: {adapter}\ndata: {{train: {rows}, max_length: {MAX_LENGTH}}}\n{batch}"
        f"duration: {sum(STEPS[size])} steps\ndevice: {device}\noutput_dir: {run}\n"
    )
    return config


def unisono_arm(name: str, size: str, model: Path, rows: Path, device: str, work: Path) -> dict[str, Any]:
    """`unisono train` as a user runs it; the figures are those of its metrics.jsonl and events."""
    config = unisono_config(work, name, size, model, rows, device)
    run = work / f"run-{size}-{name}"
    shutil.rmtree(run, ignore_errors=True)  # of a former call
    full = name == "unisono-full"
    command = [sys.executable, "-m", "unisono", "train", str(config), "--quiet"]
    # The checkpoint of all weights with their moments takes longer than the steps that are
    # measured: the run ends before it is written.
    command += ["--no-first-checkpoint"] if full else []
    last = sum(STEPS[size])
    wanted = last - 1 if full else last
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics, events = run / "metrics.jsonl", run / "events" / "rank-00000.jsonl"
    ends: list[float] = []
    while process.poll() is None:
        written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        ends += [time.time()] * (written - len(ends))
        if full and written >= wanted:
            end_tree(process.pid)
        time.sleep(0.003)
    if process.wait() and not full:
        raise SystemExit(f"unisono ended with exit code {process.returncode}")
    steps = read_lines(metrics)[:wanted]
    ends = (ends + [time.time()] * (wanted - len(ends)))[:wanted]
    sent = [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]
    plan = json.loads((run / "plan.json").read_text())
    facts = next(event["facts"] for event in sent if event["kind"] == "ready")
    totals = [0, *(line["tokens"] for line in steps)]
    return {
        "ends": ends, "tokens": [b - a for a, b in itertools.pairwise(totals)], "loss": steps[-1]["loss"],
        "allocated": max(line["memory_bytes"] for line in steps), "reserved": 0,
        "settings": {key: plan.get(key) for key in ("micro_batch", "gradient_checkpointing", "dtype")},
        "facts": {key: facts.get(key) for key in ("layout", "head", "why", "quick", "fast_layers", "graphs", "kernels", "no_kernels")},
        "phases": phases_of(sent), "estimate": plan.get("memory"),
        "step_time_s": [line["step_time_s"] for line in steps], "data_time_s": [line["data_time_s"] for line in steps],
        "loss_share": steps[-1]["loss_tokens"] / steps[-1]["tokens"],
    }  # fmt: skip


def phases_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """When each phase of a rank began, in seconds from its first event."""
    first = events[0]["time"]
    found: dict[str, float] = {}
    for event in events:
        name = event.get("phase") if event["kind"] == "phase" else event["kind"]
        found.setdefault(str(name), round(event["time"] - first, 3))
    return found


def end_tree(pid: int) -> None:
    """Ends a process that this script has started, and those that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else []:
        end_tree(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ---- the profile


def profile(plan_file: Path, work: Path, warmup: int, steps: int) -> str:
    """The rank of the arm `unisono` once more, in this process, under torch's profiler for a few
    steps; gives the text.
    """
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler_of

    from unisono.trainer.training import loop
    from unisono.trainer.worker.entry import main as run_rank

    plan = json.loads(plan_file.read_text())
    walls = [line["step_time_s"] for line in read_lines(plan_file.parent / "metrics.jsonl")[warmup:]]
    plan["output_dir"] = str(work / "profiled")
    (work / "profiled" / "events").mkdir(parents=True)
    own = work / "profiled" / "plan.json"
    own.write_text(json.dumps(plan))
    on_gpu = torch.cuda.is_available() and plan["device"]["kind"] == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiler = profiler_of(activities=kinds)
    original, seen, times = loop.optimizer_step, [0], []

    def step(*args: Any, **options: Any) -> Any:
        seen[0] += 1
        if seen[0] == warmup + 1:
            profiler.start()
        began = time.perf_counter()
        found = original(*args, **options)
        if on_gpu:
            torch.cuda.synchronize()
        if warmup < seen[0] <= warmup + steps:
            times.append(time.perf_counter() - began)
        if seen[0] == warmup + steps:
            profiler.stop()
        return found

    loop.optimizer_step = step
    code = run_rank([str(own)])
    return describe(profiler, steps, times, walls) + f"\nthe rank ended with {code}\n"


def describe(profiler: Any, steps: int, times: list[float], walls: list[float]) -> str:
    """The longest kernels, the operations that take the CPU's time, and the share of time in which
    the device idles.
    """
    from torch.autograd import DeviceType

    events = profiler.key_averages()
    kernels = sorted(
        (event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation),
        key=lambda event: -event.self_device_time_total,
    )
    operations = sorted(
        (event for event in events if event.device_type == DeviceType.CPU),
        key=lambda event: -event.self_cpu_time_total,
    )
    busy = sum(event.self_device_time_total for event in kernels) / steps / 1e3
    usual = sorted(walls)[len(walls) // 2] * 1e3
    lines = [
        f"a step: {usual:.1f} ms without the profiler, {1e3 * sum(times) / len(times):.1f} ms with it",
        f"device busy in a step: {busy:.1f} ms, so it idles {max(0.0, 1 - busy / usual):.0%} of the time without the profiler",
        f"kernels in a step: {sum(event.count for event in kernels) / steps:.0f}; operations and functions on the CPU: "
        f"{sum(event.self_cpu_time_total for event in operations) / steps / 1e3:.1f} ms (with the profiler's own cost)",
        "", f"{'kernels, ms a step':76s} {'ms':>8s} {'share':>6s} {'calls':>6s}",
    ]  # fmt: skip
    lines += [
        f"{short(event.key):76s} {event.self_device_time_total / steps / 1e3:8.2f}"
        f" {event.self_device_time_total / steps / 1e3 / max(busy, 1e-9):6.1%} {event.count / steps:6.0f}"
        for event in kernels[:35]
    ]
    lines += ["", f"{'on the CPU, ms a step':76s} {'ms':>8s} {'':6s} {'calls':>6s}"]
    lines += [
        f"{short(event.key):76s} {event.self_cpu_time_total / steps / 1e3:8.2f} {'':6s}"
        f" {event.count / steps:6.0f}"
        for event in operations[:25]
    ]
    return "\n".join(lines)


def short(name: str) -> str:
    """The beginning and the end of a kernel's name."""
    name = name.replace("void ", "").replace("at::native::", "")
    return name if len(name) <= 76 else f"{name[:50]}…{name[-25:]}"


# ---- the comparison


class DeviceMemory:
    """The largest number of MiB in use on the device, read by nvidia-smi five times a second; None
    without it.
    """

    def __enter__(self) -> "DeviceMemory":
        self.peak: int | None = None
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
        try:
            self._process: Any = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._process = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        values = [int(line) for line in self._process.communicate()[0].splitlines() if line.strip().isdigit()]
        self.peak = max(values, default=None)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_arm(
    name: str, size: str, model: Path, rows: Path, device: str, work: Path, limit_s: float
) -> dict[str, Any]:
    """One arm in a process of its own; its figures, or `error`."""
    words = [
        "--arm",
        name,
        "--size",
        size,
        "--model-dir",
        model,
        "--rows",
        rows,
        "--device",
        device,
        "--work",
        work,
    ]
    began = time.time()
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="true", PYTHONUNBUFFERED="1")
    with DeviceMemory() as memory, (work / f"{size}-{name}.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, *map(str, words)], env=environment, stdout=log, stderr=subprocess.STDOUT
        )  # fmt: skip
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            end_tree(process.pid)
            process.wait()
            code = -1
        log.seek(0)
        text = log.read()
    wall = time.time() - began
    outcome_file = work / f"{size}-{name}.json"
    if code or not outcome_file.exists():
        why = f"ended after {wall:.0f} s" if code == -1 else f"exit code {code}"
        return {"error": f"{why}: {text[-1500:]}", "wall_s": wall}
    outcome = json.loads(outcome_file.read_text())
    return {
        **figures(outcome, began, size, name),
        "device_mib": memory.peak,
        "wall_s": wall,
        "outcome": outcome,
    }


def figures(outcome: dict[str, Any], began: float, size: str, name: str) -> dict[str, Any]:
    """What the table shows."""
    ends, tokens = outcome["ends"], outcome["tokens"]
    warmup = min(STEPS[size][0], len(ends) - 1)
    rate = sum(tokens[warmup:]) / (ends[-1] - ends[warmup - 1])
    spans = sorted(b - a for a, b in itertools.pairwise(ends[warmup - 1 :]))
    flops = model_flops(
        SHAPES[size], full=name == "unisono-full", loss_share=LOSS_SHARE, row_tokens=ROW_TOKENS
    )
    return {
        "tokens_per_s": rate, "step_s": spans[len(spans) // 2], "steps": len(spans), "tokens_per_step": sum(tokens[warmup:]) / len(spans),
        "first_step_s": ends[0] - began, "allocated": outcome["allocated"], "reserved": outcome["reserved"],
        "share_of_peak": rate * flops / PEAK_FLOPS, "loss": outcome["loss"],
    }  # fmt: skip


# Of the rows of bench/workload.py: loss tokens / tokens, and the mean over tokens of the length of
# their row.
LOSS_SHARE, ROW_TOKENS = 0.57, 253.0


def table(found: dict[str, dict[str, Any]]) -> str:
    """A line for each arm."""
    lines = [
        f"{'':18s} {'tok/s':>8s} {'/default':>8s} {'/tuned':>7s} {'step ms':>8s} {'est. GB':>8s}"
        f" {'alloc GB':>8s} {'reserved':>8s} {'device':>7s} {'1st step':>8s} {'of peak':>7s} {'tok/step':>8s}"
    ]
    for key, arm in found.items():
        size = key.split()[0]
        if "error" in arm:
            lines.append(f"{key:18s} failed: {arm['error'].strip().splitlines()[-1][:110]}")
            continue
        ratios = []
        for peer in ("trl-default", "trl-tuned"):
            rate = None if "full" in key else found.get(f"{size} {peer}", {}).get("tokens_per_s")
            ratios.append(f"{arm['tokens_per_s'] / rate:.2f}" if rate else "–")
        device = f"{arm['device_mib'] / 1024:.1f}" if arm["device_mib"] else "–"
        estimate = f"{arm['estimate']['total'] / 1e9:.2f}" if arm.get("estimate") else "–"
        lines.append(
            f"{key:18s} {arm['tokens_per_s']:8.0f} {ratios[0]:>8s} {ratios[1]:>7s} {arm['step_s'] * 1e3:8.1f}"
            f" {estimate:>8s} {arm['allocated'] / 1e9:8.2f} {arm['reserved'] / 1e9:8.2f} {device:>7s}"
            f" {arm['first_step_s']:8.1f} {arm['share_of_peak']:7.1%} {arm['tokens_per_step']:8.0f}"
        )
    return "\n".join(lines)


def make_rows(work: Path) -> None:
    """Rows and tokenizer, unless they are there."""
    from workload import make  # type: ignore[import-not-found]  # beside this script

    if not (work / "alpaca.jsonl").exists():
        make(work, rows=3000, shapes={})


def compare(args: argparse.Namespace, work: Path, device: str) -> None:
    """All arms of all sizes, one after the other."""
    make_rows(work)
    print(f"rows made after {time.time() - BEGAN:.1f} s", flush=True)
    found: dict[str, dict[str, Any]] = {}
    profiles: dict[str, str] = {}

    def write() -> None:
        result = {
            "schema": 1, "command": "python bench/gpu_peers.py " + " ".join(args.sizes), "machine": machine(device), "arms": found, "profiles": profiles,
        }  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    for size in args.sizes:
        began = time.time()
        if not (work / size / "model.safetensors").exists():
            words = ["--make", str(work / size), "--size", size, "--work", str(work), "--device", device]
            run_one([sys.executable, __file__, *words])
        print(f"{size}: weights written in {time.time() - began:.1f} s", flush=True)
        for name in args.arms.split(",") if args.arms else ARMS[size]:
            left = args.limit - (time.time() - BEGAN)
            key = f"{size} {name}"
            if left < 20:
                found[key] = {"error": "no time left"}
            else:
                limit_s = min(left - 5, UNSLOTH_LIMIT_S if name == "unsloth" else LIMIT_S[size])
                found[key] = run_arm(name, size, work / size, work / "alpaca.jsonl", device, work, limit_s)
            write()
            print(
                table({key: found[key]}).splitlines()[-1],
                f"({found[key].get('wall_s', 0):.0f} s)",
                flush=True,
            )
        if size in args.profile and args.limit - (time.time() - BEGAN) > 30:
            profiles[size] = run_profile(size, work, args.limit - (time.time() - BEGAN) - 5)
            args.out.with_name(f"{args.out.stem}-profile-{size}.txt").write_text(profiles[size])
            write()
            print(profiles[size], flush=True)
        if size == "8b":
            (work / size / "model.safetensors").unlink()
    for key, arm in found.items():
        if "error" in arm:
            print(f"--- {key}\n{arm['error']}")
    print(table(found))


def run_one(command: list[str]) -> None:
    """A part of this script in a process of its own, so that nothing of it stays on the device."""
    subprocess.run(command, check=True)


def run_profile(size: str, work: Path, limit_s: float) -> str:
    """The profile's text, or why there is none."""
    words = ["--arm", "profile", "--size", size, "--work", str(work)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, check=False, timeout=min(limit_s, 90)
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "the profile took too long"
    target = work / f"{size}-profile.txt"
    return target.read_text() if target.exists() else f"no profile: {done.stderr[-2000:]}"


def machine(device: str) -> dict[str, Any]:
    """What the figures were made on."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"device": device, "cores": os.cpu_count(), "python": sys.version.split()[0]}
    for package in ("torch", "triton", "transformers", "peft", "trl", "liger-kernel", "datasets"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["gpu"] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", help="of m135, 1b, 8b; else the first two")
    parser.add_argument("--arms", help="names, with commas between them; else all of a size")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_peers.json")
    parser.add_argument("--profile", action="append", default=[], metavar="SIZE")
    parser.add_argument("--limit", type=float, default=540, help="seconds in all")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument(
        "--work",
        help="an existing folder for rows and weights, which a next call uses again; else a temporary one",
    )
    for hidden in ("--arm", "--size", "--model-dir", "--rows", "--device", "--make"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = Path(args.work) if args.work else None
    if args.make:
        make_model(Path(args.make), SHAPES[args.size], Path(args.work) / "tokenizer", args.device)
    elif args.arm == "profile":
        assert work is not None
        plan = work / f"run-{args.size}-unisono" / "plan.json"
        text = profile(plan, work, STEPS[args.size][0], 1 if args.size == "tiny" else 4)
        (work / f"{args.size}-profile.txt").write_text(text)
    elif args.arm:
        assert work is not None
        files = (Path(args.model_dir), Path(args.rows), args.device)
        if not args.arm.startswith("unisono"):
            outcome = trl_arm(args.arm, args.size, *files)
        else:
            outcome = unisono_arm(args.arm, args.size, *files, work)
        (work / f"{args.size}-{args.arm}.json").write_text(json.dumps(outcome))
    else:
        args.sizes = ["tiny"] if args.rehearse else args.sizes or ["m135", "1b"]
        args.profile = ["tiny"] if args.rehearse else args.profile
        args.out = args.out.resolve()
        with contextlib.ExitStack() as stack:
            folder = args.work or stack.enter_context(tempfile.TemporaryDirectory())
            compare(args, Path(folder).resolve(), "cpu" if args.rehearse else "cuda")


if __name__ == "__main__":
    main()
