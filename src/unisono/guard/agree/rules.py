"""The table of agreement: what must be equal, what must be unique, what may differ but must be
valid, what is free.

Nodes are judged in the order of `NODE_RULES`, ranks in that of `RANK_RULES`: cheap and decisive
first, so that the first verdict is the cause and those after it may be its consequences.
"""

from dataclasses import dataclass
from typing import Literal

Need = Literal["equal", "unique", "valid", "free"]

NEED_MEANING: dict[Need, str] = {
    "equal": "must be equal everywhere",
    "unique": "must be unique",
    "valid": "may differ, and must be valid on each node",
    "free": "may differ freely",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One property of nodes or ranks that is checked, and what it must satisfy.

    Attributes:
        subject: what is checked, for people.
        need: equal, unique, valid or free.
        violated: what a violation does: `fail` prevents the start, `warn` is only reported.
        remedy: how to fix it; `{who}` is the node or rank that differs, `{key}` what differs,
            `{value}` the majority's value, `{choices}` the values to choose from where there is no
            majority.
        absent: how to fix it where the majority does not have it.
    """

    id: str
    subject: str
    need: Need
    violated: Literal["fail", "warn"]
    cause: str
    remedy: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


_COPY = "copy the correct file to {who}; compare with `sha256sum FILE` on each node"
_DELETE = "remove it on {who}, or copy it to all"

# fmt: off
NODE_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("identity", "node ranks", "unique", "fail", "node_duplicate",
             ("give each node its own --node-rank (or NODE_RANK): 0, 1, 2 …",)),
        Rule("nodes", "number of nodes", "equal", "fail", "world_mismatch",
             ("pass --nodes {value} on every node",
              "pass the same --nodes on every node; without the option, NNODES is used")),
        Rule("nproc", "ranks of each node", "equal", "fail", "nproc_mismatch"),
        Rule("device.kind", "device type", "equal", "fail", "device_mismatch",
             ("on {who}: `nvidia-smi -L`, and `echo $CUDA_VISIBLE_DEVICES`; or set `device: cpu` in the "
              "config of all nodes",)),
        Rule("device.choice", "selected devices", "valid", "fail", "invalid_device_ordinal",
             ("on {who}: select visible devices, e.g. `--devices 0,1` (`nvidia-smi -L` lists them); or "
              "lower --nproc",)),
        Rule("device.unique", "devices of ranks", "unique", "fail", "duplicate_gpu",
             ("give every rank its own device with --devices",)),
        Rule("device.alike", "model and memory of the devices", "equal", "warn", "device_mismatch",
             ("select devices of the same model with --devices on each node; the slowest sets the speed, "
              "the smallest the batch size",)),
        Rule("device.free", "free memory of the devices", "valid", "warn", "stale_process",
             ("on {who}: `nvidia-smi` lists the processes that hold the memory; kill them by pid",)),
        Rule("env", "environment variables", "equal", "fail", "env_mismatch",
             ("on {who}: `export {key}={value}`", "set the same value on every node: {choices}",
              "set the same value on every node, or unset it everywhere; see `unisono explain {key}`"),
             absent=("on {who}: `unset {key}`",
                     "or set it to the same value on every node; see `unisono explain {key}`")),
        Rule("versions", "versions", "equal", "fail", "version_mismatch",
             ("on {who}: `pip install {key}=={value}`",
              "or use one container image, or one constraints file, on all nodes"),
             absent=("on {who}: `pip uninstall {key}`, or install it everywhere",
                     "or use one container image on all nodes")),
        Rule("code", "source files", "equal", "fail", "code_mismatch",
             ("on {who}: install the same wheel, or check out the same commit, as on the other nodes",)),
        Rule("sources", "sources of rows", "equal", "fail", "data_mismatch",
             ("on {who}: set `{key}` to {value}; in a LLaMA-Factory setup it comes from dataset_info.json: "
              "copy one to all nodes",
              "set the same value on every node: {choices}",
              "or copy one config, and one dataset_info.json where it is used, to all nodes")),
        Rule("config", "config", "equal", "fail", "config_mismatch",
             ("on {who}: pass `{key}={value}` in the command, or fix the config",
              "pass the same value on every node: {choices}",
              "or copy one config to all nodes, and pass the same key=value overrides on each")),
        Rule("files.data", "data files", "equal", "fail", "data_mismatch",
             (_COPY, "or keep the data on shared storage"),
             (_DELETE,)),
        Rule("files.tokenizer", "tokenizer files", "equal", "fail", "tokenizer_files_mismatch",
             (_COPY, "or pin model.revision, and delete the cached copy of the node that differs"), (_DELETE,)),
        Rule("files.model", "model files", "equal", "fail", "weights_mismatch",
             (_COPY, "or pin model.revision, and delete the cached copy of the node that differs"), (_DELETE,)),
        Rule("names", "host names", "valid", "fail", "hostname_loopback",
             ("pass --head an address that the other nodes can reach; `ip -br addr` on the head lists them",
              "or fix /etc/hosts on {who}: `getent hosts $(hostname)` must return a non-loopback address")),
        Rule("address", "addresses", "valid", "fail", "address_unreachable"),
        Rule("interfaces", "network interfaces set by variables", "valid", "fail", "address_unreachable"),
        Rule("mtu", "MTU of the interfaces", "equal", "warn", "mtu_blackhole",
             ("on {who}: `ip link set dev IFACE mtu {value}`, if the switches support it",)),
        Rule("storage.write", "output_dir is writable", "valid", "fail", "storage_unfit",
             ("on {who}: choose a different output_dir, or fix its owner and mode: `ls -ld OUTPUT_DIR`; "
              "`df -h OUTPUT_DIR`",)),
        Rule("storage.shared", "output_dir is shared", "equal", "warn", "storage_not_shared",
             ("mount the same storage at output_dir on all nodes, if it should be shared",)),
        Rule("limits", "system limits", "valid", "fail", "ulimit",
             ("on {who}: `ulimit -n 65536` before the start, or LimitNOFILE=65536 in the systemd unit",)),
        Rule("shm", "shared memory", "valid", "fail", "shm_too_small",
             ("on {who}: `docker run --shm-size=8g …` or `--ipc=host`; else `mount -o remount,size=8g /dev/shm`",)),
        Rule("cores", "cores", "valid", "warn", "straggler",
             ("on {who}: lower --nproc, or set OMP_NUM_THREADS to cores / ranks",)),
        Rule("memory", "host memory", "valid", "warn", "host_oom_killed",
             ("on {who}: stop other programs, or raise the container's memory limit",)),
        Rule("packages", "other packages", "equal", "warn", "version_mismatch",
             ("on {who}: `pip install {key}=={value}`", "or use one container image on all nodes"),
             absent=("on {who}: `pip uninstall {key}`, or install it everywhere",)),
        Rule("known_bad", "versions with known bugs", "valid", "warn", "version_known_bad"),
        Rule("settings", "suspicious settings", "valid", "warn", "env_suspicious"),
        Rule("clock", "clocks", "equal", "warn", "clock_skew",
             ("on {who}: `timedatectl set-ntp true`, then `chronyc tracking`; unisono itself does not "
              "compare clocks",)),
    )
}
# fmt: on
"""Checks of the nodes, in order."""

NETWORK_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("network.dial", "connections between nodes", "valid", "fail", "address_unreachable"),
        Rule("network.size", "large messages between nodes", "valid", "fail", "mtu_blackhole"),
    )
}

PREPARED_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "prepared.model",
            "model as loaded",
            "equal",
            "fail",
            "weights_mismatch",
            ("on {who}: copy the model directory from a correct node, or pin model.revision",),
        ),
        Rule(
            "prepared.tokens",
            "tokens of the rows",
            "equal",
            "fail",
            "tokenizer_files_mismatch",
            ("on {who}: use the same tokenizer files, chat template and data.format as on the other nodes",),
        ),
        Rule(
            "prepared.rows",
            "rows as the model sees them",
            "equal",
            "fail",
            "data_mismatch",
            ("on {who}: compare data, tokenizer and code with a correct node; then prepare again",),
        ),
    )
}

# fmt: off
RANK_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("ranks.complete", "rank numbers", "unique", "fail", "world_mismatch",
             ("restart all nodes; if it happens again, report a bug with agreement.json",)),
        Rule("ranks.world", "world size", "equal", "fail", "world_mismatch",
             ("unset WORLD_SIZE and RANK in the environment of {who}, and restart all nodes",)),
        Rule("ranks.place", "local rank of each rank", "unique", "fail", "plan_mismatch",
             ("restart all nodes; if it happens again, report a bug with agreement.json",)),
        Rule("ranks.device", "device of each rank", "unique", "fail", "duplicate_gpu",
             ("give every rank its own device with --devices; call torch.cuda.set_device(local_rank) before "
              "anything else",)),
        Rule("ranks.device_kind", "device type", "equal", "fail", "device_mismatch",
             ("on {who}: `nvidia-smi -L`; or set `device: cpu` in the config of all nodes",)),
        Rule("ranks.torch", "torch version", "equal", "fail", "version_mismatch",
             ("on {who}: `pip install torch=={value}`",)),
        Rule("ranks.plan", "settings of the plan", "equal", "fail", "plan_mismatch",
             ("set the value in the config instead of `auto`, on every node",)),
        Rule("ranks.resume", "resume step", "equal", "fail", "resume_mismatch",
             ("put output_dir on shared storage, or copy the latest checkpoint; `unisono checkpoint ls OUTPUT_DIR`",)),
        Rule("ranks.tokenizer", "tokenizer", "equal", "fail", "tokenizer_files_mismatch",
             ("on {who}: copy tokenizer.json and the chat template from a correct node",)),
        Rule("ranks.split", "rows, their order, and steps", "equal", "fail", "split_mismatch",
             ("give every split and shuffle the same fixed seed: train_test_split(…, seed=42)",
              "or split once, write the rows to files, and set data.train to them")),
        Rule("ranks.trained", "names and shapes of trained parameters", "equal", "fail", "weights_mismatch",
             ("use the same model directory and adapter.targets on {who}",)),
        Rule("ranks.frozen", "frozen weights", "equal", "fail", "weights_mismatch",
             ("on {who}: copy the weights from a correct node; compare with `sha256sum *.safetensors`",)),
        Rule("ranks.initial", "initial values of trained parameters", "equal", "fail", "weights_mismatch",
             ("set the seed before creating new layers, or start all ranks from the same adapter",)),
        Rule("ranks.threads", "threads of each rank", "equal", "warn", "plan_mismatch",
             ("set the same OMP_NUM_THREADS on all nodes, if results must be bit-exact",)),
    )
}
# fmt: on
"""Checks of the ranks, in order."""
