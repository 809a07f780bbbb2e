"""Which values a variable takes, for those whose wrong values are read as something else, or as nothing."""

from unisono.causes.variable import Takes

_NCCL_SWITCH = Takes("0 or 1", r"[01]", "NCCL reads a number: words as true are taken for 0 or refused")
_TORCH_SWITCH = Takes(
    "0 or 1", r"0|1|y|yes|t|true|n|no|f|false", "torch refuses to make a process group", fatal=True
)
_TORCH_NUMBER = Takes("a whole number", r"-?\d+", "torch refuses to make a process group", fatal=True)
_SIZE = Takes("a whole number", r"\d+", "NCCL reads the digits at its beginning, or nothing")
_SECONDS = Takes("seconds, a whole number", r"\d+", "torch refuses to make a process group", fatal=True)
_THREADS = Takes(
    "a number from 1, or a list of such numbers",
    r"[1-9]\d*(,[1-9]\d*)*",
    "the library takes its own default: all cores, or one",
)
_ALGORITHM = r"(ring|tree|collnetdirect|collnetchain|nvls|nvlstree|pat)"
_PROTOCOL = r"(ll|ll128|simple)"

_SETTING = r"[a-z_0-9]+\s*:\s*(\[[^\]]*\]\s*|[^,:\[\]\s][^,:\[\]]*)"
_ALLOCATOR = rf"{_SETTING}(,\s*{_SETTING})*,?"
"""torch's own reader skips blanks, and takes lists: `roundup_power2_divisions:[256:1,>:8]`."""

VALUES: dict[str, Takes] = {
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
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Takes("0, 1, 2 or 3", r"[0-3]", "torch refuses to make a process group", fatal=True),
    "TORCH_DISTRIBUTED_DEBUG": Takes("OFF, INFO or DETAIL", r"off|info|detail", "torch refuses to make a process group", fatal=True),
    "NCCL_DEBUG": Takes("VERSION, WARN, INFO, ABORT or TRACE", r"version|warn|info|abort|trace", "NCCL says nothing at all, not even why it fails"),
    "NCCL_ALGO": Takes(
        "Ring, Tree, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT, between commas, ^ excludes; since NCCL 2.24 also by collective, as allreduce:tree",
        rf"\^?{_ALGORITHM}(,{_ALGORITHM})*|.*[:;].*", "NCCL fails at the first collective",
    ),
    "NCCL_PROTO": Takes("LL, LL128, Simple, between commas; ^ excludes", rf"\^?{_PROTOCOL}(,{_PROTOCOL})*|.*[:;].*", "NCCL fails at the first collective"),
    "NCCL_P2P_LEVEL": Takes("LOC, NVL, PIX, PXB, PHB, SYS, or 0 to 5", r"loc|nvl|pix|pxb|phb|sys|[0-5]"),
    "NCCL_NET_GDR_LEVEL": Takes("LOC, PIX, PXB, PHB, SYS, or 0 to 5", r"loc|pix|pxb|phb|sys|[0-5]"),
    "NCCL_CROSS_NIC": Takes("0, 1 or 2", r"[012]"),
    "NCCL_SOCKET_FAMILY": Takes("AF_INET or AF_INET6", r"af_inet6?"),
    "CUDA_DEVICE_ORDER": Takes("FASTEST_FIRST or PCI_BUS_ID", r"fastest_first|pci_bus_id"),
    "CUDA_LAUNCH_BLOCKING": Takes("0 or 1", r"[01]"),
    "CUDA_MODULE_LOADING": Takes("LAZY, EAGER or DEFAULT", r"lazy|eager|default"),
    "CUDA_DEVICE_MAX_CONNECTIONS": Takes("1 to 32", r"[1-9]|[12]\d|3[0-2]"),
    "CUBLAS_WORKSPACE_CONFIG": Takes(":SIZE:COUNT, as :4096:8", r"(:\d+:\d+)+"),
    "NVIDIA_TF32_OVERRIDE": Takes("0 or 1", r"[01]"),
    "GLOO_SOCKET_IFNAME": Takes(
        "exact names between commas", r"[^\^=,\s][^,\s]*(,[^\^=,\s][^,\s]*)*", "gloo fails with `Unable to find address for`; ^ and = are NCCL's signs",
    ),
    "PYTORCH_ALLOC_CONF": Takes("name:value, between commas", _ALLOCATOR, "torch fails when it first allocates on a device"),
    "PYTORCH_CUDA_ALLOC_CONF": Takes("name:value, between commas", _ALLOCATOR,
                                     "torch fails when it first allocates on a device"),
    "PYTHONHASHSEED": Takes("random, or a number up to 4294967295", r"random|\d{1,10}", "Python does not start"),
    "MASTER_PORT": Takes("a port", r"\d{1,5}", "no process group can be made"),
    "WORLD_SIZE": Takes("a whole number", r"\d+", "no process group can be made"),
    "RANK": Takes("a whole number", r"\d+", "no process group can be made"),
    "LOCAL_RANK": Takes("a whole number", r"\d+", "no process group can be made"),
}  # fmt: skip
"""By name; matched whole, in any case."""
