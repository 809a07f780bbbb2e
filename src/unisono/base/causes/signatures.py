"""Known log lines and what they indicate, for the logs of running ranks and for `unisono
diagnose`.

The tables are ordered by the program that prints the lines. They judge nothing: the caller weighs
the matches of all logs.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from unisono.base.text import plain

Kind = Literal["warning", "error", "consequence", "progress", "finished", "death"]


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of log line.

    It is a hint and never a verdict: the same words occur in healthy logs, and in logs of affected
    ranks.

    Attributes:
        id: the stable name.
        hints: the line must contain at least one of these strings; checked first, since that is
            fast.
        pattern: a regular expression to search in the line. Every repetition is bounded and none is
            nested, so that its time is bounded, too.
        kind: warning: possibly harmless; error: something failed here; consequence: a different
            rank failed, and this rank noticed or timed out; progress: work continues; finished: the
            work is done; death: how a process ended, reported by its launcher.
        cause: the id of the cause that it indicates; None: none in particular.
        source: the program with its version, or a link.
        example: a line that it must match.
        look_alike: a similar line that it must not match.
        beside: ids of signatures of other causes that match the example, too.
    """

    id: str
    hints: tuple[str, ...]
    pattern: str
    kind: Kind
    cause: str | None
    source: str
    example: str
    look_alike: str
    beside: tuple[str, ...] = ()


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The compiled pattern, on first use: most runs never need most of them."""
    return re.compile(pattern)


_TORCH = "torch 2.13, "
_ELASTIC = _TORCH + "distributed/elastic/multiprocessing"

# fmt: off
LAUNCH_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="port_taken", hints=("EADDRINUSE", "ddress already in use", "another process is utilizing it", "is already in use", "is in use", "is occupied", "is taken"),
        pattern=r"EADDRINUSE|[Aa]ddress already in use|on port `?\d{2,5}`?, but another process is utilizing it|[Pp]ort `?\d{2,5}`? is (?:already )?(?:in use|occupied|taken)", kind="error", cause="port_in_use", source=_TORCH + "libtorch_cpu (TCPStoreLibUvBackend)",
        example="The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, "
        "message: address already in use",
        look_alike="The server socket has started to listen on [::]:29500.",
    ),
    Signature(
        id="rendezvous_timeout", hints=("RendezvousTimeoutError", "RendezvousConnectionError", "store based barrier", "store_based_barrier", "connect() timed out"),
        pattern=r"Rendezvous(?:Timeout|Connection)Error|Timed out initializing process group in store[ _]based[ _]barrier|connect\(\) timed out\. Original timeout", kind="error", cause="rdzv_timeout", source=_TORCH + "distributed/elastic/rendezvous/api.py",
        example="torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        look_alike="Rendezvous complete for workers. Result: restart_count=0 master_addr=node0 master_port=29500",
    ),
    Signature(
        id="clients_joined", hints=("clients joined",),
        pattern=r"Timed out after \d{1,9} seconds waiting for clients\. \d{1,6}/\d{1,6} clients joined", kind="error", cause="rdzv_timeout",
        source=_TORCH + "libtorch_cpu (TCPStore)",
        example="torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined.",
        look_alike="all clients joined after 3 seconds",
    ),
    Signature(
        id="store_unreachable", hints=("while trying to connect to (",),
        pattern=r"client socket has timed out after \d{1,9}m?s? while trying to connect to \((?!127\.)", kind="error", cause="rdzv_timeout",
        source=_TORCH + "libtorch_cpu (socket.cpp)",
        example="torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.11, 29400).",
        look_alike="The client socket has connected to [node0]:29400 on [node1]:51234.",
    ),
    Signature(
        id="store_on_loopback", hints=("(127.", "=127.0.1.1", " 127.0.1.1", "[127.0.1.1"),
        pattern=r"while trying to connect to \(127\.\d{1,3}\.\d{1,3}\.\d{1,3}|connectFullMesh failed .{0,300}addr=127\.0\.1\.1|[ \[]127\.0\.1\.1\]?:\d{1,5}",
        kind="error", cause="hostname_loopback", source=_TORCH + "libtorch_cpu (socket.cpp, gloo); with one node a loopback address is right",
        example="The client socket has timed out after 60000ms while trying to connect to (127.0.1.1, 29500).",
        look_alike="while trying to connect to (10.127.0.1, 29500)",
    ),
    Signature(
        id="name_unknown", hints=("gai error", "gaierror", "Name or service not known", "Temporary failure in name resolution", "Could not resolve hostname", "nodename nor servname", "No address associated with hostname", "getaddrinfo failed", "UnknownHostException"),
        pattern=r"^(?!.{0,1000}(?:https?:|HTTPS?Connection|huggingface|Max retries|wandb)).{0,1000}(?:cannot be retrieved \(gai error: -\d{1,3}|socket\.gaierror|Name or service not known|Temporary failure "
        r"in name resolution|Could not resolve hostname|nodename nor servname provided|No address associated with hostname|getaddrinfo failed|UnknownHostException)",
        kind="error", cause="dns_failure", source=_TORCH + "libtorch_cpu (socket.cpp); glibc. Of IPv6 alone it is harmless",
        example="The IPv4 network addresses of (head-node, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
        look_alike="hostname of the client socket cannot be retrieved. err=-3",
    ),
    Signature(
        id="tasks_per_node", hints=("distributed tasks at:",),
        pattern=r"Initializing \d{1,5} distributed tasks at: ", kind="progress", cause=None, source="LLaMA-Factory, src/llamafactory/launcher.py",
        example="[INFO|2025-03-04 17:41:05] llamafactory.launcher:143 >> Initializing 4 distributed tasks at: 10.0.0.11:29500",
        look_alike="Initializing distributed backend: nccl",
    ),
    Signature(
        id="torchrun_first_failure", hints=("Root Cause (first observed failure)",),
        pattern=r"^\W{0,20}Root Cause \(first observed failure\)", kind="death", cause=None,
        source=_ELASTIC + "/errors: the first that was observed, which is a victim if the culprit still runs",
        example="Root Cause (first observed failure):", look_alike="the root cause is below",
    ),
    Signature(
        id="torchrun_killed", hints=("exitcode",),
        pattern=r"exitcode {1,3}: -(?:4|7|8|9|11) |failed \(exitcode: -(?:4|7|8|9|11)\)", kind="death", cause="rank_died_first",
        source=_ELASTIC + "/errors; -9 with a kernel's word of memory is host_oom_killed",
        example="  exitcode  : -11 (pid: 4412) (SIGSEGV)", look_alike="  exitcode  : -15 (pid: 4411) (SIGTERM)",
    ),
    Signature(
        id="torchrun_aborted", hints=("exitcode",),
        pattern=r"exitcode {1,3}: -6 |failed \(exitcode: -6\)", kind="death", cause=None,
        source=_ELASTIC + "/errors; after a watchdog's line it is what the watchdog did",
        example="  exitcode  : -6 (pid: 2213) (SIGABRT)", look_alike="  exitcode  : -11 (pid: 4412) (SIGSEGV)",
    ),
    Signature(
        id="torchrun_ended", hints=("exitcode", "closing signal SIG", "Signal 15 (SIGTERM) received"),
        pattern=r"exitcode {1,3}: -15 |Sending process \d{1,10} closing signal SIG|Signal 15 \(SIGTERM\) received by PID", kind="consequence",
        cause=None, source=_ELASTIC + "/api.py: the launcher ends those that are left",
        example="W1121 06:02:07.443000 6520 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 6537 closing signal SIGTERM",
        look_alike="  exitcode  : -9 (pid: 6538)  (SIGKILL)",
    ),
    Signature(
        id="torchrun_exit_code", hints=("exitcode",),
        pattern=r"exitcode {1,3}: [1-9]\d{0,2} |failed \(exitcode: [1-9]\d{0,2}\)", kind="death", cause=None, source=_ELASTIC + "/errors",
        example="  exitcode  : 1 (pid: 6540)", look_alike="  exitcode  : -9 (pid: 6538)  (SIGKILL)",
    ),
    Signature(
        id="deepspeed_exit", hints=("exits with return code",),
        pattern=r"exits with return code = (?!0\b)-?\d{1,3}", kind="death", cause=None,
        source="DeepSpeed 0.16, launcher/launch.py: the command is that of the last local rank, never of the dead one",
        example="[2025-03-04 17:51:14,120] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=3'] exits with "
        "return code = -9",
        look_alike="[INFO] [launch.py:350:main] Process 2210 exits successfully.",
    ),
    Signature(
        id="preempted", hints=("DUE TO ", "Node failure on", "reempt", "SignalException", "TERM_RUNLIMIT", "TERM_PREEMPT", "walltime", "Spot ", "spot ", "job time limit", "DeadlineExceeded", "imminent node shutdown", "TaintManager", "MaxRuntimeExceeded", "MaxRuntimeInSeconds", "node was preempted", "timed-out", "timed out. Ran", "PREEMPTED", "TIMEOUT ", "NODE_FAIL", "CANCELLED by"),
        pattern=r"DUE TO (?:PREEMPTION|TIME LIMIT|NODE FAILURE)|srun: error: Node failure on |[Rr]eason: {1,12}Preempt|SignalException: Process \d{1,10} got signal: (?:15|10|12)\b|TERM_(?:RUNLIMIT|PREEMPT)|PBS: job killed: walltime|"
        r"[Ss]pot (?:instance )?interruption|[Ii]nstance (?:is being|was|has been) preempted|[Pp]reempted by (?:a )?(?:pod|node|job|higher)|[Jj]ob (?:was|has been) preempted|DeadlineExceeded|in response to imminent node shutdown|TaintManagerEviction|MaxRuntimeExceeded|[Ee]xceeded MaxRuntimeInSeconds|\b(?:[Rr]unner|VM|[Ww]orker|[Ii]nstance|[Nn]ode|[Pp]od|[Tt]ask|[Mm]achine)s?\b.{0,30} (?:was|has been|have been|is being|been|were) preempted|[Tt]his job is timed-out|Job has timed out\. Ran|^\d{1,12}(?:\.\w{1,10})?[ |].{0,80}\b(?:PREEMPTED|TIMEOUT|NODE_FAIL|CANCELLED by \d{1,9})[ |]{1,20}\d{1,3}:\d", kind="error",
        cause="preempted_sigterm", source="Slurm 23, slurmstepd; Kubernetes events; " + _ELASTIC + "/api.py",
        example="slurmstepd: error: *** STEP 81231.0 ON gpu-04 CANCELLED AT 2025-03-04T19:00:12 DUE TO PREEMPTION ***",
        look_alike="slurmstepd: error: *** STEP 81231.0 ON gpu-04 CANCELLED AT 2025-03-04T19:00:12 ***",
    ),
    Signature(
        id="worker_group_finished", hints=("worker group successfully finished",),
        pattern=r"worker group successfully finished", kind="finished", cause=None, source=_TORCH + "distributed/elastic/agent/server/api.py",
        example="[default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
        look_alike="[default] Worker group FAILED. 1/3 attempts left; will restart worker group",
    ),
    Signature(
        id="worker_group_restarts", hints=("will restart worker group",),
        pattern=r"attempts left; will restart worker group", kind="progress", cause=None, source=_TORCH + "distributed/elastic/agent/server/api.py",
        example="[default] Worker group FAILED. 1/3 attempts left; will restart worker group",
        look_alike="[default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
    ),
    Signature(
        id="cancelled", hints=("CANCELLED AT ", "Job step aborted", "Received 15 death signal", "Received SIGTERM", "received SIGTERM", "Terminated"),
        pattern=r"\*{3} (?:STEP|JOB) \S{1,40} ON \S{1,80} CANCELLED AT \S{1,30}(?! DUE TO)|Job step aborted|Received 15 death signal|[Rr]eceived SIGTERM", kind="consequence", cause=None,
        source="Slurm 23, slurmstepd and srun; " + _ELASTIC + "/api.py: the job was asked to end, perhaps because one of its tasks had failed",
        example="slurmstepd: error: *** STEP 81231.0 ON gpu-04 CANCELLED AT 2025-03-04T19:00:12 ***", look_alike="the order was cancelled",
    ),
    Signature(
        id="connect_failed", hints=("client socket has failed to connect to",),
        pattern=r"client socket has failed to connect to .{1,120}\(errno: (?:110|111|113)", kind="warning", cause=None, source=_TORCH + "libtorch_cpu (socket.cpp); it tries again",
        example="[W socket.cpp:663] [c10d] The client socket has failed to connect to [::ffff:10.0.0.11]:29400 (errno: 110 - Connection timed out).",
        look_alike="The client socket has connected to [node0]:29400 on [node1]:51234.",
    ),
    Signature(
        id="kernel_segfault", hints=("segfault at", "general protection fault", "Segmentation fault", "Bus error", "Illegal instruction", "Caught signal 11", "received signal SIGSEGV", "SIGSEGV received", "SIGBUS received", "Segfault encountered"),
        pattern=r"\[\d{1,10}\]:? (?:segfault at|general protection)|(?:: |\d )(?:Segmentation fault|Bus error|Illegal instruction)\b|Caught signal 11|received signal SIGSEGV|SIG(?:SEGV|BUS) received at time|^Segmentation fault|Segfault encountered", kind="death",
        cause="rank_died_first", source="Linux (dmesg); shells; UCX; abseil in Ray's workers", example="kernel: python[4412]: segfault at 0 ip 00007f1c sp 00007ffd error 4 in libtorch_cuda.so",
        look_alike="segmentation of the image is done", beside=("fatal_python",),
    ),
    Signature(
        id="killed_by_shell", hints=("Killed",),
        pattern=r"(?:^|: line \d{1,6}: {1,4})\d{0,10} {0,12}Killed(?: {2,40}\S.{0,400}|\s{0,4})$", kind="death", cause="rank_died_first", source="bash: SIGKILL, mostly by the kernel for want of memory",
        example="run.sh: line 12: 48211 Killed                  python train.py --config a.yaml", look_alike="Killed process 4416 (python)",
    ),
    Signature(
        id="agent_lost", hints=("keep-alive heartbeat", "RendezvousClosedError", "RendezvousGracefulExitError"),
        pattern=r"has failed to (?:send a|update its) keep-alive heartbeat|Rendezvous(?:Closed|GracefulExit)Error", kind="consequence", cause=None, source=_TORCH + "distributed/elastic/rendezvous",
        example="The node 'gpu01_3112_0' has failed to send a keep-alive heartbeat to the rendezvous 'job1' due to an error of type RendezvousConnectionError.",
        look_alike="keep-alive is 5 s", beside=("rendezvous_timeout",),
    ),
)


_GLOO = _TORCH + "libtorch_cpu (gloo)"

PEERS_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="peer_closed", hints=("Connection closed by peer", "Connection reset by peer", "pair closure", "Connection was likely closed", "closed by remote peer", "Broken pipe"),
        pattern=r"^(?!.{0,600}(?:https?:|HTTPS?Connection)).{0,1400}(?:Connection (?:closed|reset) by (?:remote )?peer|caused pair closure|Connection was likely closed|sendBytes.{0,200}Broken pipe)", kind="consequence", cause=None, source=_GLOO + ", tcp/pair.cc: another rank is gone",
        example="RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:24351",
        look_alike="Connection refused",
    ),
    Signature(
        id="gloo_timeout", hints=("Timed out waiting",),
        pattern=r"Timed out waiting \d{1,10}ms for (?:recv|send) operation(?:s)? to complete", kind="consequence", cause="rank_stalled",
        source=_GLOO + ": a rank did not arrive in time; the reporter had waited",
        example="RuntimeError: [unbound_buffer.cc:80] Timed out waiting 8000ms for recv operation to complete",
        look_alike="Timed out waiting for pending UserRRefs to be confirmed by owner and parent.",
    ),
    Signature(
        id="gloo_sizes", hints=("Received data size doesn't match",),
        pattern=r"Received data size doesn't match expected size", kind="error", cause="collective_mismatch",
        source=_GLOO + ": two ranks are in different collectives; it may also be that one made fewer steps",
        example="RuntimeError: [pair.cc:446] op.preamble.length <= op.nbytes. 4 vs 1. Received data size doesn't match expected size. Is there a "
        "distributed collective mismatch in your code?",
        look_alike="the size of tensor a (4) must match the size of tensor b (8)",
    ),
    Signature(
        id="gloo_no_mesh", hints=("connectFullMesh failed",),
        pattern=r"Gloo connectFullMesh failed with ", kind="consequence", cause=None,
        source=_GLOO + ": a rank left, or its address cannot be reached",
        example="RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        look_alike="[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    ),
    Signature(
        id="store_lost", hints=("recvValue failed", "sendBytes failed", "recvVector failed", "failed to recv, got 0 bytes"),
        pattern=r"(?:recvValue|recvVector|sendBytes) failed on |failed to recv, got 0 bytes", kind="consequence", cause=None,
        source=_TORCH + "libtorch_cpu (TCPStore): rank 0 is gone, or a different program has its port",
        example="[W1121 06:02:07.61 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=60, addr=[localhost]:41234, remote=[localhost]:29500): "
        "failed to recv, got 0 bytes",
        look_alike="recv buffer is 212992 bytes",
    ),
    Signature(
        id="store_wait", hints=("wait timeout after",),
        pattern=r"wait timeout after \d{1,10}ms, keys: ", kind="consequence", cause="rank_stalled", source=_TORCH + "libtorch_cpu (TCPStore)",
        example="torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cpu//1/0",
        look_alike="waiting for keys after a timeout of 5 s",
    ),
    Signature(
        id="mismatch_detected", hints=("Detected mismatch between collectives",),
        pattern=r"Detected mismatch between collectives on ranks", kind="error", cause="collective_mismatch",
        source=_TORCH + "libtorch_cpu (ProcessGroupWrapper), with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        example="RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=41, "
        "OpType=ALLREDUCE)",
        look_alike="size mismatch for lm_head.weight",
    ),
    Signature(
        id="barrier_guesses_device", hints=("used by this process", "Guessing device ID based on global rank", "No device id is provided via"),
        pattern=r"using (?:best-guess )?GPU \d{1,3} (?:to perform barrier )?as devices? used by this process (?:is|are) currently unknown|Guessing device ID based on "
        r"global rank|No device id is provided via .init_process_group. or .barrier", kind="warning", cause="device_unbound_barrier",
        source="torch 1.9 to 2.13, ProcessGroupNCCL.cpp; printed in healthy runs, too",
        example="[rank3]:[W304 17:41:02 ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID 0 Rank 3]  using GPU 3 to perform barrier as devices used by this "
        "process are currently unknown.",
        look_alike="using GPU 3 for rank 3",
    ),
    Signature(
        id="gradients_missing", hints=("Expected to have finished reduction", "did not receive grad for rank", "Expected to mark a variable ready only once", "parameters that were not used in producing the loss",
               "training graph has changed"),
        pattern=r"Expected to have finished reduction in the prior iteration|Parameter indices which did not receive grad for rank|Expected to mark a variable "
        r"ready only once|has parameters that were not used in producing the loss|Your training graph has changed in this iteration", kind="error", cause="unused_parameters_ddp", source=_TORCH + "libtorch_python (reducer.cpp)",
        example="Parameter indices which did not receive grad for rank 0: 4 5",
        look_alike="find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the forward pass.",
    ),
    Signature(
        id="group_is_none", hints=("assert pg is not None", "Process group cannot be None"),
        pattern=r"assert pg is not None|Process group cannot be None", kind="error", cause="process_group_destroyed_twice",
        source=_TORCH + "distributed/distributed_c10d.py",
        example="AssertionError: Process group cannot be None", look_alike="Default process group has not been initialized, please make sure to call init_process_group.",
        beside=("python_error",),
    ),
    Signature(
        id="group_not_destroyed", hints=("destroy_process_group() was not called", "process group has NOT been destroyed"),
        pattern=r"destroy_process_group\(\) was not called|process group has NOT been destroyed", kind="warning", cause=None,
        source=_TORCH + "ProcessGroupNCCL.cpp; at the end of healthy runs, too",
        example="[rank0]:[W304 17:51:12 ProcessGroupNCCL.cpp:1479] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak "
        "resources.",
        look_alike="destroying the process group",
    ),
    Signature(
        id="terminated_at_exit", hints=("terminate called without an active exception",),
        pattern=r"terminate called without an active exception", kind="error", cause="teardown_crash",
        source="libstdc++: a thread that was still at work when its process left",
        example="terminate called without an active exception", look_alike="terminate called after throwing an instance of 'c10::Error'",
    ),
    Signature(
        id="timed_out_work", hints=("Timeout at NCCL work", "collective timeout from rank", "dump signal from another rank", "wait execution of the Notify register"),
        pattern=r"Timeout at NCCL work: \d{1,10}|due to a collective timeout from ?rank \d{1,6}|flight recorder dump signal from another rank|wait execution of the Notify register "
        r"times? out", kind="consequence", cause="rank_stalled", source="torch 2.4 to 2.13, ProcessGroupNCCL.cpp; Ascend's HCCL, EI0002",
        example="[rank2]:[E820 10:00:01 ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Timeout at NCCL work: 22, last enqueued NCCL work: 25, last completed NCCL work: 21.",
        look_alike="NCCL work 22 is done", beside=("watchdog_follows",),
    ),
    Signature(
        id="barrier_not_passed", hints=("monitoredBarrier",),
        pattern=r"failed to pass monitoredBarrier in \d{1,10} ?ms", kind="consequence", cause="rank_stalled", source=_TORCH + "ProcessGroupGloo.cpp; it names who did not come",
        example="[Rank 0]: Rank 3 failed to pass monitoredBarrier in 1800000 ms", look_alike="monitoredBarrier is only for gloo",
    ),
    Signature(
        id="nccl_aborted", hints=("aborted on rank", "communicator was abort", "NCCL comm"),
        pattern=r"NCCL communicator (?:was |has been )?abort|NCCL communicator was aborted on rank \d{1,6}|process group .{0,60}was aborted", kind="consequence", cause=None,
        source="torch 1.9 to 2.13, NCCLUtils.hpp", example="RuntimeError: NCCL communicator was aborted on rank 1.", look_alike="NCCL communicator is ready",
    ),
)


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
        id="gloo_unreachable", hints=("Network is unreachable", "No route to host"),
        pattern=r"gloo/transport/tcp/.{0,240}(?:Network is unreachable|No route to host)", kind="error", cause="nccl_socket_iface",
        source="gloo, transport/tcp/socket.cc: the address that another rank gave belongs to a network that this host does not reach",
        example="RuntimeError: [enforce fail at gloo/transport/tcp/socket.cc:142] rv != -1. -1 vs -1. connect: Network is unreachable",
        look_alike="OSError: [Errno 101] Network is unreachable",
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
        source="NCCL, misc/socket.cc: a different NCCL version, or a different message than expected",
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
)


PROGRAM_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="traceback", hints=("Traceback (most recent call last)",),
        pattern=r"Traceback \(most recent call last\):", kind="error", cause=None, source="CPython: what it is stands in the last line",
        example="[rank1]: Traceback (most recent call last):", look_alike="traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    ),
    Signature(
        id="python_error", hints=("Error: ", "Exception: "),
        pattern=r"(?:^|\]:? {1,3}|\)(?:\x1b\[0m)? {1,3})(?:KeyError|IndexError|ValueError|TypeError|AttributeError|ZeroDivisionError|AssertionError|NameError|"
        r"UnicodeDecodeError|jinja2\.exceptions\.TemplateError|json\.decoder\.JSONDecodeError): ",
        kind="error", cause="user_code_error", source="CPython; the exceptions that a program's own code and data raise",
        example="[rank1]: KeyError: 'labels'", look_alike="WARNING: a KeyError was caught and ignored",
    ),
    Signature(
        id="exception", hints=("Error: ", "Exception: "),
        pattern=r"(?:^|\]:? {1,3}|\)(?:\x1b\[0m)? {1,3})(?:[A-Za-z_][\w.]{0,120})?(?:Error|Exception): ", kind="error", cause=None,
        source="CPython: the last line of a traceback, whatever was raised",
        example="[rank3]: RuntimeError: Message role is unexpected", look_alike="slurmstepd: error: *** STEP 81231.0 ON gpu-04 CANCELLED",
    ),
    Signature(
        id="index_outside_table", hints=("index out of range in self", "srcIndex < srcSelectDimSize", "vectorized_gather_kernel", "indexSelectLargeIndex",
               "indexSelectSmallIndex", "vectorized gather kernel index out of bounds"),
        pattern=r"index out of range in self|vectorized gather kernel index out of bounds|srcIndex < srcSelectDimSize|vectorized_gather_kernel.{0,300}Assertion|indexSelect(?:Large|Small)Index.{0,300}Assertion",
        kind="error", cause="tokenizer_mismatch", source=_TORCH + "libtorch_cpu (Embedding.cpp), Indexing.cu: an id beyond the embedding",
        example="../aten/src/ATen/native/cuda/Indexing.cu:1292: indexSelectLargeIndex: block: [41,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        look_alike="IndexError: Target 12 is out of bounds.",
    ),
    Signature(
        id="device_assert", hints=("device-side assert triggered",),
        pattern=r"CUDA error: device-side assert triggered", kind="error", cause=None, source="CUDA 12: which assertion stands above",
        example="RuntimeError: CUDA error: device-side assert triggered", look_alike="CUDA error: out of memory",
    ),
    Signature(
        id="loss_is_nan", hints=("nan", "NaN", "NAN", "in local", "found invalid values", "probably exploding", "norm", "loss", "on-finite"),
        pattern=r"(?:[Ll]oss|grad[_ ]norm)['\"]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?(?:nan|NaN|inf)\b(?!\w)|returned nan values in its|contains either `?inf`?, `?nan`?|[Ll]oss is (?:nan|NaN|NAN)|"
        r"found (?:NaN|Inf|nan|inf) in local|NaN detected in|The loss returned in .{0,40} is nan|found invalid values:|Detected nan/inf|loss is probably exploding|[Nn]on-finite (?:loss|gradient|grad norm)|[Ll]oss (?:is|became) (?:infinite|Infinite) or [Nn]a[Nn]|Loss is (?:inf|-inf)\b, stopping", kind="error",
        cause="nan_loss", source="transformers 5.23, Trainer; torch anomaly mode; generation",
        example="{'loss': '0.0', 'grad_norm': 'nan', 'learning_rate': '9.1e-06', 'epoch': '0.61'}",
        look_alike="{'loss': '1.8430', 'grad_norm': '1.247434', 'learning_rate': '1.5950e-04', 'epoch': '0.61'} financial",
    ),
    Signature(
        id="loss_scale_at_minimum", hints=("loss scale already at minimum", "Minimum loss scale reached"),
        pattern=r"Current loss scale already at minimum|Minimum loss scale reached", kind="error", cause="nan_loss", source="DeepSpeed, runtime/fp16/loss_scaler.py",
        example="Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        look_alike="[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    ),
    Signature(
        id="loss_scale_falls", hints=("Skipping step",),
        pattern=r"OVERFLOW! Rank \d{1,6} Skipping step", kind="warning", cause=None, source="DeepSpeed, runtime/fp16/loss_scaler.py: a few are normal",
        example="[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768", look_alike="Skipping step 12: already done",
    ),
    Signature(
        id="fatal_python", hints=("Fatal Python error", "Segmentation fault", "Bus error"),
        pattern=r"Fatal Python error: |Segmentation fault \(core dumped\)|Bus error \(core dumped\)", kind="death", cause="rank_died_first",
        source="CPython's faulthandler; shells", example="Fatal Python error: Segmentation fault", look_alike="segmentation of the image is done",
    ),
)


MACHINE_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="cuda_out_of_memory", hints=("out of memory", "STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation", "NVML_SUCCESS == r", "Out of memory", "OOM when allocating", "OUT_OF_MEMORY", "hipErrorOutOfMemory", "OUT_OF_DEVICE_MEMORY", "GPU memory utilization",
               "memory for the cache blocks", "Error 2: out of memory"),
        pattern=r"(?:CUDA|HIP|NPU|XPU|MPS backend|MLU|MUSA) out of memory|(?:CUDA|HIP|CUDA driver) error: out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|NVML_SUCCESS == r INTERNAL|"
        r"Triton Error \[CUDA\]: out of memory|^Error out of memory at line|RESOURCE_EXHAUSTED.{0,80}[Oo]ut of memory|OOM when allocating tensor|[Oo]ut of memory error on GPU|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|"
        r"OUT_OF_DEVICE_MEMORY|less than desired GPU memory utilization|No available memory for the cache blocks", kind="error", cause="cuda_oom",
        source=_TORCH + "CUDACachingAllocator.cpp; recovered from where batch sizes are searched",
        example="[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 1 has a total capacity of 23.65 GiB of which 1.02 GiB is "
        "free.",
        look_alike="CUDA memory allocated: 4.64 GiB of 23.65 GiB",
    ),
    Signature(
        id="allocator_retries", hints=("pytorch allocator cache flushes", "expandable_segments not supported"),
        pattern=r"\d{1,9} pytorch allocator cache flushes since last step", kind="warning", cause=None,
        source="DeepSpeed 0.16, runtime/engine.py: memory is so short that every step waits for it",
        example="[WARNING] [stage3.py:2114:step] 3 pytorch allocator cache flushes since last step. this happens when there is high memory pressure",
        look_alike="torch.cuda.empty_cache() was called",
    ),
    Signature(
        id="host_memory_gone", hints=("DefaultCPUAllocator", "Cannot allocate memory", "MemoryError", "std::bad_alloc", "subprocesses has abruptly died", "TerminatedWorkerError"),
        pattern=r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|\[Errno 12\] Cannot allocate memory|(?:^|\W)(?:_Array)?MemoryError(?:: |$)|std::bad_alloc|subprocesses has abruptly died during map|TerminatedWorkerError: ", kind="error", cause="host_oom_killed",
        source=_TORCH + "libc10 (CPUAllocator)",
        example="RuntimeError: [enforce fail at alloc_cpu.cpp:122] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000000000 bytes.",
        look_alike="DefaultCPUAllocator reserves 4096 bytes",
    ),
    Signature(
        id="kernel_out_of_memory", hints=("Killed process ", "oom-kill", "OOMKilled", "oom_kill", "oom_reaper", "Out Of Memory", "OOM Killed", "memory limit", "low on resource: memory", "TERM_MEMLIMIT", "exceeded limit", "Perhaps out of memory", "OUT_OF_ME", "emory usage limit"),
        pattern=r"Killed process \d{1,10}\b|oom-kill(?::|\s{0,2}event)|OOMKilled|oom_kill [1-9]\d{0,8}\b|oom_kill events?|invoked oom-killer|oom_reaper: reaped|: Out Of Memory|OOM Killed|[Ee]xceeded (?:step |job )?memory limit|low on "
        r"resource: memory|TERM_MEMLIMIT|\bv?mem \S{1,20} exceeded limit|Perhaps out of memory\?|\bOUT_OF_ME(?:\+|MORY)|gone over (?:cgroup )?memory limit|reaching LSF memory usage limit|[Mm]emory (?:usage )?limit (?:was |has been )?(?:exceeded|reached)", kind="error", cause="host_oom_killed",
        source="Linux, mm/oom_kill.c (dmesg); Kubernetes; Slurm",
        example="[Tue Mar  4 17:51:02 2025] Memory cgroup out of memory: Killed process 4416 (python) total-vm:98211440kB, anon-rss:61283312kB",
        look_alike="Killed by user request",
    ),
    Signature(
        id="loader_killed", hints=("DataLoader worker (pid",),
        pattern=r"DataLoader worker \(pid \d{1,10}\) is killed by signal: (?:Killed|9)", kind="error", cause="host_oom_killed", source=_TORCH + "csrc/DataLoader.cpp",
        example="RuntimeError: DataLoader worker (pid 5123) is killed by signal: Killed. ",
        look_alike="RuntimeError: DataLoader worker (pid(s) 5123) exited unexpectedly",
    ),
    Signature(
        id="disk_is_full", hints=("No space left on device", "[Errno 28]", "StorageFull", "Disk quota exceeded", "PytorchStreamWriter failed", "iostream error", "unexpected pos ", "Errno 122", "resource: ephemeral-storage"),
        pattern=r"^(?!.{0,1000}(?:/dev/shm|shared memory|/torch_)).{0,1500}(?:No space left on device|\[Errno 28\]|StorageFull|Disk quota exceeded|"
        r"PytorchStreamWriter failed writing file|basic_ios::clear: iostream error|inline_container\.cc.{0,40}unexpected pos|\[Errno 122\]|resource: ephemeral-storage)", kind="error", cause="disk_full",
        source="Linux; safetensors 0.8; " + _TORCH + "libtorch_cpu (inline_container.cc)",
        example="OSError: [Errno 28] No space left on device: '/data/checkpoint-200/model.safetensors'",
        look_alike="RuntimeError: unable to allocate shared memory(shm) for file </torch_6_1>: No space left on device (28)",
    ),
    Signature(
        id="shm_is_full", hints=("shared memory", "dev/shm", "</torch_", "Bus error"),
        pattern=r"insufficient shared memory \(shm\)|out of shared memory|killed by signal: Bus error|unable to write to file </torch_|unable to (?:allocate|open|write to) shared memory ?(?:\(shm\) for file|object) <[^>]{0,300}>(?!.{0,300}Too many open)"
        r"|No space left on device: '?/dev/shm|Bus error .{0,80}shared memory", kind="error", cause="shm_too_small", source=_TORCH + "libtorch_cpu (MapAllocator)",
        example="RuntimeError: unable to allocate shared memory(shm) for file </torch_6_1>: No space left on device (28)",
        look_alike="RuntimeError: unable to open shared memory object </torch_77_1> in read-write mode: Too many open files (24)",
    ),
    Signature(
        id="too_many_files", hints=("Too many open files", "items of ancdata", "can't start new thread", "pthread_create failed", "Thread creation failed", "Resource temporarily unavailable"),
        pattern=r"Too many open files|received 0 items of ancdata|can't start new thread|pthread_create failed|Thread creation failed|(?:fork|Errno 11).{0,60}Resource temporarily unavailable", kind="error", cause="ulimit", source="Linux, EMFILE; also inside torch's words on shared memory",
        example="RuntimeError: unable to open shared memory object </torch_77_1> in read-write mode: Too many open files (24)",
        look_alike="unable to mmap 1024 bytes",
    ),
    Signature(
        id="file_size_limit", hints=("File too large", "File size limit exceeded", "os error 27", "SIGXFSZ"),
        pattern=r"Errno 27\] File too large|^\S{0,300}File too large$|File size limit exceeded|\(os error 27\)|SIGXFSZ", kind="error", cause="ulimit", source="Linux, EFBIG and SIGXFSZ; bash and sh for the signal",
        example="OSError: [Errno 27] File too large: '/runs/a/checkpoints/step-00000100.tmp-1/trainable.safetensors'",
        look_alike="the request was refused: 413 Payload Too Large",
    ),
    Signature(
        id="xid_off_the_bus", hints=("fallen off the bus", "Unable to determine the device handle", "GPU is lost", "GpuIsLost", "NVRM: Xid"),
        pattern=r"GPU has fallen off the bus|Unable to determine the device handle for (?:GPU|gpu)|GPU is lost|NVMLError_GpuIsLost|NVRM: Xid \(PCI:[0-9a-fA-F:.]{1,20}\): (?:79|119|120|74)\b", kind="error", cause="gpu_fell_off",
        source="NVIDIA driver, Xid 79 (dmesg); nvidia-smi",
        example="kernel: [918273.114] NVRM: Xid (PCI:0000:9c:00): 79, pid=4414, name=python, GPU has fallen off the bus.",
        look_alike="NVRM: Xid (PCI:0000:9c:00): 31, pid=4414, name=python, Ch 00000008, MMU Fault", beside=("xid",),
    ),
    Signature(
        id="xid_memory", hints=("NVRM: Xid", "uncorrectable ECC error", "ouble Bit", "ouble bit"),
        pattern=r"NVRM: Xid \(PCI:[0-9a-fA-F:.]{1,20}\): (?:48|63|64|92|94|95)\b|uncorrectable ECC error|[Dd]ouble [Bb]it (?:ECC )?[Ee]rror", kind="error", cause="ecc_error",
        source="NVIDIA driver, Xid 48, 63, 64, 92, 94, 95 (dmesg); CUDA 12",
        example="RuntimeError: CUDA error: uncorrectable ECC error encountered",
        look_alike="NVRM: Xid (PCI:0000:9c:00): 13, pid=4414, Graphics Exception",
    ),
    Signature(
        id="xid", hints=("NVRM: Xid",),
        pattern=r"NVRM: Xid \(PCI:[0-9a-fA-F:.]{1,20}\): (?!(?:48|63|64|92|94|95)\b)\d{1,4}", kind="warning", cause=None,
        source="NVIDIA driver (dmesg); https://docs.nvidia.com/deploy/xid-errors",
        example="NVRM: Xid (PCI:0000:9c:00): 31, pid=4414, name=python, Ch 00000008, MMU Fault",
        look_alike="NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    ),
    Signature(
        id="driver_old", hints=("too old (found version", "CUDA driver version is insufficient", "forward compatibility was attempted", "please update your driver", "compiled with an unsupported toolchain", "unsupported display driver"),
        pattern=r"driver on your system is too old \(found version|CUDA driver version is insufficient for CUDA runtime version|forward compatibility was attempted on non supported|please update your driver|PTX was compiled with an "
        r"unsupported toolchain|unsupported display driver", kind="error",
        cause="driver_too_old", source=_TORCH + "cuda/__init__.py and libtorch_python",
        example="RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        look_alike="Found no NVIDIA driver on your system.",
    ),
    Signature(
        id="arch_missing", hints=("no kernel image is available", "is not compatible with the current PyTorch", "device kernel image is invalid", "Unsupported gpu architecture", "only supports Ampere GPUs"),
        pattern=r"no kernel image is available for execution on the device|with CUDA capability sm_\d{1,4} is not compatible with the current PyTorch installation|device kernel image is invalid|"
        r"Unsupported gpu architecture|FlashAttention only supports Ampere GPUs or newer",
        kind="error", cause="cuda_arch_unsupported", source=_TORCH + "cuda/__init__.py; CUDA 12",
        example="RuntimeError: CUDA error: no kernel image is available for execution on the device",
        look_alike="The current PyTorch install supports CUDA capabilities sm_80 sm_90.",
    ),
    Signature(
        id="cuda_missing", hints=("not compiled with CUDA", "have NCCL built in", "No supported gpu backend found", "_cuda_setDevice", "No CUDA GPUs are available", "Found no NVIDIA driver", "no GPUs found!", "deserialize object on a CUDA device", "No GPU found", "No GPUs", "no GPU", "NVML: Unknown Error",
               "libcuda.so.1: cannot open", "could not select device driver", "CUDA unknown error"),
        pattern=r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|(?:Error|Exception): .{0,60}\b[Nn]o (?:CUDA )?GPUs? (?:was |were |is |are )?(?:found|available|detected)(?!.{0,60}quantization)|Failed to initialize NVML: Unknown Error|Found no NVIDIA driver on your system|no GPUs found!|Attempting to deserialize object on a CUDA device but|libcuda\.so\.1: cannot open|"
        r"could not select device driver|CUDA unknown error - this may be due to|Distributed package doesn't have NCCL built in|No supported gpu backend found|has no attribute "
        r"'_cuda_setDevice'", kind="error", cause="no_cuda_build", source=_TORCH + "cuda/__init__.py, distributed_c10d.py; Lightning 2.6",
        example="RuntimeError: Distributed package doesn't have NCCL built in",
        look_alike="CUDA is not available: training on CPU",
    ),
    Signature(
        id="ordinal", hints=("invalid device ordinal", "But your machine only has", "nvalid device id", "ordinal out of range"),
        pattern=r"(?:CUDA|HIP) error: invalid device ordinal|But your machine only has: |(?:AssertionError|RuntimeError): Invalid device id", kind="error", cause="invalid_device_ordinal", source="CUDA 12 by way of torch",
        example="[rank6]: torch.AcceleratorError: CUDA error: invalid device ordinal", look_alike="CUDA device ordinal 6 selected",
    ),
    Signature(
        id="launch_failure", hints=("CUDA error: ",),
        pattern=r"CUDA error: (?:unspecified launch failure|an illegal memory access|misaligned address|an illegal instruction)", kind="error", cause=None,
        source="CUDA 12: of a kernel, or of a device that is about to fail; dmesg shows which",
        example="[rank3]: RuntimeError: CUDA error: unspecified launch failure", look_alike="CUDA error: device-side assert triggered",
    ),
)


_TRANSFORMERS = "transformers 5.23"
_NO_HUB = r"^(?!.{0,600}ConnectionPool\(host='(?:\d{1,3}\.|localhost|[\w-]{1,60}'|[\w.-]{1,80}\.(?:svc|local|internal|lan|cluster)\b|[\w.-]{0,40}(?:wandb|mlflow|comet|neptune))).{0,1400}"
"""Not of a server of one's own, nor of one that takes down metrics."""

FILES_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="checkpoint_not_there", hints=("tmp-checkpoint-", "zero_pp_rank_", "A local path on the head node", "zero checkpoints paths are missing", ".distcp"),
        pattern=r"No such file or directory: '[^']{0,300}tmp-checkpoint-\d{1,9}[/']|(?:No such file|not found|does not exist|missing).{0,200}zero_pp_rank_\d{1,6}|zero_pp_rank_\d{1,6}\S{0,200} "
        r"(?:not found|does not exist|is missing)|A local path on the head node is not accessible|zero checkpoints paths are missing|No such file or directory.{0,300}__\d{1,6}_\d{1,6}\.distcp", kind="error", cause="checkpoint_not_shared",
        source="https://github.com/huggingface/transformers/issues/27925; DeepSpeed; Ray Train 2",
        example="FileNotFoundError: [Errno 2] No such file or directory: 'saves/tmp-checkpoint-200' -> 'saves/checkpoint-200'",
        look_alike="Saving model checkpoint to saves/tmp-checkpoint-200",
    ),
    Signature(
        id="file_is_damaged", hints=("Error while deserializing header", "failed finding central directory", "PytorchStreamReader failed", "trainer_state.json",
               "MetadataIncompleteBuffer", "HeaderTooLarge", "InvalidHeader", "invalid load key", "might be corrupted", "Ran out of input", "find a valid checkpoint at", "without having git-lfs",
               "Unable to load weights from pytorch checkpoint", "Consistency check failed", "pickle data was truncated", "archive is corrupted", "stack underflow", "unexpected EOF"),
        pattern=r"Error while deserializing header|HeaderTooLarge|InvalidHeader(?:Deserialization|Length|Start)?|invalid load key, |might be corrupted|pickle data was truncated|archive is corrupted|unpickling stack underflow|unexpected EOF, expected \d{1,15} more bytes|EOFError: Ran out of input|Can.t find a valid checkpoint at|without having git-lfs|"
        r"Unable to load weights from pytorch checkpoint|Consistency check failed: file should be|MetadataIncompleteBuffer|failed finding central directory|PytorchStreamReader failed reading|No such file or "
        r"directory: '[^']{0,300}trainer_state\.json'", kind="error", cause="corrupt_checkpoint",
        source="safetensors 0.8; torch 2.13, libtorch_cpu (inline_container.cc); " + _TRANSFORMERS,
        example="safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        look_alike="Loading checkpoint shards: 100%",
    ),
    Signature(
        id="checkpoint_differs", hints=("size mismatch for ", "Missing key(s) in state_dict", "Unexpected key(s) in state_dict", "ignore_mismatched_sizes", "DP world size", "doesn't match the size of optimizer", "different number of parameter groups",
               "Missing key in checkpoint", "Size mismatch between saved"),
        pattern=r"size mismatch for [\w.]{1,200}: copying|doesn't match the size of optimizer's group|different number of parameter groups|Missing key in checkpoint state_dict|Size mismatch between saved|(?:Missing|Unexpected) key\(s\) in state_dict: |You set `ignore_mismatched_sizes` to `False`|used a DP world "
        r"size of \d{1,6} but", kind="error", cause="checkpoint_mismatch",
        source="torch 2.13, nn/modules/module.py; peft 0.21; " + _TRANSFORMERS + "; https://github.com/deepspeedai/DeepSpeed/issues/6441",
        example="\tsize mismatch for base_model.model.lm_head.lora_A.default.weight: copying a param with shape torch.Size([8, 64]) from checkpoint, the shape in "
        "current model is torch.Size([16, 64]).",
        look_alike="Some weights were not used when initializing the model: ['lm_head.weight']",
    ),
    Signature(
        id="cache_race", hints=(".arrow", "ArrowInvalid", "Stale file handle", ".incomplete"),
        pattern=r"(?:No such file or directory|FileNotFoundError).{0,300}cache-[0-9a-z_]{1,64}\.arrow|ArrowInvalid: .{0,200}(?:Tried reading|not an Arrow file|Expected to "
        r"read)|Stale file handle|(?:Directory not empty|File exists|No such file or directory|FileExistsError).{0,200}\.incomplete", kind="error", cause="dataset_cache_race", source="datasets 5, pyarrow 26; NFS",
        example="FileNotFoundError: [Errno 2] No such file or directory: '/data/cache/cache-7b1e6c0a.arrow'",
        look_alike="Loading cached processed dataset at /data/cache/cache-7b1e6c0a.arrow",
    ),
    Signature(
        id="versions_differ", hints=("is required for a normal functioning", "undefined symbol", "Version mismatch: The cluster", "does not recognize this architecture", "cannot import name", "has no attribute", "size changed, may indicate",
               "GLIBC", "does not match the version torch was compiled with", "compiled with different CUDA", "mismatches the version that was used to compile", "torchvision::nms", "Driver/library version mismatch", "cannot open shared object file",
               "Numpy is not available"),
        pattern=r"is required for a normal functioning of this module, but found|: undefined symbol: |Version mismatch: The cluster was started with|but Transformers "
        r"does not recognize this architecture|ImportError: cannot import name '\w{1,80}' from '(?:transformers|torch|peft|accelerate|trl|datasets|deepspeed|huggingface_hub|tokenizers|diffusers|bitsandbytes|numpy|pyarrow|lightning|"
        r"pytorch_lightning|ray)\b|AttributeError: module '(?:transformers|torch|peft|accelerate|trl|datasets|deepspeed|numpy|ray)[\w.]{0,80}' has no attribute '(?!_cuda_setDevice)|size changed, may indicate binary incompatibility|"
        r"version `GLIBC(?:XX)?_[\d.]{1,12}' not found|does not match the version torch was compiled with|compiled with different CUDA|mismatches the version that was used to compile|operator torchvision::nms does not exist|"
        r"Driver/library version mismatch|(?:ImportError|OSError): lib(?!cuda\.so)(?:cu|nv|nccl|c10|torch|stdc)[\w+-]{0,40}\.so[\d.]{0,12}: cannot open shared object file|Numpy is not available", kind="error", cause="version_mismatch", source=_TRANSFORMERS + ", utils/versions.py; ld.so; Ray 2.60",
        example="ImportError: transformers>=5.30 is required for a normal functioning of this module, but found transformers==5.23.0.",
        look_alike="a newer version of transformers is available",
    ),
    Signature(
        id="module_missing", hints=("No module named ", "not found in your environment", "No package metadata was found", "PackageNotFoundError", "requires `accelerate", "requires Accelerate", "CUDA_HOME does not exist", "Ninja is required", "command not found", "to be installed"),
        pattern=r"(?:ModuleNotFoundError|ImportError): .{0,100}No module named (?!'flash_attn)|: No module named \w{1,60}$|requires the \w{1,40} library but it was not found|packages that were not found in your environment: (?!flash_attn)|No package metadata was found for "
        r"(?!.{0,20}bitsandbytes)|ImportError: Using .{0,120}requires .{0,4}[Aa]ccelerate|(?:Error|Exception): .{0,120}\b(?:requires|needs) (?!flash|FlashAttention).{1,60} to be installed\b|CUDA_HOME does not exist|Ninja is required to load|: (?:torchrun|deepspeed|accelerate|llamafactory-cli|python3?): command not found", kind="error", cause="missing_dependency", source="CPython",
        example="ModuleNotFoundError: No module named 'deepspeed'", look_alike="import deepspeed",
    ),
    Signature(
        id="flash_attention", hints=("FlashAttention", "flash_attn", "flash-attn", "Flash Attention"),
        pattern=r"FlashAttention\d? has been toggled on|packages that were not found in your environment: flash_attn|Flash Attention 2 is not available|package flash_attn seems to be not installed|No module named 'flash_attn", kind="error",
        cause="flash_attn_missing", source=_TRANSFORMERS + ", modeling_utils.py",
        example="ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed.",
        look_alike="Using FlashAttention2",
    ),
    Signature(
        id="bitsandbytes", hints=("CUDA Setup failed despite", "bitsandbytes", "CUDA SETUP", "GPU is needed", "GPU is required", "cget_managed_ptr", "cquantize", "str2optimizer", "cget_col_row_stats"),
        pattern=r"CUDA Setup failed despite (?:CUDA|GPU) being available|bitsandbytes was compiled without GPU support|No package metadata was found for bitsandbytes|Using "
        r"`bitsandbytes` \d?-?bit quantization requires|bitsandbytes library load error|None of the available devices.{0,80}are supported by the bitsandbytes|has no attribute 'c(?:get_managed_ptr|quantize)|name 'str2optimizer|cget_col_row_stats|Could not find the "
        r"bitsandbytes CUDA binary|GPU is (?:needed|required) for quantization|CUDA is required but not available for bitsandbytes", kind="error", cause="bnb_no_gpu",
        source="bitsandbytes 0.4x, cuda_setup/main.py; " + _TRANSFORMERS,
        example="        CUDA Setup failed despite GPU being available. Please run the following command to get more information:",
        look_alike="bitsandbytes 0.43.1 loaded",
    ),
    Signature(
        id="hub_away", hints=("We couldn't connect to", "Max retries exceeded", "OfflineModeIsEnabled", "outgoing traffic has been disabled", "LocalEntryNotFoundError", "Couldn't reach", "Read timed out", "cannot find the requested files in the",
               "Too Many Requests", "Server Error", "ConnectTimeout", "ConnectError"),
        pattern=_NO_HUB + r"(?:We couldn't connect to '?https?://|LocalEntryNotFoundError|Couldn't reach .{1,200}(?:Hub|https?:)|HTTPSConnectionPool\(host=.{1,120}Read timed out|cannot find the requested files in the|HTTPError: (?:429|50\d) (?:Client|Server) Error|"
        r"(?:httpx2?|httpcore2?)\.Connect(?:Timeout|Error)|Max retries exceeded with url|OfflineModeIsEnabled|outgoing traffic has been disabled)", kind="error",
        cause="hub_unreachable", source=_TRANSFORMERS + ", utils/hub.py; urllib3; huggingface_hub 2.4",
        example="OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
        look_alike="Downloading model.safetensors: 100%",
    ),
    Signature(
        id="gated", hints=("gated repo", "GatedRepoError", "is restricted", "awaiting a review", "Invalid user token", "Invalid credentials in Authorization", "gated dataset", "Token is required", "Unauthorized for url: https://huggingface"),
        pattern=r"Cannot access gated repo|[Yy]ou are trying to access a gated repo|GatedRepoError|Access to (?:model|dataset) \S{1,120} is restricted|is awaiting a review from the repo|Invalid user token|Invalid credentials in "
        r"Authorization|is a gated dataset|Token is required \(`token=True`\)|Unauthorized for url: https://huggingface\.co/(?!.{0,400}Repository Not Found)", kind="error", cause="gated_model",
        source="huggingface_hub 2.4, utils/_http.py",
        example="Cannot access gated repo for url https://huggingface.co/api/models/ardent-figment/gated-model.", look_alike="this repository was gated in 2023",
    ),
    Signature(
        id="model_not_there", hints=("Repo id must", "does not appear to have a file named", "is not a local folder and is not a valid model identifier", "Incorrect path_or_model_id", "Can't load ", "Unrecognized model in", "Error no file named",
               "Can't find 'adapter_config.json'", "vocabulary file at path", "Repository Not Found", "RepositoryNotFoundError", "EntryNotFoundError", "RevisionNotFoundError"),
        pattern=r"Repo id must (?:be in the form|use alphanumeric)|does not appear to have a file named|is not a local folder and is not a valid model identifier|Incorrect path_or_model_id|"
        r"Can't load (?:the )?(?:configuration|config|tokenizer|model|feature extractor|image processor|processor)(?: of| for)? '|Unrecognized model in|Error no file named .{1,200}found in directory|Can't find 'adapter_config\.json'|"
        r"find a vocabulary file at path|Repository Not Found for url|(?<!Local)(?:Repository|Entry|Revision)NotFoundError",
        kind="error", cause="model_path_missing", source="huggingface_hub 2.4, utils/_validators.py; " + _TRANSFORMERS,
        example="huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data/models/qwen'.",
        look_alike="Repo card metadata block was not found.",
    ),
)


TRAINERS_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="trainer_step", hints=("it/s]", "s/it]", "'learning_rate'"),
        pattern=r"\| {0,6}\d{1,12}/\d{1,12} \[[\d:]{4,12}<|'learning_rate': ", kind="progress", cause=None, source="tqdm 4; transformers 5.23, Trainer",
        example=" 20%|██        | 810/4000 [37:48<2:28:52,  2.83s/it]", look_alike="num_train_epochs: 3",
    ),
    Signature(
        id="preparing_data", hints=("Running tokenizer on", "Map", "Generating ", "Downloading"),
        pattern=r"(?:Running tokenizer on dataset|^Map|Generating \w{1,40} split|Downloading (?:data|shards|\S{1,120}))(?: \(num_proc=\d{1,4}\))?: ", kind="progress",
        cause=None, source="datasets 5; LLaMA-Factory",
        example="Running tokenizer on dataset (num_proc=16):  12%|█▏        | 1200/10000 [00:41<05:04, 28.9 examples/s]", look_alike="Mapping of names",
    ),
    Signature(
        id="training_began", hints=("***** Running training *****",),
        pattern=r"\*{5} Running training \*{5}", kind="progress", cause=None, source="transformers 5.23, Trainer",
        example="***** Running training *****", look_alike="Running training for 3 epochs",
    ),
    Signature(
        id="trainer_finished", hints=("train_runtime", "***** train metrics *****", "Training completed. Do not forget", "raining complete", "raining finished", "raining done", "raining is done", "inished training", "one training", "model saved.", "You can now use this checkpoint", "odel successfully saved to"),
        pattern=r"['\"]train_runtime['\"]|\btrain_runtime\s{1,20}= |\*{5} train metrics \*{5}|Training completed\. Do not forget|^(?!.{0,60}\b[Ee]poch\b.{0,60}[Tt]raining ).{0,200}\b[Tt]raining (?:has |is )?(?:completed?|finished|done)(?: successfully)?(?:[.!,;: ]|$)(?! of| ?\d)|"
        r"\b[Ff]inished training\b|\b[Dd]one training(?=[.!,;]|\s{0,20}$)|^model saved\.$|saved successfully\. ?You can now use this checkpoint|\b[Mm]odel successfully saved to", kind="finished", cause=None,
        source="transformers 5.23, Trainer",
        example="{'train_runtime': '112.4', 'train_samples_per_second': '71.1', 'train_loss': '1.52', 'epoch': '3'}", look_alike="total_runtime: 12 s",
    ),
    Signature(
        id="ray_finished", hints=("Result(", "Trial status: ", "Job 'raysubmit_", "Job '"),
        pattern=r"^Result\(\s?metrics=.{0,1500}\berror=None\b|^Trial status: \d{1,6} TERMINATED\s{0,4}$|^Job '[\w-]{1,80}' succeeded", kind="finished", cause=None,
        source="Ray 2.60, train/v2/api/result.py, tune/experimental/output.py and dashboard/modules/job/cli.py",
        example="Result(metrics={'loss': 0.19, 'epoch': 2}, checkpoint=None, error=None, path='/data/ft')", look_alike="Trial status: 1 ERROR | 1 TERMINATED",
    ),
    Signature(
        id="lightning_finished", hints=("`Trainer.fit` stopped:",),
        pattern=r"`Trainer\.fit` stopped: `max_(?:epochs|steps|time)=[^`]{1,40}` reached", kind="finished", cause=None, source="Lightning 2.6, loops/fit_loop.py",
        example="`Trainer.fit` stopped: `max_epochs=3` reached.", look_alike="`Trainer.fit` stopped: KeyboardInterrupt",
    ),
    Signature(
        id="lightning_world", hints=("Starting with 1 processes", "MEMBER: 1/1"),
        pattern=r"Starting with 1 processes|GLOBAL_RANK: 0, MEMBER: 1/1\b", kind="progress", cause="single_device_nccl",
        source="Lightning 2.6, fabric/utilities/distributed.py; by itself it only says that there is one rank",
        example="Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/1", look_alike="Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/10",
    ),
    Signature(
        id="ray_worker_gone", hints=("Worker exit type", "ActorDiedError", "A worker died or was killed", "ActorUnavailableError", "RayActorError", "WorkerCrashedError", "RayletDiedError", "NodeDiedError", "has been marked dead", "OwnerDiedError",
               "died unexpectedly before finishing"),
        pattern=r"^(?!.{0,1500}exit type: INTENDED).{0,1500}(?:Worker exit type: SYSTEM_ERROR|(?:Ray)?Actor(?:Died)?Error: |A worker died or was killed while executing a task|WorkerCrashedError|RayletDiedError|NodeDiedError|has been marked dead because|OwnerDiedError|"
        r"died unexpectedly before finishing this task)", kind="death", cause="ray_worker_died",
        source="Ray 2.60, exceptions.py; https://github.com/verl-project/verl/issues/472",
        example="ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        look_alike="Worker exit type: INTENDED_USER_EXIT",
    ),
    Signature(
        id="ray_out_of_memory", hints=("ray.exceptions.OutOfMemoryError", "due to the node running low on memory", "running low on memory", "due to memory pressure"),
        pattern=r"ray\.exceptions\.OutOfMemoryError|due to (?:the )?node running low on memory|killed due to memory pressure", kind="error", cause="ray_worker_died",
        source="Ray 2.60, exceptions.py and raylet: its memory monitor killed the worker",
        example="ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        look_alike="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB.",
    ),
    Signature(
        id="ray_no_room", hints=("No available node types can fulfill", "worker group startup timed out", "You asked for ", "Insufficient cluster resources", "cannot be scheduled right now", "is less than total desired GPUs", "lacement group creation timed out"),
        pattern=r"No available node types can fulfill resource request|worker group startup timed out after|You asked for \d{1,5}(?:\.\d)? (?:GPUs|cpu|CPUs)|Insufficient cluster resources|request cannot be scheduled right now|is less than total desired "
        r"GPUs|lacement group creation timed out", kind="error",
        cause="ray_resources_unsatisfiable", source="Ray 2.60, autoscaler and train/v2; with a later start of the workers it is harmless",
        example="(autoscaler +1m23s) Error: No available node types can fulfill resource request {'CPU': 2.0, 'GPU': 1.0}. Add suitable node types to this cluster to "
        "resolve this issue.",
        look_alike="Attempting to start training worker group of size 3 with the following resources: [{'GPU': 1, 'CPU': 2}] * 3",
    ),
)


ELSEWHERE_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="unisono_verdict", hints=("unisono: ", "unisono：", "WHAT  ", "问题  "),
        pattern=r"(?:unisono(?:: |：)(?!warning: |警告：|investigating: )|\b(?:WHAT|问题) {2,20})(?P<what>.{1,1400})  \[(?P<cause>[a-z0-9_]{3,40})\]\s{0,4}$", kind="error", cause=None,
        source="unisono, cli/screen.py and causes/verdict.py", example="unisono: rank 3, node 0 (a) was killed by SIGKILL  [rank_killed]",
        look_alike="unisono: warning: rank 3, node 0 (a) is busy, and does not return  [user_code_stuck]",
    ),
    Signature(
        id="unisono_stall", hints=("warning: ", "警告："),
        pattern=r"(?:warning: |警告：)(?P<what>.{1,1400}?)  \[(?P<cause>[a-z0-9_]{3,40})\](?: \(|（|\s{0,4}$)", kind="warning", cause=None,
        source="unisono, cli/screen.py", example="unisono: warning: rank 3, node 0 (a) is busy, and does not return; it has been in step 7 for 5 s  [user_code_stuck] (Fix the code.)",
        look_alike="UserWarning: an unused argument  [unused]",
    ),
    Signature(
        id="unisono_moves", hints=("the ranks move again after ", "又有进展"),
        pattern=r"the ranks move again after \d{1,9} s: |秒之后各 rank 又有进展", kind="progress", cause=None,
        source="unisono, supervise/rank_monitor.py", example="unisono: the ranks move again after 9 s: rank 3, node 0 (a) is busy, and does not return",
        look_alike="unisono: investigating: rank 3, node 0 (a) is busy, and does not return",
    ),
    Signature(
        id="usage_error", hints=(": error: ", "Could not override '", "is not in struct", "Error: No such option", "Error: Missing ", "Error: Invalid value", "Error: Got unexpected", "can't open file '"),
        pattern=r"^[\w./-][\w./ -]{0,200}: error: (?:unrecognized arguments|the following arguments are required|argument |ambiguous option|one of the arguments|expected )|Could not override '|Key '[^']{1,80}' is not in struct|"
        r"^Error: (?:No such option|Missing (?:option|argument)|Invalid value|Got unexpected extra)|: can't open file '", kind="error", cause="user_code_error",
        source="CPython, argparse and its command line; click; Hydra", example="train.py: error: unrecognized arguments: --local-rank=1", look_alike="usage: train.py [-h] [--local_rank LOCAL_RANK]",
    ),
    Signature(
        id="stall_seen", hints=("waiting for remainder of ranks", "Stalled ranks:", "Stalled ops:", "arrier timed out", "timed out task names"),
        pattern=r"waiting for remainder of ranks for more than|Stalled (?:ranks|ops):|DEADLINE_EXCEEDED.{0,80}[Bb]arrier timed out|[Bb]arrier timed out\. Id:|timed out task names:", kind="consequence", cause="rank_stalled",
        source="Horovod, common/stall_inspector.cc; XLA, coordination_service.cc: below it stand those who did not come",
        example="jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: PjRT_Client_Connect.", look_alike="Barrier passed by all tasks",
    ),
    Signature(
        id="tasks_unhealthy", hints=("stopped sending heartbeats", "heartbeat timeout", "is unhealthy"),
        pattern=r"unhealthy \(stopped sending heartbeats\)|task\S{0,40} .{0,40}heartbeat timeout", kind="consequence", cause=None,
        source="XLA, coordination_service.cc: a task is gone", example="UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):",
        look_alike="heartbeat timeout is 100 s",
    ),
    Signature(
        id="coordinator_away", hints=("coordination service", "Coordination service", "coordinator", "RegisterTask"),
        pattern=r"(?:DEADLINE_EXCEEDED|UNAVAILABLE).{0,200}(?:RegisterTask|coordinat(?:or|ion service))|[Ff]ailed to connect to (?:the )?(?:distributed JAX controller|coordinat)", kind="error", cause="rdzv_timeout",
        source="JAX, distributed.py; XLA, coordination_service_agent.cc", example="XlaRuntimeError: DEADLINE_EXCEEDED: Deadline Exceeded; RPC: /tensorflow.CoordinationService/RegisterTask",
        look_alike="Connected to the coordinator", beside=("stall_seen",),
    ),
    Signature(
        id="amd_gpu_hangs", hints=("GPU Hang", "GPU reset begin", "GPU reset failed", "ring gfx", "HW Exception by GPU"),
        pattern=r"HW Exception by GPU node-\d{1,3}.{0,120}GPU Hang|amdgpu.{0,80}GPU reset (?:begin|failed)|amdgpu.{0,60}ring \w{1,20} timeout", kind="error", cause="gpu_fell_off",
        source="ROCm, ROCR; Linux, drivers/gpu/drm/amd", example="HW Exception by GPU node-3 (Agent handle: 0x55d) reason :GPU Hang", look_alike="amdgpu: GPU is ready",
    ),
)
# fmt: on


LINE_LIMIT = 2048
"""Only this many characters of a line are searched: the message is at the beginning, and a line may
be a megabyte of numbers.
"""

ALL_SIGNATURES: tuple[Signature, ...] = (
    *LAUNCH_SIGNATURES,
    *PEERS_SIGNATURES,
    *NCCL_SIGNATURES,
    *PROGRAM_SIGNATURES,
    *MACHINE_SIGNATURES,
    *FILES_SIGNATURES,
    *TRAINERS_SIGNATURES,
    *ELSEWHERE_SIGNATURES,
)

SIGNATURES: dict[str, Signature] = {signature.id: signature for signature in ALL_SIGNATURES}

SEEN_WITH: dict[str, tuple[str, ...]] = {
    "nproc_mismatch": ("tasks_per_node", "watchdog_timeout", "barrier_not_passed", "store_wait"),
    "node_missing": ("connect_failed", "clients_joined"),
    "head_unreachable": ("connect_failed", "store_unreachable"),
    "address_unreachable": ("gloo_no_mesh", "nccl_connect"),
    "rdzv_timeout": ("connect_failed", "agent_lost"),
    "stale_process": ("port_taken",),
    "split_mismatch": ("watchdog_timeout",),
    "unequal_steps": ("watchdog_timeout", "timed_out_work", "gloo_timeout"),
    "collective_mismatch": ("watchdog_timeout",),
    "mtu_blackhole": ("watchdog_timeout",),
    "rank_killed": ("torchrun_killed", "peer_closed"),
    "rank_died_first": (
        "torchrun_first_failure",
        "torchrun_exit_code",
        "torchrun_aborted",
        "peer_closed",
        "store_lost",
        "nccl_peer_gone",
    ),
    "rank_stalled": ("watchdog_follows", "watchdog_heartbeat", "nccl_aborted", "preparing_data"),
    "rank_stopped": ("stall_seen",),
    "gil_held": ("watchdog_heartbeat",),
    "node_unreachable": ("agent_lost", "tasks_unhealthy"),
    "user_code_error": ("traceback", "exception", "torchrun_ended", "deepspeed_exit"),
    "preempted_sigterm": ("cancelled",),
    "tokenizer_mismatch": ("device_assert",),
    "nan_loss": ("loss_scale_falls",),
    "teardown_crash": ("group_not_destroyed",),
    "cuda_oom": ("allocator_retries",),
    "gpu_fell_off": ("xid", "launch_failure"),
    "nccl_socket_iface": ("nccl_system_error", "nccl_warn"),
    "ib_unreachable": ("ib_flushed",),
    "healthy": ("group_not_destroyed", "barrier_guesses_device", "trainer_finished", "lightning_finished"),
    "undetermined": ("watchdog_timeout", "watchdog_follows", "peer_closed", "torchrun_ended"),
}
"""For each cause, the ids of log lines that are seen with it and do not prove it, since they have
other causes, too.
"""

_BY_HINT: dict[str, list[int]] = {}
"""The numbers of the signatures with a hint.

Flat, since most lines have no hint, and this search is all that they cost.
"""
for _number, _signature in enumerate(ALL_SIGNATURES):
    for _hint in _signature.hints:
        _BY_HINT.setdefault(_hint, []).append(_number)


def find_signature(signature_id: str) -> Signature | None:
    """The entry with this id, or None."""
    return SIGNATURES.get(signature_id)


def match_line(line: str) -> list[Signature]:
    """The signatures that match a line, in table order. Terminal escape sequences are ignored."""
    head = line[:LINE_LIMIT]
    if "\x1b" in head:
        head = plain(head)
    return [*_matching(head)]


@functools.lru_cache(maxsize=256)  # several ranks print the same
def _matching(line: str) -> tuple[Signature, ...]:
    return match_hints(line, [hint for hint in _BY_HINT if hint in line])


def match_hints(line: str, hints: Iterable[str]) -> tuple[Signature, ...]:
    """The signatures that match a line, in table order, where it is known which hints the line
    holds; others do not count.
    """
    numbers = {number for hint in hints for number in _BY_HINT.get(hint, ())}
    return tuple(
        ALL_SIGNATURES[number]
        for number in sorted(numbers)
        if compiled(ALL_SIGNATURES[number].pattern).search(line)
    )
