"""The environment variables that decide how ranks find and understand each other, and when they are suspicious."""

from unisono.causes.variable import Variable
from unisono.causes.variables_libraries import LIBRARY_VARIABLES
from unisono.causes.variables_nccl import NCCL_VARIABLES

_ENV = "env_mismatch"

_LAUNCH = (
    Variable(
        "WORLD_SIZE", "equal", "the number of all ranks of the job; launchers set it for the processes they start",
        "left over from an earlier job in an interactive shell; unisono ignores it on one device and reports this", ("world_mismatch",),
    ),
    Variable(
        "RANK", "unique", "the number of this process among all ranks, from 0 without a gap",
        "set by hand, or left over: two processes with the same rank wait for each other forever", ("node_duplicate",),
    ),
    Variable(
        "LOCAL_RANK", "unique", "the number of this process among those of its node; mostly the index of its device",
        "not smaller than the number of visible devices", ("invalid_device_ordinal", "duplicate_gpu"),
    ),
    Variable(
        "LOCAL_WORLD_SIZE", "equal", "the number of ranks on one node", "differs between nodes although it was not declared",
        ("nproc_mismatch",),
    ),
    Variable(
        "NODE_RANK", "unique", "the number of this node, from 0 without a gap", "the same on two nodes", ("node_duplicate",)
    ),
    Variable("GROUP_RANK", "unique", "torchrun's name for the number of the node", "", ("node_duplicate",)),
    Variable("NNODES", "equal", "the number of nodes of the job", "a range, e.g. 1:2, which may train with fewer nodes than intended",
             ("world_mismatch",)),
    Variable(
        "NPROC_PER_NODE", "equal", "how many ranks a node starts", "more than `nvidia-smi -L` lists, or set on one node alone",
        ("nproc_mismatch", "invalid_device_ordinal"),
    ),
    Variable(
        "MASTER_ADDR", "equal", "the host of rank 0, where all ranks meet; the spelling may differ, the host may not",
        "localhost, 127.0.0.1, or a name that resolves to 127.0.1.1, in a job of several nodes", ("hostname_loopback", "dns_failure"),
    ),
    Variable(
        "MASTER_PORT", "equal", "the TCP port on MASTER_ADDR", "below 1024, in use, or in the range from which the system assigns "
        "ports at random (32768 to 60999 on Linux)", ("port_in_use",),
    ),
    Variable("RDZV_ID", "equal", "torchrun's name of the job; ranks with a different one are rejected", "", ("rdzv_timeout",)),
    Variable("TORCHELASTIC_RUN_ID", "equal", "set by torchrun for its processes; shows that a launcher is running",
             "present in a shell that was not started by a launcher", ("world_mismatch",)),
    Variable("TORCHELASTIC_RESTART_COUNT", "equal", "how often torchrun has restarted the group", "", ("world_mismatch",)),
    Variable("TORCHELASTIC_MAX_RESTARTS", "equal", "how often torchrun may restart the group"),
    Variable("TORCHELASTIC_ERROR_FILE", "free", "where a torchrun process leaves its exception for the agent"),
)  # fmt: skip

_TORCH = (
    Variable(
        "TORCH_DISTRIBUTED_DEBUG", "equal",
        "OFF, INFO or DETAIL; DETAIL checks every collective against those of the other ranks; read when torch is imported",
        "DETAIL on some ranks only: initialization hangs on all. DETAIL in long runs: small collectives take about twice as long",
        (_ENV, "collective_mismatch"),
    ),
    Variable("TORCH_NCCL_BLOCKING_WAIT", "equal", "makes wait() block and raise at the timeout",
             "1 together with asynchronous error handling or CUDA graphs: they contradict each other, and it is slow", (_ENV,)),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "equal", "what happens when a collective fails: 3, the default, ends the process",
             "0: a failed collective hangs forever", ("rank_stalled",)),
    Variable("NCCL_ASYNC_ERROR_HANDLING", "equal", "the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING", "deprecated; use the new name"),
    Variable("NCCL_BLOCKING_WAIT", "equal", "the old name of TORCH_NCCL_BLOCKING_WAIT", "deprecated; use the new name"),
    Variable("TORCH_NCCL_ENABLE_MONITORING", "equal", "the thread that ends a process whose watchdog is stuck",
             "0: the last safety net is gone", ("rank_stalled",)),
    Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "equal", "seconds without a sign of the watchdog after which the process is ended",
             "shorter than the slowest first step, compilation or save of the run: healthy ranks are ended", ("rank_killed",)),
    Variable("TORCH_NCCL_TRACE_BUFFER_SIZE", "free", "how many of the last collectives the flight recorder keeps; 2000 is enough",
             "0 while TORCH_NCCL_DUMP_ON_TIMEOUT is 1: the dump is empty", ("undetermined",)),
    Variable("TORCH_FR_BUFFER_SIZE", "free", "the newer name of TORCH_NCCL_TRACE_BUFFER_SIZE", "", ("undetermined",)),
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "free", "writes the flight recorder's buffer to a file at a timeout",
             "1 with a buffer of size 0: nothing is written", ("undetermined",)),
    Variable("TORCH_NCCL_DESYNC_DEBUG", "equal", "reports at a timeout which ranks were behind", "costs time in every collective",
             (_ENV,)),
    Variable("TORCH_NCCL_HIGH_PRIORITY", "equal", "runs collectives on a stream of high priority", "", (_ENV,)),
    Variable("TORCH_NCCL_NAN_CHECK", "equal", "checks the input of every collective for NaN", "slow: for debugging", ("nan_loss",)),
    Variable("TORCH_NCCL_PROPAGATE_ERROR", "equal", "informs the other ranks when one fails", "", (_ENV,)),
    Variable("TORCH_NCCL_BCAST_UNIQUEID", "equal", "how ranks learn NCCL's id", "", (_ENV,)),
    Variable("TORCH_NCCL_RANKS_PER_ROOT", "equal", "how many ranks one NCCL root serves while starting", "", (_ENV,)),
    Variable("TORCH_DIST_INIT_BARRIER", "equal", "a barrier at the end of initialization", "", (_ENV,)),
    Variable("TORCH_GLOO_LAZY_INIT", "equal", "gloo connects pairs when they are first used", "", (_ENV,)),
    Variable("TORCH_CPP_LOG_LEVEL", "free", "how much torch's native code logs: ERROR, WARNING, INFO"),
    Variable("TORCH_SHOW_CPP_STACKTRACES", "free", "adds native stacks to exceptions"),
    Variable("GLOO_SOCKET_IFNAME", "per-node", "the network interface that gloo uses: a comma list of exact names",
             "^lo or =eth0: this is NCCL's syntax, and gloo fails with `Unable to find address for`; a name that this node lacks",
             ("address_unreachable", "hostname_loopback")),
    Variable("TP_SOCKET_IFNAME", "per-node", "the network interface of torch's TensorPipe (RPC)", "a name that this node lacks",
             ("address_unreachable",)),
    Variable("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "equal", "a different library of collectives instead of torch's own", "", (_ENV,)),
    Variable("GLOO_ENABLE_STORE_V2_API", "equal", "how gloo communicates with the store", "", (_ENV,)),
    Variable("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "equal", "how gloo numbers the members of a group", "", (_ENV,)),
    Variable("TORCH_NCCL_USE_COMM_NONBLOCKING", "equal", "NCCL's calls return before they are complete", "1 with torch 2.7.0: hangs at random", (_ENV,)),
    Variable("GLOO_DEVICE_TRANSPORT", "equal", "gloo's transport: TCP or TCP_TLS", "", (_ENV,)),
)  # fmt: skip

_DEVICES = (
    Variable(
        "CUDA_VISIBLE_DEVICES", "per-node",
        "which devices a process sees, by index or UUID, and in which order; inside they are numbered from 0",
        "set on some nodes only; empty or -1 (no device); an index that does not exist; an index twice; set in Python after CUDA was used",
        ("nproc_mismatch", "invalid_device_ordinal", "duplicate_gpu"),
    ),
    Variable("HIP_VISIBLE_DEVICES", "per-node", "the same for AMD devices", "set on some nodes only", ("nproc_mismatch",)),
    Variable("ASCEND_RT_VISIBLE_DEVICES", "per-node", "the same for Ascend devices", "set on some nodes only", ("nproc_mismatch",)),
    Variable("CUDA_DEVICE_ORDER", "equal", "PCI_BUS_ID numbers devices as nvidia-smi does; the default puts the fastest first",
             "unset where devices of several kinds are in one machine", ("device_mismatch",)),
    Variable("CUDA_LAUNCH_BLOCKING", "equal", "waits after every kernel, so that an error shows the right line", "1 in a long run: slow"),
    Variable("PYTORCH_ALLOC_CONF", "per-node", "settings of torch's memory allocator, e.g. expandable_segments:True",
             "expandable segments together with memory that is shared between processes", ("cuda_oom",)),
    Variable("PYTORCH_CUDA_ALLOC_CONF", "per-node", "the older name of PYTORCH_ALLOC_CONF", "set together with the new name, with a different value",
             ("cuda_oom",)),
    Variable("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "equal", "Ray does not change CUDA_VISIBLE_DEVICES",
             "set on some nodes only: LOCAL_RANK means a different device there", ("duplicate_gpu", "invalid_device_ordinal")),
    Variable("CUBLAS_WORKSPACE_CONFIG", "equal", "with :4096:8 cuBLAS gives the same bits every time", "unset although runs should be bit-exact",
             (_ENV,)),
    Variable("NVIDIA_TF32_OVERRIDE", "equal", "0 forbids TF32 arithmetic everywhere", "differs: ranks compute with different precision",
             ("replicas_diverged",)),
    Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "equal", "1 lets torch use TF32 in matrix products", "differs between ranks",
             ("replicas_diverged",)),
    Variable(
        "OMP_NUM_THREADS", "per-node", "number of CPU threads of a process; unisono uses the declared value",
        "ranks × threads is more than the cores; torchrun sets 1 if it is unset", ("straggler",),
    ),
    Variable("MKL_NUM_THREADS", "per-node", "the same for Intel's library alone", "differs from OMP_NUM_THREADS", ("straggler",)),
)  # fmt: skip

_FILES = (
    Variable("PYTHONHASHSEED", "equal", "fixes the order of sets and of hashes of strings",
             "unset although the order of a set affects the data", ("split_mismatch",)),
    Variable("PYTHONFAULTHANDLER", "free", "1: Python prints all stacks when native code crashes"),
    Variable("TOKENIZERS_PARALLELISM", "free", "whether fast tokenizers use threads; false silences their warning after a fork"),
    Variable("HF_HOME", "per-node", "where models and datasets from the hub are cached", "a network disk that ranks share, or a small one",
             ("dataset_cache_race", "disk_full")),
    Variable("HF_HUB_OFFLINE", "equal", "1: nothing is downloaded; only the cache is used", "1 on a node whose cache lacks the model",
             ("hub_unreachable",)),
    Variable("HF_DATASETS_OFFLINE", "equal", "the same for datasets alone", "", ("hub_unreachable",)),
    Variable("HF_ENDPOINT", "equal", "a different address of the hub: a mirror", "differs: a mirror may have a different revision",
             ("weights_mismatch",)),
    Variable("HF_TOKEN", "per-node", "the token for private and gated models; keep it out of configs", "missing on one node", ("gated_model",)),
    Variable("HTTPS_PROXY", "per-node", "a proxy for https", "set without NO_PROXY for the job's own nodes: Ray and gRPC connect to the proxy",
             ("hub_unreachable", "address_unreachable")),
    Variable("NO_PROXY", "per-node", "hosts that are reached directly", "lacks the job's own nodes", ("address_unreachable",)),
    Variable("TMPDIR", "per-node", "where temporary files go", "a small or shared disk", ("disk_full",)),
    Variable("TRITON_CACHE_DIR", "per-node", "where Triton keeps compiled kernels", "a network disk that ranks share", ("dataset_cache_race",)),
    Variable("TORCHINDUCTOR_CACHE_DIR", "per-node", "where torch.compile keeps its results", "a network disk that ranks share",
             ("dataset_cache_race",)),
    Variable("LD_LIBRARY_PATH", "per-node", "where native libraries are searched first", "contains an NCCL or CUDA different from torch's own",
             ("version_mismatch",)),
    Variable("LD_PRELOAD", "per-node", "libraries that are loaded before all others", "a different NCCL, or a memory allocator on one node only",
             ("version_mismatch",)),
    Variable("WANDB_MODE", "free", "whether Weights & Biases sends, keeps or drops its records"),
    Variable("XDG_CACHE_HOME", "per-node", "unisono keeps its token cache in unisono/ below it (else ~/.cache)",
             "a network disk: mapping the cache is slower", ("io_blocked",)),
    Variable("XDG_CONFIG_HOME", "per-node", "unisono keeps the key that signs checkpoints in unisono/ below it (else ~/.config)",
             "a different value when resuming: your own checkpoints look foreign"),
    Variable("NO_COLOR", "free", "set to anything: no colour in terminals"),
)  # fmt: skip

VARIABLES: tuple[Variable, ...] = (*_LAUNCH, *_DEVICES, *_TORCH, *NCCL_VARIABLES, *_FILES, *LIBRARY_VARIABLES)
"""In the order in which `explain` lists them."""

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def find_variable(name: str) -> Variable | None:
    """The entry of this environment variable, or None; lower case is understood."""
    return _BY_NAME.get(name.upper())
