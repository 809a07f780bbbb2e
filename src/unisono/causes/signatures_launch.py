"""Signatures of starts: torchrun and its rendezvous, torch's store, names and ports, Slurm, DeepSpeed's launcher."""

from unisono.causes.signature import Signature

_TORCH = "torch 2.13, "
_ELASTIC = _TORCH + "distributed/elastic/multiprocessing"

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
        source=_ELASTIC + "/errors: the first that was seen, which is a victim where the culprit lives",
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
        source="Slurm 23, slurmstepd and srun; " + _ELASTIC + "/api.py: somebody told the job to end, perhaps since one of its tasks had failed",
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
)  # fmt: skip
