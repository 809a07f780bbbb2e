"""Which finding holds: the order of judgement. Consequences never win while anything else is there."""

from collections.abc import Callable, Sequence

from unisono.diagnose.facts import RunFacts
from unisono.diagnose.finding import Finding
from unisono.diagnose.rules.death import (
    find_cancelled,
    find_deaths,
    find_out_of_memory,
    find_preemption,
    find_ray_deaths,
    find_silence,
)
from unisono.diagnose.rules.finished import find_finished, find_nan
from unisono.diagnose.rules.hang import find_hang, find_mismatches, find_uneven
from unisono.diagnose.rules.launch import (
    find_rendezvous,
    find_single_device,
    find_unbound,
    find_unequal_nodes,
)
from unisono.diagnose.rules.network import find_interfaces, find_versions
from unisono.diagnose.rules.owned import find_owned
from unisono.diagnose.rules.program import find_user_errors
from unisono.diagnose.rules.ray import find_ray_resources
from unisono.diagnose.rules.storage import find_unshared
from unisono.diagnose.rules.unclear import find_unclear
from unisono.diagnose.rules.view import View

SPECIFIC: tuple[str, ...] = (
    "host_oom_killed", "gpu_fell_off", "ecc_error", "ulimit", "shm_too_small", "disk_full", "single_device_nccl", "duplicate_gpu", "invalid_device_ordinal", "ib_unreachable", "p2p_blocked",
    "nccl_socket_iface", "unused_parameters_ddp", "tokenizer_mismatch", "cuda_oom", "nan_loss", "flash_attn_missing", "bnb_no_gpu", "driver_too_old", "cuda_arch_unsupported", "no_cuda_build",
    "version_mismatch", "gated_model", "hub_unreachable", "model_path_missing", "checkpoint_not_shared", "dataset_cache_race", "corrupt_checkpoint", "checkpoint_mismatch", "missing_dependency",
    "port_in_use", "hostname_loopback", "dns_failure", "collective_mismatch",
)  # fmt: skip
"""Of several causes that the log names in so many words: the one that explains the others first."""
CERTAIN = 0.8
"""What is said with less confidence does not come before the program's own exceptions."""

_WORDS: tuple[Callable[[View], list[Finding]], ...] = (find_versions, find_owned, find_out_of_memory, find_single_device, find_interfaces, find_unshared)  # fmt: skip
_STRUCTURE: tuple[Callable[[View], list[Finding]], ...] = (
    find_unequal_nodes, find_mismatches, find_uneven, find_deaths, find_rendezvous, find_silence, find_unbound, find_hang, find_ray_deaths,
)  # fmt: skip


def judge(facts: RunFacts) -> list[Finding]:
    """All that may be, the most likely first; never empty."""
    view = View(facts)
    ended = find_finished(view)
    nan = find_nan(view)
    if ended:
        return [*nan, *ended]
    named = sorted((finding for rule in _WORDS for finding in rule(view)), key=_specific)
    certain = [finding for finding in named if finding.confidence >= CERTAIN]
    vague = [finding for finding in named if finding.confidence < CERTAIN]
    own = find_user_errors(view)
    taken = find_preemption(view)
    structure = [finding for rule in _STRUCTURE for finding in rule(view)]
    resources = find_ray_resources(view)
    ranked = [*certain, *nan, *_unless_caught(own), *structure, *resources, *own, *vague]
    ranked = _with_preemption(taken, ranked)
    return _distinct([*(ranked or find_cancelled(view)), *find_unclear(view)])


def _specific(finding: Finding) -> tuple[bool, int]:
    place = SPECIFIC.index(finding.cause) if finding.cause in SPECIFIC else len(SPECIFIC)
    return finding.confidence < CERTAIN, place


def _unless_caught(own: Sequence[Finding]) -> list[Finding]:
    """The program's exceptions that ended it, as far as one can see."""
    return [finding for finding in own if finding.confidence > 0.5]


def _with_preemption(taken: list[Finding], ranked: list[Finding]) -> list[Finding]:
    """The scheduler's word counts where nothing had failed before it."""
    if not taken:
        return ranked
    if not ranked:
        return taken
    scheduler, first = taken[0].evidence[0], ranked[0].evidence[:1]
    told = "SignalException" not in scheduler.text
    if not first:
        return [*taken, *ranked]
    same = first[0].source == scheduler.source
    before = first[0].order < scheduler.order if same else not told
    return [ranked[0], *taken, *ranked[1:]] if before else [*taken, *ranked]


def _distinct(findings: list[Finding]) -> list[Finding]:
    """One for each cause; "undetermined" only where nothing else is left."""
    found: dict[str, Finding] = {}
    for finding in findings:
        found.setdefault(finding.cause, finding)
    if len(found) > 1:
        found.pop("undetermined", None)
    return list(found.values())
