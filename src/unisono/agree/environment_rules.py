"""Which environment variables must be equal on all nodes, and what comes of it if they are not (from `causes.variables`)."""

import re
from collections.abc import Iterable

from unisono.agree.rule import Need
from unisono.causes.variable import Group
from unisono.causes.variables import VARIABLES, find_variable
from unisono.causes.variables_libraries import KNOWN_TO_LIBRARIES
from unisono.text import nearest

_NEED: dict[Group, Need] = {"equal": "equal", "unique": "unique", "per-node": "valid", "free": "free"}

LAUNCH: frozenset[str] = frozenset(
    {
        "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "NNODES", "NPROC_PER_NODE",
        "MASTER_ADDR", "MASTER_PORT", "RDZV_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    }
)  # fmt: skip
"""Read by the command line or set anew for each rank: their effect is compared (nodes, nproc, address), not their spelling."""

ONLY_WARN: dict[str, str] = {
    "PYTHONHASHSEED": "the rows and their order are compared by digest before the first step",
    "HF_HUB_OFFLINE": "the files are compared by digest",
    "HF_DATASETS_OFFLINE": "the files are compared by digest",
    "HF_ENDPOINT": "the files are compared by digest",
    "CUDA_LAUNCH_BLOCKING": "one node is slower",
    "CUDA_DEVICE_ORDER": "devices are named by UUID",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "devices are named by UUID",
    "PYTORCH_ALLOC_CONF": "one node may run out of memory sooner",
    "PYTORCH_CUDA_ALLOC_CONF": "one node may run out of memory sooner",
}
"""What may differ at a price, and why the run starts all the same."""

DEFAULTS: dict[str, str] = {
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_NAN_CHECK": "0",
    "TORCH_DIST_INIT_BARRIER": "0",
    "TORCH_GLOO_LAZY_INIT": "0",
    "NCCL_IB_DISABLE": "0",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_SHM_DISABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "CUDA_LAUNCH_BLOCKING": "0",
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    "HF_HUB_OFFLINE": "0",
    "HF_DATASETS_OFFLINE": "0",
    "HF_ENDPOINT": "https://huggingface.co",
}
"""What it means that a variable is not set, where that is documented: set to this it differs from nothing."""

_ANY_CASE = {"TORCH_DISTRIBUTED_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_FAMILY"}
_EQUAL_FAMILY = re.compile(r"^(ACCELERATE|FSDP|DS|TORCHINDUCTOR|TORCH_COMPILE)_")
_OURS_TO_KNOW = re.compile(r"^(NCCL|TORCH_NCCL|GLOO)_")


def need_of(name: str) -> Need:
    """What is asked of the variable: equal, unique, valid or free."""
    known = find_variable(name)
    if known is not None:
        return _NEED[known.group]
    return "equal" if _EQUAL_FAMILY.match(name) or _OURS_TO_KNOW.match(name) else "free"


def compared(name: str) -> bool:
    """Whether nodes are refused, or warned, if the variable differs."""
    known = find_variable(name) is not None or bool(_EQUAL_FAMILY.match(name))
    return known and name not in LAUNCH and (need_of(name) == "equal" or name in ONLY_WARN)


def only_warns(name: str) -> bool:
    """Whether a difference is said and the run starts: where its effect is compared elsewhere, or nobody knows the variable."""
    return name in ONLY_WARN or find_variable(name) is None


def meant(name: str, value: str) -> str | None:
    """The value by its effect: None where it is the default, and spellings that are read alike are one."""
    spelt = value.strip().upper() if name in _ANY_CASE else value.strip()
    return None if spelt == DEFAULTS.get(name) else spelt


def unknown_names(names: Iterable[str]) -> dict[str, str | None]:
    """Names of NCCL, gloo or torch's NCCL that nobody knows, each with the nearest known one."""
    known = [variable.name for variable in VARIABLES]
    return {
        name: nearest(name, known)
        for name in sorted(set(names) - KNOWN_TO_LIBRARIES)
        if _OURS_TO_KNOW.match(name) and find_variable(name) is None
    }
