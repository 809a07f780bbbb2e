"""Which values an environment variable takes, and what it costs to set it: for variables that are often set wrong, or forgotten."""

from unisono.causes.variables import Advice, ValidValues

_NCCL_SWITCH = ValidValues("0 or 1", r"[01]", "NCCL reads a number: words as true are taken for 0 or refused")
_TORCH_SWITCH = ValidValues(
    "0 or 1", r"0|1|y|yes|t|true|n|no|f|false", "torch refuses to make a process group", fatal=True
)
_TORCH_NUMBER = ValidValues("a whole number", r"-?\d+", "torch refuses to make a process group", fatal=True)
_SIZE = ValidValues("a whole number", r"\d+", "NCCL reads the digits at its beginning, or nothing")
_SECONDS = ValidValues("seconds, a whole number", r"\d+", "torch refuses to make a process group", fatal=True)
_THREADS = ValidValues(
    "a number from 1, or a list of such numbers",
    r"[1-9]\d*(,[1-9]\d*)*",
    "the library takes its own default: all cores, or one",
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
    "NCCL_DEBUG": ValidValues("VERSION, WARN, INFO, ABORT or TRACE", r"version|warn|info|abort|trace", "NCCL says nothing at all, not even why it fails"),
    "NCCL_ALGO": ValidValues(
        "Ring, Tree, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT, between commas, ^ excludes; since NCCL 2.24 also by collective, as allreduce:tree",
        rf"\^?{_ALGORITHM}(,{_ALGORITHM})*|.*[:;].*", "NCCL fails at the first collective",
    ),
    "NCCL_PROTO": ValidValues("LL, LL128, Simple, between commas; ^ excludes", rf"\^?{_PROTOCOL}(,{_PROTOCOL})*|.*[:;].*", "NCCL fails at the first collective"),
    "NCCL_P2P_LEVEL": ValidValues("LOC, NVL, PIX, PXB, PHB, SYS, or 0 to 5", r"loc|nvl|pix|pxb|phb|sys|[0-5]"),
    "NCCL_NET_GDR_LEVEL": ValidValues("LOC, PIX, PXB, PHB, SYS, or 0 to 5", r"loc|pix|pxb|phb|sys|[0-5]"),
    "NCCL_CROSS_NIC": ValidValues("0, 1 or 2", r"[012]"),
    "NCCL_SOCKET_FAMILY": ValidValues("AF_INET or AF_INET6", r"af_inet6?"),
    "CUDA_DEVICE_ORDER": ValidValues("FASTEST_FIRST or PCI_BUS_ID", r"fastest_first|pci_bus_id"),
    "CUDA_LAUNCH_BLOCKING": ValidValues("0 or 1", r"[01]"),
    "CUDA_MODULE_LOADING": ValidValues("LAZY, EAGER or DEFAULT", r"lazy|eager|default"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ValidValues("1 to 32", r"[1-9]|[12]\d|3[0-2]"),
    "CUBLAS_WORKSPACE_CONFIG": ValidValues(":SIZE:COUNT, as :4096:8", r"(:\d+:\d+)+"),
    "NVIDIA_TF32_OVERRIDE": ValidValues("0 or 1", r"[01]"),
    "GLOO_SOCKET_IFNAME": ValidValues(
        "exact names between commas", r"[^\^=,\s][^,\s]*(,[^\^=,\s][^,\s]*)*", "gloo fails with `Unable to find address for`; ^ and = are NCCL's signs",
    ),
    "PYTORCH_ALLOC_CONF": ValidValues("name:value, between commas", _ALLOCATOR, "torch fails when it first allocates on a device"),
    "PYTORCH_CUDA_ALLOC_CONF": ValidValues("name:value, between commas", _ALLOCATOR,
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
        "devices of one machine exchange through its memory: with NVLink that is about a tenth of the bandwidth, over PCIe about half",
        "as a trial when a collective hangs inside one machine; for good only where IOMMU or ACS block peer access and cannot be switched off",
    ),
    "NCCL_P2P_LEVEL": Advice(
        "pairs of devices farther apart than this go through the machine's memory",
        "where peer access works behind one switch (PIX, PXB) and not across sockets (SYS)",
    ),
    "NCCL_SHM_DISABLE": Advice(
        "what cannot go from device to device goes through the network stack: many times slower",
        "as a trial when /dev/shm is too small; the fix is a larger /dev/shm (`--shm-size=8g`)",
    ),
    "NCCL_IB_DISABLE": Advice(
        "all traffic between nodes goes over TCP: often a tenth of the bandwidth or less",
        "as a trial when InfiniBand is suspected, on all nodes at once; for good only where its ports are down",
    ),
    "NCCL_NET": Advice("Socket is slow where InfiniBand works", "to force a plugin, or to exclude one, on all nodes"),
    "NCCL_SOCKET_IFNAME": Advice(
        "nothing, if it names the right interface on each node",
        "if NCCL uses a different interface than the one to the peers: docker0, a management network, lo",
    ),
    "GLOO_SOCKET_IFNAME": Advice(
        "nothing, if it names the right interface on each node",
        "if a host's name resolves to an address that the peers cannot reach: exact names between commas, without NCCL's ^ and =",
    ),
    "NCCL_IB_HCA": Advice("adapters that are left out add no bandwidth", "to leave out an adapter whose port is down or that is for storage"),
    "NCCL_IB_GID_INDEX": Advice("nothing", "on RoCE, where the default GID is not the RoCE v2 address (`show_gids`)"),
    "NCCL_IB_TIMEOUT": Advice("a link that is really down is noticed later", "on very large networks; 22 is enough"),
    "NCCL_ALGO": Advice("NCCL's own choice is better for most sizes", _WHILE_SEARCHING),
    "NCCL_PROTO": Advice("NCCL's own choice is better for most sizes; LL128 on hardware that does not support it safely corrupts data", _WHILE_SEARCHING),
    "NCCL_NVLS_ENABLE": Advice("0: reductions inside NVLink switches are off, up to a third of the bandwidth on H100 machines",
                               "0 as a trial when NCCL fails at the start with NVLS in its message"),
    "NCCL_CUMEM_ENABLE": Advice("0: some registrations of buffers are off", "0 as a trial when NCCL runs out of memory at the start"),
    "NCCL_CUMEM_HOST_ENABLE": Advice("next to nothing", "0 with NCCL 2.24 to 2.26.4 in a container without SYS_NICE"),
    "NCCL_PXN_DISABLE": Advice("1: all-to-all traffic between nodes is slower", _WHILE_SEARCHING),
    "NCCL_BUFFSIZE": Advice("larger buffers take device memory on every channel", "seldom: where a vendor's guide says so"),
    "NCCL_DEBUG": Advice("INFO: hundreds of lines a rank at the start; TRACE: a flood", "WARN always; INFO with NCCL_DEBUG_FILE while debugging"),
    "NCCL_CHECK_POINTERS": Advice("a call to CUDA in every collective", _WHILE_SEARCHING),
    "NCCL_IGNORE_NET_MISMATCH": Advice("a difference between nodes that may hang them is not reported", "never for good"),
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
    "CUDA_DEVICE_ORDER": Advice("nothing", "PCI_BUS_ID wherever devices are named by index: the numbers are then nvidia-smi's"),
    "CUDA_DEVICE_MAX_CONNECTIONS": Advice("1: kernels of different streams queue behind each other", "1 where a framework with tensor parallelism asks for it"),
    "CUDA_MODULE_LOADING": Advice("EAGER: every kernel is loaded at the start: seconds, and hundreds of MB a process", "leave it unset (LAZY)"),
    "PYTORCH_ALLOC_CONF": Advice("expandable segments cannot be shared between processes", "expandable_segments:True where memory is fragmented"),
    "PYTORCH_CUDA_ALLOC_CONF": Advice("expandable segments cannot be shared between processes", "under its newer name, PYTORCH_ALLOC_CONF"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Advice("every tensor is allocated again: many times slower", "under compute-sanitizer"),
    "OMP_NUM_THREADS": Advice(
        "1: loaders and CPU training use one core a rank; too many: ranks wait for each other", "cores / ranks; unisono sets it for its ranks where it is unset",
    ),
    "CUBLAS_WORKSPACE_CONFIG": Advice("a few percent of speed", ":4096:8 if runs should be bit-exact"),
    "NVIDIA_TF32_OVERRIDE": Advice("0: matrix products in float32 are several times slower", "to compare numbers with a different machine"),
    "HF_HUB_OFFLINE": Advice("nothing is downloaded", "on nodes without internet access, when the cache has all needed files"),
    "LD_PRELOAD": Advice("every process loads it, ranks and tools alike", "seldom: on all nodes alike, never for NCCL, which torch brings"),
}
# fmt: on
"""By name. What is not in it costs nothing worth a word, or is nobody's to set by hand."""
