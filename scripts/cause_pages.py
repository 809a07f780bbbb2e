"""docs/reference/causes.md and a page for each cause, in English and Chinese, from the catalogue,
the signatures, the rules' fixes and the variables.

Used by scripts/make_reference.py.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from babel.messages.pofile import read_po

from page_parts import Translate
from unisono.base.causes import CATALOGUE
from unisono.base.causes.entries import Signature, Signs, read_entry
from unisono.base.causes.signatures import find_signature
from unisono.base.causes.variables import VARIABLES
from unisono.base.causes.verdict import Cause, OwnRunOnly
from unisono.front.drill.drills import DRILLS
from unisono.guard.diagnosis.hypotheses import rank
from unisono.guard.diagnosis.remedy import remedy
from unisono.guard.diagnosis.report_terms import find_features
from unisono.guard.diagnosis.report_text import sentences_of
from unisono.guard.diagnosis.run_facts import Hypothesis, RunFacts

ROOT = Path(__file__).resolve().parent.parent
_PROGRAMS = {
    "llamafactory": "LLaMA-Factory", "trl": "TRL, Hugging Face Trainer", "torchrun": "torchrun", "ray": "Ray Train", "lightning": "Lightning",
}  # fmt: skip
_COMMANDS = {
    "unisono", "echo", "sha256sum", "git", "pip", "python", "env", "nvidia-smi", "nc", "ping", "hostname", "touch", "ss", "date", "chronyc", "getent", "dmesg",
    "py-spy", "ps", "sacct", "grep", "ray", "df", "ulimit", "ibstat", "ls", "curl", "huggingface-cli",
}  # fmt: skip
SYMPTOMS = (
    "hangs after the model is loaded, several nodes",
    "hangs after the model is loaded, multi gpu, one node",
    "hangs at init_process_group, two nodes",
    "stuck at 100 % GPU utilization and no step is made",
    "hangs in the first step",
    "hangs after some hours in the middle of training",
    "hangs at the end of an epoch",
    "hangs during evaluation",
    "hangs when saving a checkpoint",
    "fails when saving a checkpoint on several nodes",
    "error after training has finished, at exit",
    "timeout while the dataset is tokenized",
    "CUDA out of memory",
    "a process was killed without any traceback",
    "RAM grows until the job is killed",
    "loss is nan or 0",
    "training is slow, GPUs idle",
    "one node is slower than the others",
    "works on one GPU but hangs on several",
    "works on one node but hangs on two nodes",
    "connection refused between nodes",
    "address already in use",
    "fails after an upgrade of packages",
    "cannot resume from a checkpoint",
    "Ray: pending, no available node types",
    "training in docker, bus error or shared memory",
)
"""Symptoms of the index, ranked as `unisono explain --symptom` ranks them."""
KINDS = {
    "Memory": (
        "cuda_oom", "host_oom_killed", "shm_too_small",
    ),
    "Hangs": (
        "rank_stalled", "rank_stopped", "gil_held", "user_code_stuck", "io_blocked", "data_starved",
        "waits_for_input", "unequal_steps", "collective_mismatch", "device_unbound_barrier", "straggler",
        "cpu_oversubscribed", "tracker_login",
    ),
    "Crashes": (
        "rank_killed", "rank_died_first", "preempted_sigterm", "user_code_error", "unused_parameters_ddp",
        "process_group_destroyed_twice", "teardown_crash", "single_device_nccl", "ray_worker_died", "terminal_closed",
        "adapter_gets_no_gradient", "model_split_over_devices", "cuda_kernel_error", "hccl_error",
    ),
    "Rewards": (
        "reward_error", "reward_timeout", "no_reward_signal", "entropy_collapsed", "answers_never_stop", "kl_exploded",
        "sampler_unreachable", "sampler_stale", "sampler_mismatch",
    ),
    "Network": (
        "node_unreachable", "head_unreachable", "address_unreachable", "rdzv_timeout", "port_in_use", "dns_failure",
        "hostname_loopback", "nccl_socket_iface", "ib_unreachable", "mtu_blackhole", "hub_unreachable",
        "proxy_between_pods",
    ),
    "Start of nodes": (
        "node_missing", "node_refused", "node_duplicate", "token_rejected", "nproc_mismatch", "world_mismatch",
        "stale_process", "clock_skew", "ray_resources_unsatisfiable", "pod_not_scheduled",
    ),
    "GPUs and drivers": (
        "gpu_fell_off", "ecc_error", "p2p_blocked", "driver_too_old", "cuda_arch_unsupported", "no_cuda_build",
        "bnb_no_gpu", "invalid_device_ordinal", "duplicate_gpu", "device_mismatch", "bf16_unsupported",
        "nccl_missing_on_windows",
    ),
    "Packages and environment": (
        "missing_dependency", "flash_attn_missing", "version_mismatch", "version_known_bad", "env_mismatch",
        "env_suspicious", "code_mismatch", "ulimit", "extension_build_failed",
    ),
    "Config, data and model": (
        "config_mismatch", "plan_mismatch", "data_mismatch", "picture_changed", "split_mismatch", "dataset_cache_race",
        "tokenizer_files_mismatch", "tokenizer_mismatch", "weights_mismatch", "model_path_missing", "gated_model",
        "nan_loss", "replicas_diverged", "dataset_file_unreadable", "all_labels_masked", "eos_never_learned",
        "multimodal_tokens_truncated", "batch_sizes_do_not_divide",
    ),
    "Storage and checkpoints": (
        "disk_full", "storage_not_shared", "storage_unfit", "output_removed", "corrupt_checkpoint",
        "checkpoint_mismatch", "checkpoint_not_shared", "resume_mismatch", "weights_only_load", "shared_tensors_on_save",
    ),
    "No cause": (
        "healthy", "undetermined",
    ),
}  # fmt: skip
"""The causes by kind, for the navigation and the index."""
_FOR_ANY_PROGRAM = {
    "cuda_oom": (
        "Lower the batch size per device and raise gradient accumulation by the same factor: the global batch stays the same.",
        "Turn on gradient checkpointing: activations are recomputed instead of stored.",
        "Train an adapter (LoRA or QLoRA) instead of all weights, or lower its rank.",
        "Shorten the sequences, if the longest examples need not stay complete.",
        "Distribute weights and optimizer state over several GPUs: FSDP or ZeRO-3.",
    ),
    "host_oom_killed": (
        "Request more memory, or raise the container's limit.",
        "Run fewer data workers and other processes on the node.",
        "Stream large datasets instead of loading them into memory.",
    ),
    "disk_full": (
        "Free space: `df -h PATH`, `df -i PATH`, `du -xh --max-depth=1 PATH | sort -h`.",
        "Keep fewer checkpoints, or write them to a larger disk.",
        "Move the hub's cache: HF_HOME=/larger/disk.",
    ),
}  # fmt: skip
"""The fix for any program, most helpful first, where the first remedies in the catalogue name keys of
unisono: a page is read by users of other programs, too.
"""
_LABEL = re.compile(r"^(- (?:\[.*?\]\(.*?\)|`[^`]+`|\*\*.*?\*\*)): ")
"""What a list item is about: Chinese has its own colon behind it."""

CHINESE = ROOT / "src" / "unisono" / "base" / "locale" / "zh" / "LC_MESSAGES" / "unisono.po"


class Chinese:
    """Translates by the catalogue of texts.

    Attributes:
        missing: the texts that it does not have; they stay in English.
    """

    def __init__(self) -> None:
        with CHINESE.open("rb") as file:
            entries = read_po(file)
        self.texts = {str(entry.id): str(entry.string) for entry in entries if entry.id and entry.string}
        self.missing: set[str] = set()

    def __call__(self, text: str) -> str:
        """The text in Chinese."""
        if text not in self.texts:
            self.missing.add(str(text))
        return self.texts.get(text, text)


def cause_pages(translate: Translate, language: str) -> dict[str, list[str]]:
    """All pages about causes by their names below docs/reference, as lines."""
    pages = {"causes.md": _index(translate, language)}
    for cause in CATALOGUE.values():
        pages[f"causes/{cause.id}.md"] = list(_page(cause, translate, language))
    if language == "zh":
        pages = {name: [_LABEL.sub(r"\1：", line) for line in lines] for name, lines in pages.items()}
    return pages


def _index(t: Translate, language: str) -> list[str]:
    """Causes by symptom, then all of them."""
    other = "`unisono explain CAUSE`"
    lines = [
        f"# {t('Causes of failure')}", "",
        t("Why training fails, and how to fix it. Paste a line of the log into the search of this site, or look up what you see. `unisono diagnose LOGS` finds the cause from logs, and {command} shows a page in the terminal.").format(command=other), "",
        f"## {t('By symptom')}", "",
        t("The most likely causes first; `unisono explain --symptom TEXT` ranks them in the same way."), "",
        f"| {t('symptom')} | {t('likely causes')} |", "|---|---|",
    ]  # fmt: skip
    for symptom in SYMPTOMS:
        found = rank(find_features("symptom", sentences_of(symptom)), is_failure=True).hypotheses[:4]
        links = "<br>".join(
            f"{_link(one.cause, 'causes/')}: {t(CATALOGUE[one.cause].title)}" for one in found
        )
        lines.append(f"| {t(symptom)} | {links} |")
    lines += [
        "",
        f"## {t('All causes')}",
    ]
    for kind, names in KINDS.items():
        lines += ["", f"### {t(kind)}", "", f"| {t('cause')} | {t('in one line')} | {t('exit code')} |"]
        lines += ["|---|---|---|"]
        lines += [
            f"| {_link(cause.id, 'causes/')} | {t(cause.title)} | {cause.exit_code} |"
            for cause in (CATALOGUE[name] for name in names)
        ]
    return lines


def _page(cause: Cause, t: Translate, language: str) -> Iterator[str]:
    """One cause."""
    yield from (f"# {cause.id}: {t(cause.title)}", "", t(cause.meaning))
    yield from ("", f"**{t('What you see')}**", "")
    yield from (f"- {t(sign)}" for sign in cause.telltales)
    entry = read_entry(cause.id)
    if own := entry.signatures:
        yield from ("", t("Typical log lines:"), "", *_examples(own))
    if seen := [one for name in entry.seen_with if (one := find_signature(name))]:
        yield from ("", t("Log lines that other causes produce, too:"), "", *_examples(seen))
    signs = entry.signs or Signs()
    if checks := [line.replace("{devices}", "0,1,2,3") for line in signs.check]:
        yield from ("", f"## {t('How to check')}", "", *(f"- {_check(t(line))}" for line in checks))
    yield from ("", f"## {t('Fix')}", "")
    general = [line for line in cause.remedy if not isinstance(line, OwnRunOnly)]
    first = _FOR_ANY_PROGRAM.get(cause.id, general)
    yield from (f"{number}. {t(line)}" for number, line in enumerate(first, 1))
    yield from ("", f"### {t('With unisono')}", "")
    ours = [signs.here] if signs.here else []
    ours += [line for line in cause.remedy if line not in first]
    yield from (f"- {_sentence(t(line))}" for line in ours)
    if "after" in cause.when:
        yield f"- {t('`unisono diagnose LOGS` recognizes it in the logs of any program.')}"
    for fault in [drill.fault for drill in DRILLS if drill.want[:1] == (cause.id,)]:
        text = t("{command} reproduces it in a small run and shows the report.")
        yield f"- {text.format(command=f'`unisono drill {fault}`')}"
    if programs := list(_in_programs(cause, [*first, *cause.remedy], t)):
        yield from ("", f"### {t('In other programs')}", "", *programs)
    yield from _related(cause, t)
    retry = t("Retrying can help.") if cause.retry_helps else t("Retrying alone does not help.")
    if language == "zh":
        times = "、".join(t(f"{when} a run") for when in cause.when)
        yield from (
            "",
            f"{t('Exit code')} {cause.exit_code}。{retry}{t('Detected {when}.').format(when=times)}",
        )
    else:
        *others, last = cause.when
        times = f"{', '.join(others)} and {last}" if others else last
        yield from ("", f"{t('Exit code')} {cause.exit_code}. {retry} Detected {times} a run.")


def _examples(signatures: Sequence[Signature]) -> Iterator[str]:
    """Literal lines."""
    yield from ("```text", *dict.fromkeys(" ".join(one.example.split()) for one in signatures), "```")


def fragments(cause_id: str) -> list[str]:
    """Other strings that lines of a cause contain, for the search alone: parts of patterns, which mean
    little to a reader.

    One word alone says too little.
    """
    signatures = read_entry(cause_id).signatures
    examples = " ".join(one.example for one in signatures)
    found = dict.fromkeys(
        hint.strip(" `") for one in signatures for hint in one.hints if hint not in examples
    )
    return [
        hint for hint in found if len(hint) > 5 and (" " in hint or not hint.islower()) and "`" not in hint
    ]


def _check(line: str) -> str:
    """A check with its command as code; in Chinese the command comes last."""
    if "：" in line:
        before, _, command = line.partition("：")
        return f"{before}：{_check(command)}"
    command, rest = re.fullmatch(
        r"(.*?)((?:,| as a test)(?: (?:on|between|from|with|of|and|beside|over)\b.*)?|(?: on| while| beside)"
        r" .*)?",
        line,
    ).groups(default="")  # type: ignore[union-attr]
    return f"`{command}`{rest}" if command.split()[0] in _COMMANDS or "=" in command.split()[0] else line


def _in_programs(cause: Cause, general: Sequence[str], t: Translate) -> Iterator[str]:
    """What to set in other programs: the fixes of `diagnose` that are specific to them, without
    repeating one that holds for all.
    """
    known: dict[str, list[str]] = {}
    for program in _PROGRAMS:
        for line in remedy(Hypothesis(cause=cause.id, why=""), replace(RunFacts(), framework=program)):
            if line not in general:
                known.setdefault(line, []).append(program)
    for line, programs in known.items():
        if len(programs) == len(_PROGRAMS):
            yield f"- {t(line)}"
    for line, programs in known.items():
        if len(programs) < len(_PROGRAMS):
            yield f"- **{', '.join(_PROGRAMS[one] for one in programs)}**: {t(line)}"


def _related(cause: Cause, t: Translate) -> Iterator[str]:
    """Similar causes and variables."""
    if cause.neighbours:
        yield from ("", f"## {t('Similar causes')}", "")
        yield from (f"- {_link(name)}: {t(text)}" for name, text in cause.neighbours)
    if variables := [one for one in VARIABLES if cause.id in one.causes]:
        yield from ("", f"## {t('Related variables')}", "")
        yield from (f"- `{one.name}`: {t(one.meaning)}" for one in variables)


def _sentence(text: str) -> str:
    if not text.isascii() and text[-1:] not in ".。":
        return f"{text}。"
    return f"{text[0].upper()}{text[1:]}" if text.endswith((".", "。")) else f"{text[0].upper()}{text[1:]}."


def _link(cause: str, folder: str = "") -> str:
    return f"[{cause}]({folder}{cause}.md)"
