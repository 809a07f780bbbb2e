"""The environment variables that affect how ranks find each other and communicate: when they are
suspicious, which values they take, what they cost.
"""

from dataclasses import dataclass
from typing import Literal

Group = Literal["equal", "unique", "per-node", "free"]

GROUP_MEANING: dict[Group, str] = {
    "equal": "must be equal on all ranks",
    "unique": "differs by design; the launcher sets it",
    "per-node": "may differ between nodes, and must be valid on each node",
    "free": "may differ freely",
}


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable, with what to know before setting it.

    Attributes:
        name: as in the environment.
        group: whether ranks must agree on it.
        meaning: what it does.
        suspicious: values or situations to check; empty if there are none.
        causes: ids of the causes that a wrong value can lead to.
    """

    name: str
    group: Group
    meaning: str
    suspicious: str = ""
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """The cost of setting a variable, and when to set it.

    Attributes:
        costs: the cost while it is set.
        right: when to set it, and how long to leave it set.
    """

    costs: str
    right: str


@dataclass(frozen=True, slots=True)
class ValidValues:
    """The valid values of a variable.

    Attributes:
        text: for people: `0 or 1`.
        pattern: matches a complete value, case-insensitive.
        otherwise: the effect of a different value.
        fatal: whether a different value prevents the creation of an NCCL process group.
    """

    text: str
    pattern: str
    otherwise: str = "it is silently ignored"
    fatal: bool = False


_MISMATCH = ("env_mismatch",)

# fmt: off
_WIRE = (
    Variable("NCCL_ALGO", "equal", "allowed algorithms: Ring, Tree, …", "without Ring since NCCL 2.24: there is no fallback", _MISMATCH),
    Variable("NCCL_PROTO", "equal", "allowed protocols: LL, LL128, Simple", "LL128 forced on hardware that does not support it safely", _MISMATCH),
    Variable("NCCL_NTHREADS", "equal", "number of threads per CUDA block of NCCL", "deprecated: do not set it", _MISMATCH),
    Variable("NCCL_BUFFSIZE", "equal", "size of the buffer between two devices, in bytes", "", _MISMATCH),
    Variable("NCCL_MIN_NCHANNELS", "equal", "minimum number of channels", "superseded by NCCL_MIN_CTAS", _MISMATCH),
    Variable("NCCL_MAX_NCHANNELS", "equal", "maximum number of channels", "superseded by NCCL_MAX_CTAS", _MISMATCH),
    Variable("NCCL_MIN_CTAS", "equal", "minimum number of blocks that NCCL uses", "", _MISMATCH),
    Variable("NCCL_MAX_CTAS", "equal", "maximum number of blocks that NCCL uses", "", _MISMATCH),
    Variable("NCCL_CTA_POLICY", "equal", "whether NCCL prefers speed or few blocks", "", _MISMATCH),
    Variable("NCCL_CGA_CLUSTER_SIZE", "equal", "size of block clusters on newer devices", "", _MISMATCH),
    Variable("NCCL_CROSS_NIC", "equal", "whether a ring may use different network cards for the return path", "", _MISMATCH),
    Variable("NCCL_NVLS_ENABLE", "equal", "reductions inside NVLink switches", "0 left over from debugging: slower", _MISMATCH),
    Variable("NCCL_COLLNET_ENABLE", "equal", "reductions inside the network (SHARP)", "", _MISMATCH),
    Variable("NCCL_COLLNET_NODE_THRESHOLD", "equal", "minimum number of nodes for which CollNet is used", "", _MISMATCH),
    Variable("NCCL_LL_THRESHOLD", "equal", "maximum message size for protocol LL", "deprecated: do not set it", _MISMATCH),
    Variable("NCCL_TREE_THRESHOLD", "equal", "maximum message size for trees", "deprecated: do not set it", _MISMATCH),
    Variable("NCCL_SINGLE_RING_THRESHOLD", "equal", "maximum message size for a single ring", "deprecated: do not set it", _MISMATCH),
    Variable("NCCL_P2P_LL_THRESHOLD", "equal", "maximum message size for which sends use protocol LL", "", _MISMATCH),
    Variable("NCCL_ALLOC_P2P_NET_LL_BUFFERS", "equal", "buffers of protocol LL for sends between nodes", "", _MISMATCH),
    Variable("NCCL_MULTI_RANK_GPU_ENABLE", "equal", "lets several ranks share one device", "1 without intent: duplicate devices go unnoticed", ("duplicate_gpu",)),
    Variable("NCCL_P2P_NET_CHUNKSIZE", "equal", "piece size of sends between nodes", "", _MISMATCH),
    Variable("NCCL_PXN_DISABLE", "equal", "1: no path through the network card of a different device", "", _MISMATCH),
    Variable("NCCL_P2P_PXN_LEVEL", "equal", "when sends use a different device's network card", "", _MISMATCH),
    Variable("NCCL_RUNTIME_CONNECT", "equal", "connections are opened when they are first used", "", _MISMATCH),
    Variable("NCCL_TUNER_PLUGIN", "equal", "a plugin library that chooses algorithms", "present on some nodes only", _MISMATCH),
    Variable("NCCL_LAUNCH_MODE", "equal", "how kernels of several devices in one process are started", "deprecated: do not set it", _MISMATCH),
)

_TRANSPORT = (
    Variable("NCCL_NET", "equal", "the network backend: Socket, IB, or a plugin's name", "Socket where InfiniBand works: slow", _MISMATCH),
    Variable("NCCL_NET_PLUGIN", "equal", "which network plugin is loaded", "present on some nodes only", _MISMATCH),
    Variable("NCCL_IB_DISABLE", "equal", "1: no InfiniBand or RoCE, only sockets", "1 on machines whose ports are active: a forgotten workaround that costs speed",
             ("env_mismatch", "ib_unreachable")),
    Variable("NCCL_SOCKET_FAMILY", "equal", "AF_INET or AF_INET6: forces one of them", "", _MISMATCH),
    Variable("NCCL_SOCKET_MAGIC", "equal", "a number by which sockets of one job identify each other", "", _MISMATCH),
    Variable("NCCL_SOCKET_NTHREADS", "equal", "helper threads of a socket connection", "", _MISMATCH),
    Variable("NCCL_NSOCKS_PERTHREAD", "equal", "sockets of each helper thread", "", _MISMATCH),
    Variable("NCCL_IB_QPS_PER_CONNECTION", "equal", "queue pairs of a connection", "", _MISMATCH),
    Variable("NCCL_IB_SPLIT_DATA_ON_QPS", "equal", "how data is distributed over queue pairs", "", _MISMATCH),
    Variable("NCCL_IB_ROCE_VERSION_NUM", "equal", "the version of RoCE", "", _MISMATCH),
    Variable("NCCL_IB_ADDR_FAMILY", "equal", "the address family of the GID", "", _MISMATCH),
    Variable("NCCL_IB_SL", "equal", "InfiniBand service level", "", _MISMATCH),
    Variable("NCCL_IB_TC", "equal", "InfiniBand traffic class", "", _MISMATCH),
    Variable("NCCL_IB_CUDA_SUPPORT", "equal", "the older name of NCCL_NET_GDR_LEVEL", "deprecated: do not set it", ("ib_unreachable",)),
    Variable("NCCL_NET_SHARED_BUFFERS", "equal", "connections share their network buffers", "", _MISMATCH),
    Variable("NCCL_NET_SHARED_COMMS", "equal", "connections are shared if possible", "", _MISMATCH),
    Variable("NCCL_OOB_NET_ENABLE", "equal", "NCCL's own setup uses its network plugin", "", _MISMATCH),
    Variable("NCCL_IGNORE_NET_MISMATCH", "equal", "continues if nodes have different network plugins", "1: hides a difference that may hang", _MISMATCH),
    Variable("NCCL_IGNORE_COLLNET_MISMATCH", "equal", "continues if only some nodes have CollNet", "1: hides a difference that may hang", _MISMATCH),
    Variable("NCCL_IPC_USE_ABSTRACT_SOCKET", "equal", "the kind of sockets that processes of one machine use", "", _MISMATCH),
    Variable("NCCL_CUMEM_ENABLE", "equal", "device memory is allocated through CUDA's virtual memory management", "", _MISMATCH),
    Variable("NCCL_CUMEM_HOST_ENABLE", "equal", "the same for host memory", "NCCL 2.24 to 2.26.4 in a container without SYS_NICE: set it to 0", _MISMATCH),
    Variable("NCCL_MNNVL_ENABLE", "equal", "NVLink across nodes", "", _MISMATCH),
    Variable("NCCL_P2P_DISABLE", "equal", "1: devices of a machine do not read each other's memory", "1 on machines with NVLink: a forgotten workaround that costs most of the speed",
             ("p2p_blocked",)),
    Variable("NCCL_P2P_LEVEL", "equal", "maximum distance between devices that use peer access", "", ("p2p_blocked",)),
    Variable("NCCL_SHM_DISABLE", "equal", "1: no shared memory between processes", "1: a forgotten workaround; traffic inside a machine goes through the network",
             ("shm_too_small",)),
    Variable("NCCL_RAS_ENABLE", "equal", "NCCL's reliability, availability and serviceability (RAS) service", "", _MISMATCH),
    Variable("NCCL_IGNORE_CPU_AFFINITY", "per-node", "1: NCCL places its threads without regard to the process's cores"),
)

_NODE = (
    Variable("NCCL_SOCKET_IFNAME", "per-node", "the network interface; prefixes count, ^ excludes, = means exactly",
             "lo or docker0 in a job of several nodes; a name copied from a different machine; a network different from that of GLOO_SOCKET_IFNAME",
             ("nccl_socket_iface",)),
    Variable("NCCL_OOB_NET_IFNAME", "per-node", "the interface for NCCL's own setup", "a name that this node lacks", ("nccl_socket_iface",)),
    Variable("NCCL_IB_HCA", "per-node", "which InfiniBand adapters and ports are used", "an adapter whose port is down", ("ib_unreachable",)),
    Variable("NCCL_IB_GID_INDEX", "per-node", "which GID a RoCE port uses; often different from node to node", "an index without a RoCE v2 address",
             ("ib_unreachable",)),
    Variable("NCCL_IB_TIMEOUT", "per-node", "time after which a packet is sent again", "raised instead of fixing a bad link", ("ib_unreachable",)),
    Variable("NCCL_IB_RETRY_CNT", "per-node", "how often a packet is sent again", "", ("ib_unreachable",)),
    Variable("NCCL_TOPO_FILE", "per-node", "a description of the machine that replaces NCCL's own detection", "made for a different kind of machine", ("p2p_blocked",)),
    Variable("NCCL_HOSTID", "per-node", "the name by which ranks of one machine identify each other", "equal on two hosts: they try to share memory", ("p2p_blocked",)),
    Variable("NCCL_MNNVL_UUID", "per-node", "the cluster of NVLink across nodes that this node belongs to", "", ("p2p_blocked",)),
    Variable("NCCL_MNNVL_CLIQUE_ID", "per-node", "the clique of this node within its NVLink cluster", "", ("p2p_blocked",)),
    Variable("NCCL_RAS_ADDR", "per-node", "the address of NCCL's RAS service", "two jobs on one machine with the same port", ("port_in_use",)),
    Variable("NCCL_CONF_FILE", "per-node", "a file with more settings; /etc/nccl.conf and ~/.nccl.conf are read too", "a forgotten setting in one of these files",
             ("env_mismatch",)),
    Variable("NCCL_NET_GDR_LEVEL", "per-node", "maximum distance over which network cards read device memory", "", ("ib_unreachable",)),
    Variable("NCCL_NET_GDR_READ", "per-node", "whether network cards also read device memory for sending"),
    Variable("NCCL_DMABUF_ENABLE", "per-node", "GPUDirect through the kernel's dma-buf"),
    Variable("NCCL_DEBUG", "free", "how much NCCL logs: VERSION, WARN, INFO, TRACE", "INFO or TRACE in a long run without NCCL_DEBUG_FILE: a flood of lines"),
    Variable("NCCL_DEBUG_FILE", "free", "where NCCL logs: %h and %p stand for host and process"),
    Variable("NCCL_DEBUG_SUBSYS", "free", "which parts of NCCL log: INIT, NET, GRAPH, …"),
    Variable("NCCL_SET_THREAD_NAME", "free", "gives NCCL's threads readable names"),
    Variable("NCCL_GRAPH_DUMP_FILE", "free", "where NCCL writes the graph that it found"),
    Variable("NCCL_TOPO_DUMP_FILE", "free", "where NCCL writes the machine as it sees it"),
    Variable("NCCL_CHECK_POINTERS", "free", "checks the pointers of every call", "1 in a long run: slow"),
    Variable("NCCL_TIMEOUT", "free", "not a variable of NCCL: it has no effect", "set to change a timeout; use the argument of the process group instead",
             ("rank_stalled",)),
)

NCCL_VARIABLES: tuple[Variable, ...] = (*_WIRE, *_TRANSPORT, *_NODE)


LIBRARY_VARIABLES: tuple[Variable, ...] = (
    Variable("CUDA_HOME", "per-node", "where the CUDA toolkit is, for compilation", "a version different from that of the torch build"),
    Variable("CUDA_PATH", "per-node", "the same for some programs"),
    Variable("CUDA_VERSION", "free", "set by container images as information; no library reads it"),
    Variable("CUDA_CACHE_PATH", "per-node", "where the driver keeps what it compiled", "a network disk that ranks share"),
    Variable("CUDA_CACHE_DISABLE", "free", "1: the driver compiles kernels again in every process", "1: slow starts"),
    Variable("CUDA_MODULE_LOADING", "free", "when kernels are loaded: LAZY, when they are first used, or EAGER"),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "free", "how many queues a device has for kernels", "1 although no framework in use needs it"),
    Variable("CUDA_MPS_PIPE_DIRECTORY", "per-node", "where CUDA's multi-process service listens", "left over: every CUDA call fails"),
    Variable("CUDA_MPS_LOG_DIRECTORY", "per-node", "where that service logs"),
    Variable("CUDA_COREDUMP_FILE", "free", "where a device's core dump goes"),
    Variable("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "free", "1: an exception in a kernel writes a device core dump"),
    Variable("NVIDIA_VISIBLE_DEVICES", "per-node", "devices of the container; CUDA_VISIBLE_DEVICES selects among them",
             "set inside a container: it has no effect there"),
    Variable("NVIDIA_DRIVER_CAPABILITIES", "per-node", "parts of the driver in the container", "without compute or utility: no CUDA, or no nvidia-smi"),
    Variable("TORCH_HOME", "per-node", "where torch.hub keeps what it downloaded"),
    Variable("TORCH_LOGS", "free", "what torch logs, e.g. about torch.compile", "a flood of lines in a long run"),
    Variable("TORCH_CUDA_ARCH_LIST", "free", "the compute capabilities for which extensions are compiled"),
    Variable("TORCH_EXTENSIONS_DIR", "per-node", "where compiled extensions are kept", "a network disk that ranks share", ("dataset_cache_race",)),
    Variable("TORCH_USE_CUDA_DSA", "free", "device-side assertions; works only in a torch that was built with it"),
    Variable("TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", "free", "logs native stacks if a process group is not destroyed before the exit"),
    Variable("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "per-node", "where the flight recorder's dump goes; the rank's number is added"),
    Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", "free", "1: torch keeps no device memory for later", "1 in a long run: many times slower"),
    Variable("PYTORCH_NVML_BASED_CUDA_CHECK", "free", "1: torch detects devices through NVML, without creating a CUDA context"),
    Variable("OMP_PROC_BIND", "per-node", "whether OpenMP's threads stay on their cores", "true with several ranks: all of them on the same cores", ("straggler",)),
    Variable("OMP_PLACES", "per-node", "on which cores OpenMP's threads stay", "the same for all ranks of a node", ("straggler",)),
    Variable("OMP_WAIT_POLICY", "free", "ACTIVE: waiting threads spin, which is fast on an idle machine; PASSIVE: waiting threads sleep"),
    Variable("OMP_DYNAMIC", "free", "OpenMP may use fewer threads than requested"),
    Variable("OMP_SCHEDULE", "free", "how OpenMP distributes loop iterations over threads"),
    Variable("OMP_STACKSIZE", "free", "the stack of OpenMP's threads"),
    Variable("OMP_MAX_ACTIVE_LEVELS", "free", "maximum depth of nested parallel regions in OpenMP"),
    Variable("OMP_DISPLAY_ENV", "free", "OpenMP prints its settings at the start"),
    Variable("KMP_AFFINITY", "per-node", "the same as OMP_PROC_BIND for Intel's OpenMP", "the same for all ranks of a node", ("straggler",)),
    Variable("KMP_BLOCKTIME", "free", "milliseconds that Intel's threads spin before they sleep"),
    Variable("GOMP_CPU_AFFINITY", "per-node", "on which cores GNU's OpenMP threads stay", "the same for all ranks of a node", ("straggler",)),
    Variable("HTTP_PROXY", "per-node", "a proxy for http"),
    Variable("ALL_PROXY", "per-node", "a proxy for everything"),
    Variable("HF_HUB_CACHE", "per-node", "where models and datasets from the hub are kept; else below HF_HOME"),
    Variable("HF_DATASETS_CACHE", "per-node", "where prepared datasets are kept"),
    Variable("HF_ASSETS_CACHE", "per-node", "where other files of the hub's library are kept"),
    Variable("HF_XET_CACHE", "per-node", "where parts of downloads from the hub are kept"),
    Variable("HF_HUB_DOWNLOAD_TIMEOUT", "per-node", "seconds after which a download without progress is abandoned"),
    Variable("HF_HUB_ETAG_TIMEOUT", "per-node", "seconds after which a request to the hub without an answer is abandoned"),
    Variable("HF_HUB_DISABLE_TELEMETRY", "free", "1: the hub's library reports nothing"),
    Variable("HF_HUB_DISABLE_PROGRESS_BARS", "free", "1: no progress bars"),
    Variable("NCCL_VERSION", "free", "set by container images as information; no library reads it"),
)

KNOWN_TO_LIBRARIES = frozenset((
    "NCCL_IGNORE_DISABLED_P2P", "NCCL_NVB_DISABLE", "NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NVLS_CHUNKSIZE", "NCCL_NVLS_NCHANNELS", "NCCL_P2P_DIRECT_DISABLE", "NCCL_P2P_READ_ENABLE", "NCCL_P2P_USE_CUDA_MEMCPY",
    "NCCL_SHM_USE_CUDA_MEMCPY", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_MERGE_NICS", "NCCL_IB_MERGE_VFS", "NCCL_IB_PKEY",
    "NCCL_IB_FIFO_TC", "NCCL_IB_ECE_ENABLE", "NCCL_IB_RETURN_ASYNC_EVENTS", "NCCL_NET_MERGE_LEVEL", "NCCL_NET_FORCE_MERGE", "NCCL_NET_GDR_C2C",
    "NCCL_NET_DISABLE_INTRA", "NCCL_SOCKET_RETRY_CNT", "NCCL_SOCKET_RETRY_SLEEP_MSEC", "NCCL_GRAPH_REGISTER", "NCCL_LOCAL_REGISTER",
    "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_GRAPH_FILE", "NCCL_DEBUG_TIMESTAMP_FORMAT", "NCCL_DEBUG_TIMESTAMP_LEVELS", "NCCL_PROFILER_PLUGIN",
    "NCCL_TUNER_CONFIG_PATH", "NCCL_COMM_BLOCKING", "NCCL_COMM_ID", "NCCL_COMM_SPLIT_SHARE_RESOURCES", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_WIN_ENABLE",
    "NCCL_WORK_FIFO_BYTES", "NCCL_PAT_ENABLE", "NCCL_GDRCOPY_ENABLE", "NCCL_LL128_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_RAS_TIMEOUT_FACTOR",
    "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_CUDA_EVENT_CACHE", "TORCH_NCCL_COORD_CHECK_MILSEC", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    "TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_TRACE_CPP_STACK", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_HIP_MEMORY_CACHING",
    "PYTORCH_NO_MPS_MEMORY_CACHING", "CUDA_DEVICE_MAX_COPY_CONNECTIONS", "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION", "CUDA_COREDUMP_PIPE",
    "CUDA_MODULE_DATA_LOADING",
))
"""Valid names without a description here. Nodes on which they differ are compared as for unknown
names.
"""


_ENV = "env_mismatch"

_LAUNCH = (
    Variable(
        "WORLD_SIZE", "equal", "total number of ranks of the job; launchers set it for the processes that they start",
        "left over from an earlier job in an interactive shell; unisono ignores it on one device and reports this", ("world_mismatch",),
    ),
    Variable(
        "RANK", "unique", "the number of this process among all ranks, from 0 without a gap",
        "set by hand, or left over: two processes with the same rank wait for each other forever", ("node_duplicate",),
    ),
    Variable(
        "LOCAL_RANK", "unique", "the number of this process on its node; usually the index of its device",
        "not smaller than the number of visible devices", ("invalid_device_ordinal", "duplicate_gpu"),
    ),
    Variable(
        "LOCAL_WORLD_SIZE", "equal", "the number of ranks on one node", "differs between nodes although no number was declared",
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
    Variable("RDZV_ID", "equal", "torchrun's name of the job; ranks with a different name are rejected", "", ("rdzv_timeout",)),
    Variable("TORCHELASTIC_RUN_ID", "equal", "set by torchrun for its processes; shows that a launcher is running",
             "present in a shell that was not started by a launcher", ("world_mismatch",)),
    Variable("TORCHELASTIC_RESTART_COUNT", "equal", "how often torchrun has restarted the group", "", ("world_mismatch",)),
    Variable("TORCHELASTIC_MAX_RESTARTS", "equal", "how often torchrun may restart the group"),
    Variable("TORCHELASTIC_ERROR_FILE", "free", "where a torchrun process leaves its exception for the agent"),
)

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
             "0: a process with a stuck watchdog is never ended", ("rank_stalled",)),
    Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "equal", "seconds without a heartbeat of the watchdog after which the process is ended",
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
    Variable("TORCH_NCCL_BCAST_UNIQUEID", "equal", "how ranks receive NCCL's unique id", "", (_ENV,)),
    Variable("TORCH_NCCL_RANKS_PER_ROOT", "equal", "number of ranks per NCCL root during initialization", "", (_ENV,)),
    Variable("TORCH_DIST_INIT_BARRIER", "equal", "adds a barrier at the end of initialization", "", (_ENV,)),
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
)

_DEVICES = (
    Variable(
        "CUDA_VISIBLE_DEVICES", "per-node",
        "the devices that a process sees, by index or UUID, in this order; the process numbers them from 0",
        "set on some nodes only; empty or -1 (no device); an index that does not exist; a duplicate index; set in Python after CUDA was initialized",
        ("nproc_mismatch", "invalid_device_ordinal", "duplicate_gpu"),
    ),
    Variable("HIP_VISIBLE_DEVICES", "per-node", "the same for AMD devices", "set on some nodes only", ("nproc_mismatch",)),
    Variable("ASCEND_RT_VISIBLE_DEVICES", "per-node", "the same for Ascend devices", "set on some nodes only", ("nproc_mismatch",)),
    Variable("CUDA_DEVICE_ORDER", "equal", "PCI_BUS_ID numbers devices as nvidia-smi does; the default puts the fastest first",
             "unset on a machine with devices of several kinds", ("device_mismatch",)),
    Variable("CUDA_LAUNCH_BLOCKING", "equal", "waits for each kernel to finish, so that an error is reported at the right line", "1 in a long run: slow"),
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
)

_FILES = (
    Variable("PYTHONHASHSEED", "equal", "fixes the hashes of strings, and thereby the order of sets",
             "unset although the order of a set affects the data", ("split_mismatch",)),
    Variable("PYTHONFAULTHANDLER", "free", "1: Python prints all stacks when native code crashes"),
    Variable("TOKENIZERS_PARALLELISM", "free", "whether fast tokenizers use threads; false silences their warning after a fork"),
    Variable("HF_HOME", "per-node", "where models and datasets from the hub are cached", "a network disk that ranks share, or a small one",
             ("dataset_cache_race", "disk_full")),
    Variable("HF_HUB_OFFLINE", "equal", "1: nothing is downloaded from the hub; only the cache is used", "1 on a node whose cache lacks the model",
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
    Variable("WANDB_MODE", "free", "whether Weights & Biases sends its records, keeps them locally, or drops them"),
    Variable("XDG_CACHE_HOME", "per-node", "unisono keeps its token cache in unisono/ below it (else ~/.cache)",
             "a network disk: mapping the cache is slower", ("io_blocked",)),
    Variable("XDG_CONFIG_HOME", "per-node", "unisono keeps the key that signs checkpoints in unisono/ below it (else ~/.config)",
             "a different value when resuming: your own checkpoints look foreign"),
    Variable("NO_COLOR", "free", "any value disables colours in terminals"),
    Variable("UNISONO_LANG", "free", "the language of the terminal, en or zh; default: that of the locale. Files, logs and JSON are English"),
)
# fmt: on

VARIABLES: tuple[Variable, ...] = (*_LAUNCH, *_DEVICES, *_TORCH, *NCCL_VARIABLES, *_FILES, *LIBRARY_VARIABLES)
"""In the order in which `explain` lists them."""

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def find_variable(name: str) -> Variable | None:
    """The entry of this environment variable, or None; lower case is understood."""
    return _BY_NAME.get(name.upper())


# ---- which values a variable takes, and what it costs to set it

_NCCL_SWITCH = ValidValues(
    "0 or 1", r"[01]", "NCCL reads a number: words such as true count as 0 or are refused"
)
_TORCH_SWITCH = ValidValues(
    "0 or 1", r"0|1|y|yes|t|true|n|no|f|false", "torch refuses to make a process group", fatal=True
)
_TORCH_NUMBER = ValidValues("a whole number", r"-?\d+", "torch refuses to make a process group", fatal=True)
_SIZE = ValidValues("a whole number", r"\d+", "NCCL reads only the leading digits, or nothing")
_SECONDS = ValidValues("seconds, a whole number", r"\d+", "torch refuses to make a process group", fatal=True)
_THREADS = ValidValues(
    "a number from 1, or a list of such numbers",
    r"[1-9]\d*(,[1-9]\d*)*",
    "the library uses its own default: all cores, or one",
)
_ALGORITHM = r"(ring|tree|collnetdirect|collnetchain|nvls|nvlstree|pat)"
_PROTOCOL = r"(ll|ll128|simple)"

_SETTING = r"[a-z_0-9]+\s*:\s*(\[[^\]]*\]\s*|[^,:\[\]\s][^,:\[\]]*)"
_ALLOCATOR = rf"{_SETTING}(,\s*{_SETTING})*,?"
"""torch's own reader skips blanks, and takes lists: `roundup_power2_divisions:[256:1,>:8]`."""

# fmt: off
VALUES: dict[str, ValidValues] = {
    **dict.fromkeys(
        ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_PXN_DISABLE", "NCCL_CHECK_POINTERS", "NCCL_COLLNET_ENABLE",
         "NCCL_NET_SHARED_BUFFERS", "NCCL_DMABUF_ENABLE", "NCCL_IGNORE_CPU_AFFINITY", "NCCL_MULTI_RANK_GPU_ENABLE",
         "NCCL_RUNTIME_CONNECT", "NCCL_RAS_ENABLE", "NCCL_SET_THREAD_NAME"),
        _NCCL_SWITCH,
    ),
    **dict.fromkeys(
        ("NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS",
         "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_QPS_PER_CONNECTION"),
        _SIZE,
    ),
    **dict.fromkeys(
        ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DESYNC_DEBUG", "TORCH_NCCL_HIGH_PRIORITY",
         "TORCH_NCCL_NAN_CHECK", "TORCH_NCCL_PROPAGATE_ERROR", "TORCH_NCCL_BLOCKING_WAIT"),
        _TORCH_SWITCH,
    ),
    **dict.fromkeys(("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"), _TORCH_NUMBER),
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), _THREADS),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": _SECONDS,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ValidValues("0, 1, 2 or 3", r"[0-3]", "torch refuses to make a process group", fatal=True),
    "TORCH_DISTRIBUTED_DEBUG": ValidValues("OFF, INFO or DETAIL", r"off|info|detail", "torch refuses to make a process group", fatal=True),
    "NCCL_DEBUG": ValidValues("VERSION, WARN, INFO, ABORT or TRACE", r"version|warn|info|abort|trace", "NCCL logs nothing, not even why it fails"),
    "NCCL_ALGO": ValidValues(
        "Ring, Tree, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT, separated by commas, ^ excludes; since NCCL 2.24 also by collective, e.g. allreduce:tree",
        rf"\^?{_ALGORITHM}(,{_ALGORITHM})*|.*[:;].*", "NCCL fails at the first collective",
    ),
    "NCCL_PROTO": ValidValues("LL, LL128, Simple, separated by commas; ^ excludes", rf"\^?{_PROTOCOL}(,{_PROTOCOL})*|.*[:;].*", "NCCL fails at the first collective"),
    "NCCL_P2P_LEVEL": ValidValues("LOC, NVL, PIX, PXB, PHB, SYS, or 0 to 5", r"loc|nvl|pix|pxb|phb|sys|[0-5]"),
    "NCCL_NET_GDR_LEVEL": ValidValues("LOC, PIX, PXB, PHB, SYS, or 0 to 5", r"loc|pix|pxb|phb|sys|[0-5]"),
    "NCCL_CROSS_NIC": ValidValues("0, 1 or 2", r"[012]"),
    "NCCL_SOCKET_FAMILY": ValidValues("AF_INET or AF_INET6", r"af_inet6?"),
    "CUDA_DEVICE_ORDER": ValidValues("FASTEST_FIRST or PCI_BUS_ID", r"fastest_first|pci_bus_id"),
    "CUDA_LAUNCH_BLOCKING": ValidValues("0 or 1", r"[01]"),
    "CUDA_MODULE_LOADING": ValidValues("LAZY, EAGER or DEFAULT", r"lazy|eager|default"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ValidValues("1 to 32", r"[1-9]|[12]\d|3[0-2]"),
    "CUBLAS_WORKSPACE_CONFIG": ValidValues(":SIZE:COUNT, e.g. :4096:8", r"(:\d+:\d+)+"),
    "NVIDIA_TF32_OVERRIDE": ValidValues("0 or 1", r"[01]"),
    "GLOO_SOCKET_IFNAME": ValidValues(
        "exact names separated by commas", r"[^\^=,\s][^,\s]*(,[^\^=,\s][^,\s]*)*", "gloo fails with `Unable to find address for`; ^ and = are NCCL's syntax",
    ),
    "PYTORCH_ALLOC_CONF": ValidValues("name:value, separated by commas", _ALLOCATOR, "torch fails when it first allocates on a device"),
    "PYTORCH_CUDA_ALLOC_CONF": ValidValues("name:value, separated by commas", _ALLOCATOR,
                                     "torch fails when it first allocates on a device"),
    "PYTHONHASHSEED": ValidValues("random, or a number up to 4294967295", r"random|\d{1,10}", "Python does not start"),
    "MASTER_PORT": ValidValues("a port", r"\d{1,5}", "no process group can be made"),
    "WORLD_SIZE": ValidValues("a whole number", r"\d+", "no process group can be made"),
    "RANK": ValidValues("a whole number", r"\d+", "no process group can be made"),
    "LOCAL_RANK": ValidValues("a whole number", r"\d+", "no process group can be made"),
}
"""By name; matched whole, in any case."""


_WHILE_SEARCHING = "only while debugging; remove it from the environment and from nccl.conf afterwards"

ADVICE: dict[str, Advice] = {
    "NCCL_P2P_DISABLE": Advice(
        "devices of one machine exchange data through host memory: with NVLink that is about a tenth of the bandwidth, over PCIe about half",
        "as a trial when a collective hangs inside one machine; permanently only if IOMMU or ACS block peer access and cannot be disabled",
    ),
    "NCCL_P2P_LEVEL": Advice(
        "pairs of devices farther apart than this use host memory",
        "where peer access works behind one switch (PIX, PXB) and not across sockets (SYS)",
    ),
    "NCCL_SHM_DISABLE": Advice(
        "traffic without peer access goes through the network stack: many times slower",
        "as a trial when /dev/shm is too small; the fix is a larger /dev/shm (`--shm-size=8g`)",
    ),
    "NCCL_IB_DISABLE": Advice(
        "all traffic between nodes goes over TCP: often a tenth of the bandwidth or less",
        "as a trial when InfiniBand is suspected, on all nodes at once; permanently only if its ports are down",
    ),
    "NCCL_NET": Advice("Socket is slow where InfiniBand works", "to force a plugin, or to exclude one, on all nodes"),
    "NCCL_SOCKET_IFNAME": Advice(
        "nothing, if it names the right interface on each node",
        "if NCCL uses a different interface than the one to the peers: docker0, a management network, lo",
    ),
    "GLOO_SOCKET_IFNAME": Advice(
        "nothing, if it names the right interface on each node",
        "if a host's name resolves to an address that the peers cannot reach: exact names separated by commas, without NCCL's ^ and =",
    ),
    "NCCL_IB_HCA": Advice("excluded adapters add no bandwidth", "to exclude an adapter whose port is down or that is for storage"),
    "NCCL_IB_GID_INDEX": Advice("nothing", "on RoCE, where the default GID is not the RoCE v2 address (`show_gids`)"),
    "NCCL_IB_TIMEOUT": Advice("a link that is really down is detected later", "on very large networks; 22 is enough"),
    "NCCL_ALGO": Advice("NCCL's own choice is better for most sizes", _WHILE_SEARCHING),
    "NCCL_PROTO": Advice("NCCL's own choice is better for most sizes; LL128 on hardware that does not support it safely corrupts data", _WHILE_SEARCHING),
    "NCCL_NVLS_ENABLE": Advice("0: reductions inside NVLink switches are off, up to a third of the bandwidth on H100 machines",
                               "0 as a trial when NCCL fails at the start with NVLS in its message"),
    "NCCL_CUMEM_ENABLE": Advice("0: some registrations of buffers are off", "0 as a trial when NCCL runs out of memory at the start"),
    "NCCL_CUMEM_HOST_ENABLE": Advice("next to nothing", "0 with NCCL 2.24 to 2.26.4 in a container without SYS_NICE"),
    "NCCL_PXN_DISABLE": Advice("1: all-to-all traffic between nodes is slower", _WHILE_SEARCHING),
    "NCCL_BUFFSIZE": Advice("larger buffers take device memory on every channel", "seldom: if the vendor recommends it"),
    "NCCL_DEBUG": Advice("INFO: hundreds of lines per rank at the start; TRACE: a flood", "WARN always; INFO with NCCL_DEBUG_FILE while debugging"),
    "NCCL_CHECK_POINTERS": Advice("a call to CUDA in every collective", _WHILE_SEARCHING),
    "NCCL_IGNORE_NET_MISMATCH": Advice("a difference between nodes that may hang them is not reported", "never permanently"),
    "NCCL_MULTI_RANK_GPU_ENABLE": Advice("two ranks on one device share its memory and time", "in tests of many ranks on one device"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Advice("0: a failed collective hangs forever", "leave it unset"),
    "TORCH_NCCL_BLOCKING_WAIT": Advice("the program waits for every collective: no overlap with computation", "leave it unset"),
    "TORCH_NCCL_ENABLE_MONITORING": Advice("0: a process whose watchdog is stuck is never ended", "0 only under a debugger"),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": Advice("a stuck process is ended later", "longer where a save or a compilation takes more than eight minutes"),
    "TORCH_NCCL_DESYNC_DEBUG": Advice("time in every collective", _WHILE_SEARCHING),
    "TORCH_NCCL_NAN_CHECK": Advice("a kernel before every collective", _WHILE_SEARCHING),
    "TORCH_DISTRIBUTED_DEBUG": Advice("DETAIL: every collective is preceded by a second one; small ones take about twice as long", _WHILE_SEARCHING),
    "TORCH_FR_BUFFER_SIZE": Advice("some kilobytes of memory", "always: 2000, so that a stall can be explained"),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": Advice("some kilobytes of memory", "always: 2000, so that a stall can be explained"),
    "CUDA_LAUNCH_BLOCKING": Advice("the CPU waits for every kernel: a training step takes up to several times as long", _WHILE_SEARCHING),
    "CUDA_VISIBLE_DEVICES": Advice(
        "devices that are not named are not used", "to share a machine; better by UUID, and the same way on all nodes, or `--devices`",
    ),
    "CUDA_DEVICE_ORDER": Advice("nothing", "PCI_BUS_ID wherever devices are named by index: the numbers are then those of nvidia-smi"),
    "CUDA_DEVICE_MAX_CONNECTIONS": Advice("1: kernels of different streams queue behind each other", "1 if a framework with tensor parallelism requires it"),
    "CUDA_MODULE_LOADING": Advice("EAGER: every kernel is loaded at the start: seconds, and hundreds of MB per process", "leave it unset (LAZY)"),
    "PYTORCH_ALLOC_CONF": Advice("expandable segments cannot be shared between processes", "expandable_segments:True where memory is fragmented"),
    "PYTORCH_CUDA_ALLOC_CONF": Advice("expandable segments cannot be shared between processes", "under its newer name, PYTORCH_ALLOC_CONF"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Advice("every tensor is allocated again: many times slower", "under compute-sanitizer"),
    "OMP_NUM_THREADS": Advice(
        "1: loaders and CPU training use one core per rank; too many: ranks wait for each other", "cores / ranks; unisono sets it for its ranks if it is unset",
    ),
    "CUBLAS_WORKSPACE_CONFIG": Advice("a few percent of speed", ":4096:8 if runs should be bit-exact"),
    "NVIDIA_TF32_OVERRIDE": Advice("0: matrix products in float32 are several times slower", "to compare numbers with a different machine"),
    "HF_HUB_OFFLINE": Advice("nothing is downloaded", "on nodes without internet access, when the cache has all needed files"),
    "LD_PRELOAD": Advice("every process loads it, ranks and tools alike", "seldom: on all nodes alike, never for NCCL, which torch includes"),
}
# fmt: on
"""By name. What is not in it costs nothing worth a word, or is nobody's to set by hand."""
