"""The fix for this run: first what is specific to its framework and facts, then the catalogue's
fix.
"""

from collections.abc import Callable

from unisono.base.causes import find_cause, remedy_for_foreign_program
from unisono.base.text import one_line
from unisono.guard.diagnosis.run_facts import Hypothesis, RunFacts

_HF = ("transformers", "trl", "llamafactory", "axolotl")
_RESUMABLE = frozenset(
    {"preempted_sigterm", "rank_died_first", "host_oom_killed", "disk_full", "gpu_fell_off"}
)
"""Failures unrelated to the training itself, after which the user wants to resume."""


def remedy(finding: Hypothesis, facts: RunFacts) -> list[str]:
    """The lines of FIX, the most specific first."""
    special = _SPECIAL.get(finding.cause)
    lines = special(finding, facts) if special else []
    cause = find_cause(finding.cause)
    advice = cause.remedy if cause else ()
    if facts.framework != "unisono":
        advice = remedy_for_foreign_program(advice, facts.framework if finding.cause in _RESUMABLE else "")
    lines += [line for line in advice if line not in lines]
    if finding.missing:
        lines.append(f"Missing for a more precise answer: {'; '.join(finding.missing)}.")
    return [one_line(line) for line in lines]


def _who(finding: Hypothesis) -> str:
    return f"rank {finding.ranks[0]}" if len(finding.ranks) == 1 else "the rank that failed"


def _nproc(finding: Hypothesis, facts: RunFacts) -> list[str]:
    if facts.framework == "llamafactory":
        how = "NPROC_PER_NODE=N (LLaMA-Factory; torchrun: --nproc_per_node N)"
    else:
        how = "--nproc_per_node N (LLaMA-Factory: NPROC_PER_NODE=N)"
    return [
        f"Set the same CUDA_VISIBLE_DEVICES on all nodes, or unset it everywhere, and declare {how} on each"
        " node: the number is otherwise taken from the visible devices."
    ]


def _unbound(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        (
            "Bind the device before the first barrier: torch.cuda.set_device(local_rank), then"
            " init_process_group(..., device_id=torch.device('cuda', local_rank));"
            " barrier(device_ids=[local_rank])."
        ),
        (
            "If it still hangs, the transport is at fault: try one at a time NCCL_P2P_DISABLE=1,"
            " NCCL_IB_DISABLE=1, NCCL_SOCKET_IFNAME=<interface>."
        ),
    ]


def _unequal(finding: Hypothesis, facts: RunFacts) -> list[str]:
    lines = [
        "Give every rank the same number of steps: the same seed in train_test_split (and in every split and"
        " shuffle), so that the split has the same length on all ranks; drop_last=True."
    ]
    if facts.framework in _HF:
        lines.append(
            "Transformers: dataloader_drop_last: true; with streaming data, split_batches or max_steps."
        )
    elif facts.framework == "lightning":
        lines.append(
            "Lightning: limit_train_batches to the smallest rank's number, or use_distributed_sampler=True."
        )
    else:
        lines.append(
            "In your own loop: wrap it in torch.distributed.algorithms.join.Join, or all-reduce the smallest"
            " number of steps before it."
        )
    return lines


def _mismatch(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Make the same collectives in the same order on every rank: look for a branch (if rank == 0, if loss"
        " is nan, an early return, evaluation on some ranks) around the call in the traceback."
    ]


def _died(finding: Hypothesis, facts: RunFacts) -> list[str]:
    who, name = _who(finding), finding.facts.get("signal", "")
    if name == "SIGSEGV":
        return [
            f"{who} crashed with SIGSEGV (segmentation fault) in native code: run with PYTHONFAULTHANDLER=1"
            " (faulthandler prints the Python stack), allow a core dump (ulimit -c unlimited), and read"
            " dmesg."
        ]
    if name == "SIGKILL":
        return [
            f"{who} was killed by signal 9 (SIGKILL): a user, or the kernel for lack of memory (OOM), killed"
            " it. `dmesg -T | grep -i -E 'killed process|oom'` on its host shows; in containers see"
            " memory.events."
        ]
    if name:
        return [
            f"{who} ended by {name}: look at the last lines of its own log, run with PYTHONFAULTHANDLER=1,"
            " allow a core dump, read dmesg on its host."
        ]
    return [
        f"Look at the last lines of the log of {who}, and at how it ended: its exit code, a kill or signal"
        " (dmesg -T, OOM: out of memory), os._exit or sys.exit or an early return in the program."
    ]


def _stalled(finding: Hypothesis, facts: RunFacts) -> list[str]:
    who = _who(finding)
    lines = [f"See where {who} is while it happens: py-spy dump --pid PID."]
    if facts.framework == "llamafactory":
        lines.insert(
            0,
            "Preprocess once before training (tokenized_path, preprocessing_num_workers: 16), and set"
            " ddp_timeout: 180000000 so that the other ranks wait long enough.",
        )
    elif facts.framework in _HF:
        lines.insert(
            0,
            "Preprocess under `with training_args.main_process_first():` or before training, with num_proc;"
            " set ddp_timeout (seconds) so that the other ranks wait long enough.",
        )
    else:
        lines.insert(
            0,
            "Preprocess and download before the process group is made, on rank 0 first; give"
            " init_process_group(timeout=timedelta(hours=2)) if a long phase is expected.",
        )
    return lines


def _oom_host(finding: Hypothesis, facts: RunFacts) -> list[str]:
    lines = ["Give the job more RAM (host memory; in containers the memory limit), or reduce its use:"]
    if facts.framework == "llamafactory":
        lines[0] += " smaller preprocessing_num_workers and dataloader_num_workers, streaming: true."
    else:
        lines[0] += (
            " fewer dataloader workers and a smaller num_proc (preprocessing_num_workers), streaming"
            " datasets, low_cpu_mem_usage when loading."
        )
    return lines


def _oom_cuda(finding: Hypothesis, facts: RunFacts) -> list[str]:
    name = {
        "llamafactory": "per_device_train_batch_size: 1, a smaller cutoff_len",
        "trl": "per_device_train_batch_size=1, a smaller max_length",
        "lightning": "a smaller batch_size, accumulate_grad_batches",
    }
    first = name.get(
        facts.framework,
        "a smaller batch size per device (per_device_train_batch_size=1) and more"
        " gradient_accumulation_steps, shorter sequences (cutoff)",
    )
    return [
        f"Reduce memory use: {first}; gradient_checkpointing; then ZeRO-3 or FSDP, LoRA or QLoRA.",
        (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps if much memory is reserved but not"
            " allocated."
        ),
    ]


def _disk(finding: Hypothesis, facts: RunFacts) -> list[str]:
    keep = (
        "save_total_limit: 2 keeps fewer checkpoints"
        if facts.framework in (*_HF, "")
        else "keep fewer checkpoints (transformers: save_total_limit; Lightning: save_top_k)"
    )
    return [
        f"Free disk space where checkpoints and caches go (df -h, df -i); {keep}; move HF_HOME, TMPDIR and"
        " the output to a larger disk."
    ]


def _user(finding: Hypothesis, facts: RunFacts) -> list[str]:
    details = finding.facts
    at = (
        f"line {details['line']} of {details['file']}"
        if details.get("file") and details.get("line")
        else "the line that its traceback ends in"
    )
    what = f"{details.get('exception', 'the exception')}: {details.get('message', '')}".rstrip(" :")
    lines = [
        f"Fix {at} on {_who(finding)}, or the data (sample, row, column, field) that it received: `{what}`."
    ]
    hint = _hint(details)
    if hint:
        lines.insert(0, hint)
    return lines


def _hint(details: dict[str, str]) -> str:
    kind, message = details.get("exception", ""), details.get("message", "")
    if kind == "KeyError" and message:
        return (
            f"The key {message} is missing: check the names of the dataset's columns (text, labels, messages)"
            " against what the code reads (dataset_text_field, remove_unused_columns), and that every row"
            " has it."
        )
    if kind == "TemplateError" or "role" in message.lower():
        return (
            "The chat template rejects a row of the data: check the roles (system, user, assistant) of every"
            " sample and their order."
        )
    if "collat" in details.get("functions", "") or "__getitem__" in details.get("functions", ""):
        return "It failed while making a batch: check the rows (the sample and the collator)."
    return ""


def _port(finding: Hypothesis, facts: RunFacts) -> list[str]:
    how = (
        "MASTER_PORT=29501 llamafactory-cli train …"
        if facts.framework == "llamafactory"
        else (
            "--master_port / MASTER_PORT, or the port of --rdzv_endpoint; on one node `torchrun --standalone`"
        )
    )
    return [
        f"Use a different port: {how}.",
        "Find the holder: `ss -ltnp | grep :PORT`; often it is a rank of the previous run that still runs.",
    ]


def _rendezvous(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Start all nodes within the timeout with the same --nnodes, --rdzv_id and --rdzv_endpoint"
        " (MASTER_ADDR, MASTER_PORT); every node must reach the head's port: `nc -vz HEAD PORT` (firewall)."
    ]


def _loopback(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "In /etc/hosts of the head node remove its name from the line 127.0.1.1; or set MASTER_ADDR"
        " (--master_addr) to an address that the other nodes reach, and GLOO_SOCKET_IFNAME to its interface."
    ]


def _dns(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Make the name resolve on every node (`getent hosts NAME`): an entry in /etc/hosts or in DNS; or pass"
        " an IP address in MASTER_ADDR. In Kubernetes wait for the headless service."
    ]


def _missing(finding: Hypothesis, facts: RunFacts) -> list[str]:
    name = _module(finding)
    return [
        "Install it in the environment that the launcher starts, on every node: pip install"
        f" {name or 'MODULE'}."
    ]


_PACKAGES = {
    "cv2": "opencv-python",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "llamafactory": "-e . (in LLaMA-Factory's directory)",
    "flash_attn": "flash-attn --no-build-isolation",
}


def _module(finding: Hypothesis) -> str:
    for event in finding.evidence:
        _, _, tail = event.text.partition("No module named ")
        name = tail.strip().strip("'\"").split("'")[0].split(".")[0].strip("`;, ")
        if name:
            return _PACKAGES.get(name, name)
    return ""


def _shared(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Write the output to storage that all nodes share (NFS, Lustre), or let each node save its own:"
        " save_on_each_node: true (transformers, LLaMA-Factory), DeepSpeed: use_node_local_storage."
    ]


def _version(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Install the same versions on all nodes, at least the versions that the message requires: pip"
        " install --upgrade (transformers, accelerate, torch …); compare `pip freeze` between nodes."
    ]


def _path(finding: Hypothesis, facts: RunFacts) -> list[str]:
    key = "model_name_or_path" if facts.framework in (*_HF, "") else "the model's path"
    return [
        f"Check that {key} exists, on every node and inside the container, and contains config.json and the"
        " weights: anything that is not a directory is taken for a name on the hub."
    ]


def _hub(finding: Hypothesis, facts: RunFacts) -> list[str]:
    lines = [
        "Reach the hub, or avoid it: HF_ENDPOINT=https://… (a mirror), a proxy; or download the model on a"
        " machine with network, give its local path, and set HF_HUB_OFFLINE=1."
    ]
    if facts.collectives:
        lines.append(
            "The others waited for it: download before the process group is made, on rank 0 first, or let"
            " them wait longer (ddp_timeout, init_process_group(timeout=…))."
        )
    return lines


def _preempted(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Start it again from the last checkpoint; Slurm: #SBATCH --requeue, --signal=B:USR1@120 and a larger"
        " --time limit; save more often than it is preempted."
    ]


def _ray_died(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Read the dead worker's log (ray logs; worker-*.err and raylet.out below /tmp/ray/session_latest/logs"
        " on its node) and dmesg: most often it ran out of memory (OOM). More memory, fewer workers per node,"
        " max_failures in FailureConfig."
    ]


def _ray_room(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Compare `ray status` with ScalingConfig(num_workers, use_gpu, resources_per_worker): request no more"
        " CPUs and GPUs than a node has and than are free."
    ]


def _arch(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Install a PyTorch wheel that is built for this GPU, for example: pip install torch --index-url"
        " https://download.pytorch.org/whl/cu128 (Blackwell, sm_100 and sm_120, needs torch 2.7 or newer with"
        " cu128)."
    ]


def _no_cuda(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "This torch has no CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu126 (and"
        " start the container with --gpus all); on CPU use the backend gloo."
    ]


def _unused(finding: Hypothesis, facts: RunFacts) -> list[str]:
    how = {
        "llamafactory": "ddp_find_unused_parameters: true",
        "lightning": "strategy='ddp_find_unused_parameters_true'",
        "transformers": "ddp_find_unused_parameters=True",
        "trl": "ddp_find_unused_parameters=True",
    }.get(facts.framework, "DistributedDataParallel(find_unused_parameters=True)")
    return [
        f"{how} (find_unused_parameters), or freeze parameters that are not part of the loss; with gradient"
        " checkpointing gradient_checkpointing_kwargs={'use_reentrant': False}."
    ]


def _nan(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Lower the learning rate (learning_rate, lr), train in bf16 instead of fp16, clip gradients"
        " (max_grad_norm: 1.0), add warmup; look for rows with empty labels. Resume from a checkpoint"
        " before it."
    ]


def _single(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Choose no distributed strategy for one device (Lightning: strategy='auto', devices=1; no"
        " strategy='ddp'), make one device visible: CUDA_VISIBLE_DEVICES=0; a newer Lightning does this by"
        " itself."
    ]


def _twice(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "The results are complete. Guard the call: if torch.distributed.is_initialized():"
        " torch.distributed.destroy_process_group(); call it in one place only; with Ray Train upgrade ray."
    ]


def _teardown(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "The results are complete and usable: check that the last checkpoint is there. Call"
        " torch.distributed.destroy_process_group() after the last step, close loggers and loaders, then"
        " exit."
    ]


def _ordinal(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Start no more ranks on a node than it has visible devices: --nproc_per_node (LLaMA-Factory:"
        " NPROC_PER_NODE; Lightning: devices) at most the length of CUDA_VISIBLE_DEVICES, inside it devices"
        " count from 0 (nvidia-smi -L)."
    ]


def _tokens(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "model.resize_token_embeddings(len(tokenizer)) after tokens were added (LLaMA-Factory: resize_vocab:"
        " true); use the tokenizer that belongs to the model; no token id may reach its vocab size."
    ]


def _gpu(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        f"Take the GPU of {_who(finding)} out of use: nvidia-smi and dmesg (Xid) on its host, drain the node,"
        " reboot; when it comes back, replace the hardware (power, riser, card)."
    ]


def _clear(finding: Hypothesis, facts: RunFacts) -> list[str]:
    return [
        "Give diagnose the logs of all ranks and nodes from their beginning (torchrun --log-dir DIR --tee 3),"
        " and set for the next run NCCL_DEBUG=INFO, TORCH_NCCL_TRACE_BUFFER_SIZE=20000 (FlightRecorder),"
        " TORCH_NCCL_DUMP_ON_TIMEOUT=1."
    ]


# fmt: off
_SPECIAL: dict[str, Callable[[Hypothesis, RunFacts], list[str]]] = {
    "nproc_mismatch": _nproc, "device_unbound_barrier": _unbound, "unequal_steps": _unequal,
    "collective_mismatch": _mismatch, "rank_died_first": _died, "rank_stalled": _stalled,
    "host_oom_killed": _oom_host, "cuda_oom": _oom_cuda, "disk_full": _disk, "user_code_error": _user,
    "port_in_use": _port, "rdzv_timeout": _rendezvous, "hostname_loopback": _loopback,
    "dns_failure": _dns, "missing_dependency": _missing, "checkpoint_not_shared": _shared,
    "version_mismatch": _version, "model_path_missing": _path, "hub_unreachable": _hub,
    "preempted_sigterm": _preempted, "ray_worker_died": _ray_died, "ray_resources_unsatisfiable": _ray_room,
    "cuda_arch_unsupported": _arch, "no_cuda_build": _no_cuda,
    "unused_parameters_ddp": _unused, "nan_loss": _nan, "single_device_nccl": _single,
    "process_group_destroyed_twice": _twice, "tokenizer_mismatch": _tokens,
    "invalid_device_ordinal": _ordinal, "teardown_crash": _teardown, "gpu_fell_off": _gpu, "ecc_error": _gpu,
    "undetermined": _clear,
}
# fmt: on
