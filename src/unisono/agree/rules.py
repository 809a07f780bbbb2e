"""The table of agreement: what must be equal, what must be unique, what may differ but must be valid, what is free.

Nodes are judged in the order of `NODE_RULES`, ranks in that of `RANK_RULES`: cheap and decisive first, so that the first
verdict is the cause and those after it may be its consequences.
"""

from dataclasses import dataclass
from typing import Literal

Need = Literal["equal", "unique", "valid", "free"]

NEED_MEANING: dict[Need, str] = {
    "equal": "must be equal everywhere",
    "unique": "must be unique",
    "valid": "may differ, and must be right on each node",
    "free": "may differ freely",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that nodes or ranks bring to the table, and what is asked of it.

    Attributes:
        id: of the check in agreement.json.
        subject: what is looked at, for people.
        need: equal, unique, valid or free.
        violated: what comes of it where it does not hold; `warn` is said and the run starts.
        cause: id of the catalogue.
        remedy: what to do; `{who}` is the odd one, `{key}` what differs, `{value}` what most have,
            `{choices}` what one may decide for where there is no majority.
        absent: what to do where most have none of it.
    """

    id: str
    subject: str
    need: Need
    violated: Literal["fail", "warn"]
    cause: str
    remedy: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


_COPY = "copy the right file to {who}; `sha256sum FILE` on each node compares"
_DELETE = "remove it on {who}, or copy it to all"

# fmt: off
NODE_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("identity", "numbers of the nodes", "unique", "fail", "node_duplicate",
             ("give each node its own --node-rank (or NODE_RANK): 0, 1, 2 …",)),
        Rule("nodes", "number of nodes", "equal", "fail", "world_mismatch",
             ("pass --nodes {value} on every node", "pass the same --nodes on every node; NNODES counts where the flag is absent")),
        Rule("nproc", "ranks of each node", "equal", "fail", "nproc_mismatch"),
        Rule("device.kind", "kind of device", "equal", "fail", "device_mismatch",
             ("on {who}: `nvidia-smi -L`, and `echo $CUDA_VISIBLE_DEVICES`; or write `device: cpu` into the config of all",)),
        Rule("device.choice", "chosen devices", "valid", "fail", "invalid_device_ordinal",
             ("on {who}: choose devices that are visible: `nvidia-smi -L`, `--devices 0,1`; or lower --nproc",)),
        Rule("device.unique", "devices of ranks", "unique", "fail", "duplicate_gpu",
             ("give every rank a device of its own with --devices",)),
        Rule("device.alike", "type and memory of the devices", "equal", "warn", "device_mismatch",
             ("choose devices of one kind with --devices on each node; the slowest sets the pace, the smallest the batch",)),
        Rule("device.free", "free memory of the devices", "valid", "warn", "stale_process",
             ("on {who}: `nvidia-smi` shows who holds the memory; end it by its pid",)),
        Rule("env", "environment variables", "equal", "fail", "env_mismatch",
             ("on {who}: `export {key}={value}`", "on every node the same: {choices}", "the same value, or none, on every node; `unisono explain {key}` says what it does"),
             absent=("on {who}: `unset {key}`", "or set it to the same value on every node; `unisono explain {key}` says what it does")),
        Rule("versions", "versions", "equal", "fail", "version_mismatch",
             ("on {who}: `pip install {key}=={value}`", "or use one container image, or one constraints file, on all nodes"),
             absent=("on {who}: `pip uninstall {key}`, or install it everywhere", "or use one container image on all nodes")),
        Rule("code", "source files", "equal", "fail", "code_mismatch",
             ("on {who}: install the same wheel, or check out the same commit, as on the others",)),
        Rule("config", "config", "equal", "fail", "config_mismatch",
             ("on {who}: give `{key}={value}` in the command, or mend the config", "on every node give the same: {choices}",
              "or copy one config to all nodes, and give the same key=value overrides on each")),
        Rule("files.data", "data files", "equal", "fail", "data_mismatch", (_COPY, "or keep the data on storage that all nodes share"),
             (_DELETE,)),
        Rule("files.tokenizer", "tokenizer files", "equal", "fail", "tokenizer_files_mismatch",
             (_COPY, "or pin model.revision, and delete the odd node's cached copy"), (_DELETE,)),
        Rule("files.model", "model files", "equal", "fail", "weights_mismatch",
             (_COPY, "or pin model.revision, and delete the odd node's cached copy"), (_DELETE,)),
        Rule("names", "host names", "valid", "fail", "hostname_loopback",
             ("give --head an address that the other nodes reach, as `ip -br addr` lists it on the head",
              "or mend /etc/hosts on {who}: `getent hosts $(hostname)` must give a real address")),
        Rule("address", "addresses", "valid", "fail", "address_unreachable"),
        Rule("interfaces", "network interfaces that variables name", "valid", "fail", "address_unreachable"),
        Rule("mtu", "MTU of the interfaces", "equal", "warn", "mtu_blackhole",
             ("on {who}: `ip link set dev IFACE mtu {value}`, if the switches between carry it",)),
        Rule("storage.write", "output_dir can be written", "valid", "fail", "storage_unfit",
             ("on {who}: choose another output_dir, or mend its owner and mode: `ls -ld OUTPUT_DIR`; `df -h OUTPUT_DIR`",)),
        Rule("storage.shared", "output_dir is shared", "equal", "warn", "storage_not_shared",
             ("mount the same storage at output_dir on all nodes, if it is meant to be shared",)),
        Rule("limits", "limits of the system", "valid", "fail", "ulimit",
             ("on {who}: `ulimit -n 65536` before the start, or LimitNOFILE=65536 in the service",)),
        Rule("shm", "shared memory", "valid", "fail", "shm_too_small",
             ("on {who}: `docker run --shm-size=8g …` or `--ipc=host`; else `mount -o remount,size=8g /dev/shm`",)),
        Rule("cores", "cores", "valid", "warn", "straggler",
             ("on {who}: lower --nproc, or set OMP_NUM_THREADS to cores / ranks",)),
        Rule("memory", "memory of the machine", "valid", "warn", "host_oom_killed",
             ("on {who}: end other programs, or raise the container's limit",)),
        Rule("packages", "other packages", "equal", "warn", "version_mismatch",
             ("on {who}: `pip install {key}=={value}`", "or use one container image on all nodes"),
             absent=("on {who}: `pip uninstall {key}`, or install it everywhere",)),
        Rule("known_bad", "versions with known faults", "valid", "warn", "version_known_bad"),
        Rule("settings", "suspicious settings", "valid", "warn", "env_suspicious"),
        Rule("clock", "clocks", "equal", "warn", "clock_skew",
             ("on {who}: `timedatectl set-ntp true`, then `chronyc tracking`; unisono itself compares no clocks",)),
    )
}
# fmt: on
"""What nodes bring, in the order of judgement."""

NETWORK_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("network.dial", "ways between nodes", "valid", "fail", "address_unreachable"),
        Rule("network.size", "large messages between nodes", "valid", "fail", "mtu_blackhole"),
    )
}

PREPARED_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "prepared.model",
            "model as it was read",
            "equal",
            "fail",
            "weights_mismatch",
            ("on {who}: copy the model directory from a node that is right, or pin model.revision",),
        ),
        Rule(
            "prepared.tokens",
            "tokens of the rows",
            "equal",
            "fail",
            "tokenizer_files_mismatch",
            ("on {who}: use the same tokenizer files, chat template and data.format as on the others",),
        ),
        Rule(
            "prepared.rows",
            "rows as the model sees them",
            "equal",
            "fail",
            "data_mismatch",
            ("on {who}: compare data, tokenizer and code with a node that is right; then prepare again",),
        ),
    )
}

# fmt: off
RANK_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("ranks.complete", "numbers of the ranks", "unique", "fail", "world_mismatch",
             ("start all nodes anew; if it happens again, report it with agreement.json",)),
        Rule("ranks.world", "size of the world", "equal", "fail", "world_mismatch",
             ("unset WORLD_SIZE and RANK in the environment of {who}, and start all nodes anew",)),
        Rule("ranks.place", "place of each rank", "unique", "fail", "plan_mismatch",
             ("start all nodes anew; if it happens again, report it with agreement.json",)),
        Rule("ranks.device", "device of each rank", "unique", "fail", "duplicate_gpu",
             ("give every rank a device of its own with --devices; torch.cuda.set_device(local_rank) comes before anything else",)),
        Rule("ranks.device_kind", "kind of device", "equal", "fail", "device_mismatch",
             ("on {who}: `nvidia-smi -L`; or write `device: cpu` into the config of all",)),
        Rule("ranks.torch", "version of torch", "equal", "fail", "version_mismatch", ("on {who}: `pip install torch=={value}`",)),
        Rule("ranks.plan", "what the plan decides", "equal", "fail", "plan_mismatch",
             ("write the value down in the config instead of `auto`, on every node",)),
        Rule("ranks.resume", "step that is resumed from", "equal", "fail", "resume_mismatch",
             ("put output_dir on storage that all nodes share, or copy the newest checkpoint; `unisono checkpoint ls OUTPUT_DIR`",)),
        Rule("ranks.tokenizer", "tokenizer", "equal", "fail", "tokenizer_files_mismatch",
             ("on {who}: copy tokenizer.json and the chat template from a node that is right",)),
        Rule("ranks.split", "rows, their order, and steps", "equal", "fail", "split_mismatch",
             ("give every split and shuffle the same fixed seed: train_test_split(…, seed=42)",
              "or split once, write the rows to files, and name these in data.train")),
        Rule("ranks.trained", "names and shapes of what is trained", "equal", "fail", "weights_mismatch",
             ("use the same model directory and adapter.targets on {who}",)),
        Rule("ranks.frozen", "frozen weights", "equal", "fail", "weights_mismatch",
             ("on {who}: copy the weights from a node that is right; compare with `sha256sum *.safetensors`",)),
        Rule("ranks.initial", "initial values of what is trained", "equal", "fail", "weights_mismatch",
             ("seed before new layers are made, or start all ranks from the same adapter",)),
        Rule("ranks.threads", "threads of each rank", "equal", "warn", "plan_mismatch",
             ("set the same OMP_NUM_THREADS on all nodes, if the numbers shall be equal to the last bit",)),
    )
}
# fmt: on
"""What ranks bring, in the order of judgement."""
