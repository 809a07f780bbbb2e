"""NCCL's environment variables: which are part of the protocol between ranks, and which belong to one node."""

from unisono.causes.variable import Variable

_ENV = ("env_mismatch",)

_WIRE = (
    Variable("NCCL_ALGO", "equal", "which algorithms may be used: Ring, Tree, …", "without Ring since NCCL 2.24: there is no fallback", _ENV),
    Variable("NCCL_PROTO", "equal", "which protocols may be used: LL, LL128, Simple", "LL128 forced where the hardware does not keep its promises", _ENV),
    Variable("NCCL_NTHREADS", "equal", "threads of one of NCCL's blocks", "superseded: leave it out", _ENV),
    Variable("NCCL_BUFFSIZE", "equal", "size of the buffer between two devices, in bytes", "", _ENV),
    Variable("NCCL_MIN_NCHANNELS", "equal", "the least number of channels", "superseded by NCCL_MIN_CTAS", _ENV),
    Variable("NCCL_MAX_NCHANNELS", "equal", "the largest number of channels", "superseded by NCCL_MAX_CTAS", _ENV),
    Variable("NCCL_MIN_CTAS", "equal", "the least number of blocks that NCCL uses", "", _ENV),
    Variable("NCCL_MAX_CTAS", "equal", "the largest number of blocks that NCCL uses", "", _ENV),
    Variable("NCCL_CGA_CLUSTER_SIZE", "equal", "size of block clusters on newer devices", "", _ENV),
    Variable("NCCL_CROSS_NIC", "equal", "whether a ring may use other network cards on the way back", "", _ENV),
    Variable("NCCL_NVLS_ENABLE", "equal", "reductions inside NVLink switches", "0 left over from a search for an error: slower", _ENV),
    Variable("NCCL_COLLNET_ENABLE", "equal", "reductions inside the network (SHARP)", "", _ENV),
    Variable("NCCL_COLLNET_NODE_THRESHOLD", "equal", "from how many nodes on CollNet is used", "", _ENV),
    Variable("NCCL_LL_THRESHOLD", "equal", "up to which size protocol LL is used", "superseded: leave it out", _ENV),
    Variable("NCCL_TREE_THRESHOLD", "equal", "up to which size trees are used", "superseded: leave it out", _ENV),
    Variable("NCCL_P2P_NET_CHUNKSIZE", "equal", "piece size of sends between nodes", "", _ENV),
    Variable("NCCL_PXN_DISABLE", "equal", "1: no way through the network card of another device", "", _ENV),
    Variable("NCCL_P2P_PXN_LEVEL", "equal", "when sends go through another device's network card", "", _ENV),
    Variable("NCCL_RUNTIME_CONNECT", "equal", "connections are made when first used", "", _ENV),
    Variable("NCCL_TUNER_PLUGIN", "equal", "a library that chooses algorithms", "present on some nodes only", _ENV),
    Variable("NCCL_LAUNCH_MODE", "equal", "how kernels of several devices in one process are started", "superseded: leave it out", _ENV),
)  # fmt: skip

_TRANSPORT = (
    Variable("NCCL_NET", "equal", "the network back-end: Socket, IB, or a plug-in's name", "Socket where InfiniBand works: slow", _ENV),
    Variable("NCCL_NET_PLUGIN", "equal", "which network plug-in is loaded", "present on some nodes only", _ENV),
    Variable("NCCL_IB_DISABLE", "equal", "1: no InfiniBand or RoCE, only sockets", "1 on machines whose ports are active: a left-over work-around that costs speed",
             ("env_mismatch", "ib_unreachable")),
    Variable("NCCL_SOCKET_FAMILY", "equal", "AF_INET or AF_INET6: forces one of them", "", _ENV),
    Variable("NCCL_SOCKET_NTHREADS", "equal", "helper threads of a socket connection", "", _ENV),
    Variable("NCCL_NSOCKS_PERTHREAD", "equal", "sockets of each helper thread", "", _ENV),
    Variable("NCCL_IB_QPS_PER_CONNECTION", "equal", "queue pairs of a connection", "", _ENV),
    Variable("NCCL_IB_SPLIT_DATA_ON_QPS", "equal", "how data are spread over queue pairs", "", _ENV),
    Variable("NCCL_IB_ROCE_VERSION_NUM", "equal", "the version of RoCE", "", _ENV),
    Variable("NCCL_IB_ADDR_FAMILY", "equal", "the address family of the GID", "", _ENV),
    Variable("NCCL_IB_SL", "equal", "InfiniBand service level", "", _ENV),
    Variable("NCCL_IB_TC", "equal", "InfiniBand traffic class", "", _ENV),
    Variable("NCCL_CUMEM_ENABLE", "equal", "memory by CUDA's virtual memory calls", "", _ENV),
    Variable("NCCL_CUMEM_HOST_ENABLE", "equal", "the same for host memory", "NCCL 2.24 to 2.26.4 in a container without SYS_NICE: set it to 0", _ENV),
    Variable("NCCL_MNNVL_ENABLE", "equal", "NVLink across nodes", "", _ENV),
    Variable("NCCL_P2P_DISABLE", "equal", "1: devices of a machine do not read each other's memory", "1 where NVLink is there: a left-over that costs most of the speed",
             ("p2p_blocked",)),
    Variable("NCCL_P2P_LEVEL", "equal", "up to which distance devices use peer access", "", ("p2p_blocked",)),
    Variable("NCCL_SHM_DISABLE", "equal", "1: no shared memory between processes", "1: a left-over work-around; traffic inside a machine goes through the network",
             ("shm_too_small",)),
    Variable("NCCL_RAS_ENABLE", "equal", "NCCL's own service for reliability reports", "", _ENV),
    Variable("NCCL_IGNORE_CPU_AFFINITY", "per-node", "1: NCCL places its threads without regard to the process's cores"),
)  # fmt: skip

_NODE = (
    Variable("NCCL_SOCKET_IFNAME", "per-node", "the network interface; prefixes count, ^ excludes, = means exactly",
             "lo or docker0 in a job of several nodes; a name copied from another machine; another network than GLOO_SOCKET_IFNAME",
             ("nccl_socket_iface",)),
    Variable("NCCL_OOB_NET_IFNAME", "per-node", "the interface for NCCL's own set-up", "a name that this node lacks", ("nccl_socket_iface",)),
    Variable("NCCL_IB_HCA", "per-node", "which InfiniBand adapters and ports are used", "an adapter whose port is down", ("ib_unreachable",)),
    Variable("NCCL_IB_GID_INDEX", "per-node", "which GID a RoCE port uses; often different from node to node", "an index without a RoCE v2 address",
             ("ib_unreachable",)),
    Variable("NCCL_IB_TIMEOUT", "per-node", "after which time a packet is sent again", "raised instead of mending a bad link", ("ib_unreachable",)),
    Variable("NCCL_IB_RETRY_CNT", "per-node", "how often a packet is sent again", "", ("ib_unreachable",)),
    Variable("NCCL_TOPO_FILE", "per-node", "a description of the machine in place of the one that NCCL finds", "made for another kind of machine", ("p2p_blocked",)),
    Variable("NCCL_HOSTID", "per-node", "the name by which ranks of one machine know each other", "equal on two hosts: they try to share memory", ("p2p_blocked",)),
    Variable("NCCL_RAS_ADDR", "per-node", "the address of NCCL's report service", "two jobs on one machine with the same port", ("port_in_use",)),
    Variable("NCCL_CONF_FILE", "per-node", "a file with more settings; /etc/nccl.conf and ~/.nccl.conf are read too", "a forgotten setting in one of these files",
             ("env_mismatch",)),
    Variable("NCCL_NET_GDR_LEVEL", "per-node", "up to which distance network cards read device memory", "", ("ib_unreachable",)),
    Variable("NCCL_NET_GDR_READ", "per-node", "whether they also read it for sending"),
    Variable("NCCL_DMABUF_ENABLE", "per-node", "GPUDirect through the kernel's dma-buf"),
    Variable("NCCL_DEBUG", "free", "how much NCCL logs: VERSION, WARN, INFO, TRACE", "INFO or TRACE in a long run without NCCL_DEBUG_FILE: a flood of lines"),
    Variable("NCCL_DEBUG_FILE", "free", "where NCCL logs: %h and %p stand for host and process"),
    Variable("NCCL_DEBUG_SUBSYS", "free", "which parts of NCCL log: INIT, NET, GRAPH, …"),
    Variable("NCCL_CHECK_POINTERS", "free", "checks the pointers of every call", "1 in a long run: slow"),
    Variable("NCCL_TIMEOUT", "free", "no variable of NCCL: it has no effect", "set in the hope of a longer or shorter time-out; that is an argument of the process group",
             ("rank_stalled",)),
)  # fmt: skip

NCCL_VARIABLES: tuple[Variable, ...] = (*_WIRE, *_TRANSPORT, *_NODE)
