"""Signatures of NCCL, and of torch's watchdog over it."""

from unisono.causes.signature import Signature

_WATCHDOG = "torch 2.1 to 2.13, ProcessGroupNCCL.cpp"
_ISSUES = "https://github.com/"

NCCL_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="watchdog_timeout", hints=("Watchdog caught collective operation timeout",),
        pattern=r"Watchdog caught collective operation timeout: WorkNCCL\(", kind="consequence", cause="rank_stalled",
        source=_WATCHDOG + ": who says it has waited; SeqNum and OpType of all ranks tell who did not come",
        example="[rank4]:[E304 17:51:12.44 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, "
        "OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.",
        look_alike="ProcessGroupNCCL watchdog thread started!",
    ),
    Signature(
        id="watchdog_follows", hints=("should dump flag", "taking the entire process down", "Some NCCL operations have failed", "detected by watchdog at work",
               "signal dumping", "last enqueued"),
        pattern=r"should dump flag|taking the entire process down|Some NCCL operations have failed or timed out|detected by watchdog at work|on this rank to signal "
        r"dumping|last enqueued (?:NCCL )?work", kind="consequence", cause=None, source=_WATCHDOG,
        example="[rank4]:[E304 17:51:12.44 ProcessGroupNCCL.cpp:627] [Rank 4] To avoid data inconsistency, we are taking the entire process down.",
        look_alike="NCCL version 2.20.5+cuda12.4",
    ),
    Signature(
        id="watchdog_heartbeat", hints=("heartbeat", "Heartbeat"),
        pattern=r"[Ww]atchdog(?:'s)? (?:thread )?(?:got stuck|heartbeat|hang)|has not? heartbeat|Heartbeat monitor timed out", kind="consequence", cause=None,
        source=_WATCHDOG + ": the monitor ends a process whose watchdog is stuck, mostly in a CUDA call",
        example="[rank0]:[F304 17:51:12 ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 0] [PG ID 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds "
        "without making progress in monitoring enqueued collectives. Heartbeat monitor timed out!",
        look_alike="heartbeat interval is 30 s",
    ),
    Signature(
        id="nccl_peer_gone", hints=("ncclRemoteError", "NCCL communicator was aborted", "remote process exited"),
        pattern=r"ncclRemoteError: |NCCL communicator was aborted|remote process exited or there was a network error", kind="consequence", cause=None,
        source="NCCL 2.20, src/include/nccl.h by way of torch",
        example="[rank11]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        look_alike="ncclInternalError: Internal check failed.",
    ),
    Signature(
        id="nccl_system_error", hints=("unhandled system error", "ncclSystemError", "unhandled cuda error", "internal error - please report"),
        pattern=r"unhandled system error|ncclSystemError: |NCCL error.{0,160}(?:unhandled cuda error|internal error)", kind="error", cause=None,
        source="NCCL 2.20 by way of torch; with one rank it is single_device_nccl, else look for the WARN above it",
        example="RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, unhandled system error, NCCL version 2.14.3",
        look_alike="a cuda error was handled",
    ),
    Signature(
        id="nccl_out_of_memory", hints=("uda failure", "Failed to CUDA "),
        pattern=r"Cuda failure (?:2 )?'out of memory'|Failed to CUDA (?:host )?(?:m|c)alloc", kind="error", cause="cuda_oom", source="NCCL 2.20, WARN",
        example="node:911:911 [3] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'",
        look_alike="node:911:911 [3] include/alloc.h:178 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'",
        beside=("nccl_warn",),
    ),
    Signature(
        id="nccl_duplicate_gpu", hints=("Duplicate GPU detected",),
        pattern=r"Duplicate GPU detected : rank \d{1,6} and rank \d{1,6} both on CUDA device", kind="error", cause="duplicate_gpu",
        source="NCCL, src/init.cc; " + _ISSUES + "verl-project/verl/issues/161",
        example="node:411:911 [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000",
        look_alike="node:411:911 [0] NCCL INFO comm 0x55 rank 1 nranks 2 cudaDev 1 busId 65000", beside=("nccl_warn",),
    ),
    Signature(
        id="nccl_no_interface", hints=("no socket interface found", "is neither AF_INET", "Bootstrap : Using ", "Bootstrap: Using ", "No interface found in the same subnet", "Unable to find address for", "Unable to find interface"),
        pattern=r"no socket interface found|No interface found in the same subnet|Unable to find (?:address|interface) for: |connecting to address  with family \d{1,9} is neither AF_INET|Bootstrap ?: Using "
        r"(?:\[0\])?(?:docker|virbr|veth|br-|lo:)",
        kind="error", cause="nccl_socket_iface", source="NCCL 2.18, src/bootstrap.cc and misc/socket.cc",
        example="node-b:902:902 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>",
        look_alike="node-a:811:811 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.5<0>",
    ),
    Signature(
        id="ib_completion", hints=("Got completion from peer", "Got completion with error", "ibv_modify_qp", "ibv_reg_mr", "Call to ibv_", "NET/IB"),
        pattern=r"NET/IB ?: Got completion from peer .{0,120}(?:status=|with error )(?:IBV_WC_(?!WR_FLUSH)\w{1,30}|(?!5\b)\d{1,3}\b)|NET/IB ?: Got completion with error (?!5\b)\d{1,3}|Call to ibv_\w{3,24} failed|NET/IB ?: .{0,80}"
        r"(?:port error|Got async event : (?!GID)[\w ]{0,20}error)", kind="error",
        cause="ib_unreachable", source="NCCL, transport/net_ib.cc; " + _ISSUES + "NVIDIA/nccl/issues/1814",
        example="gpu03:5521:5790 [3] transport/net_ib.cc:1322 NCCL WARN NET/IB : Got completion from peer 10.0.1.4<43817> with status=12 opcode=0 len=0 vendor "
        "err 129 (Send)",
        look_alike="gpu03:5521:5790 [3] transport/net_ib.cc:1322 NCCL WARN NET/IB : Got completion from peer 10.0.1.4<43817> with status=5 opcode=0 len=0 vendor "
        "err 249 (Recv)", beside=("nccl_warn",),
    ),
    Signature(
        id="ib_flushed", hints=("Got completion from peer",),
        pattern=r"NET/IB ?: Got completion from peer .{0,120}(?:status=|with error )(?:5\b|IBV_WC_WR_FLUSH)", kind="consequence", cause=None,
        source="NCCL, transport/net_ib.cc: the queue was flushed, since the peer is gone",
        example="gpu03:5521:5790 [3] transport/net_ib.cc:1322 NCCL WARN NET/IB : Got completion from peer 10.0.1.4<43817> with status=5 opcode=0 len=0 vendor "
        "err 249 (Recv)",
        look_alike="gpu03:5521:5790 [3] transport/net_ib.cc:1322 NCCL WARN NET/IB : Got completion from peer 10.0.1.4<43817> with status=12 opcode=0 len=0 vendor "
        "err 129 (Send)", beside=("nccl_warn",),
    ),
    Signature(
        id="p2p_unsupported", hints=("peer access is not supported", "IO_PAGE_FAULT", "peer mapping resources exhausted", "broadband via P2P", "cudaIpcOpenMemHandle"),
        pattern=r"peer access is not supported between these two devices|AMD-Vi: .{0,120}IO_PAGE_FAULT|peer mapping resources exhausted|support faster communication broadband via P2P|"
        r"(?:Error|WARN).{0,60}cudaIpcOpenMemHandle", kind="error", cause="p2p_blocked",
        source="CUDA 12 by way of NCCL; Linux, drivers/iommu/amd",
        example="node:911:911 [3] include/alloc.h:178 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'",
        look_alike="node:911:911 [0] NCCL INFO P2P is disabled between connected GPUs 0 and 1", beside=("nccl_warn",),
    ),
    Signature(
        id="nccl_shm", hints=("shared memory segment", "failed to extend /dev/shm/", "posix_fallocate"),
        pattern=r"Error while (?:creating|attaching to) shared memory segment|failed to extend /dev/shm/|Call to posix_fallocate failed : No space", kind="error", cause="shm_too_small",
        source="NCCL, misc/shmutils.cc; " + _ISSUES + "NVIDIA/nccl-tests/issues/166",
        example="node:411:911 [2] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-mGpr8y to 9637892 bytes",
        look_alike="node:411:911 [2] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", beside=("nccl_warn",),
    ),
    Signature(
        id="nccl_truncated", hints=("Message truncated", "Mismatched NCCL version"),
        pattern=r"Message truncated : received \d{1,12} bytes instead of \d{1,12}|Mismatched NCCL version", kind="error", cause="version_mismatch",
        source="NCCL, misc/socket.cc: another NCCL version, or another message than expected",
        example="node-2:88:88 [0] misc/socket.cc:58 NCCL WARN Message truncated : received 1024 bytes instead of 256",
        look_alike="the log was truncated : 1024 lines", beside=("nccl_warn",),
    ),
    Signature(
        id="nccl_warn", hints=("NCCL WARN",),
        pattern=r"\bNCCL WARN ", kind="warning", cause=None, source="NCCL, every version: `HOST:PID:TID [device] file:line NCCL WARN text`",
        example="node-b:902:1011 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.17.0.1<44123> failed : Connection refused",
        look_alike="node:411:411 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2",
    ),
    Signature(
        id="nccl_connect", hints=("Connect to ", "Call to connect", "socketPollConnect", "socketStartConnect"),
        pattern=r"(?:socketStartConnect|socketPollConnect|NCCL WARN Net|NCCL WARN).{0,60}(?:Connect to .{1,80}(?:failed|returned)|Call to connect.{0,80}(?:failed|returned)).{0,60}(?:refused|No route|timed out|unreachable|abort)",
        kind="error", cause=None, source="NCCL 2.4 to 2.28, misc/socket.cc; " + _ISSUES + "sgl-project/sglang/issues/3820",
        example="node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115(Operation now in progress)",
        look_alike="node5:240:240 [6] NCCL INFO Connected all rings", beside=("nccl_warn",),
    ),
)  # fmt: skip
