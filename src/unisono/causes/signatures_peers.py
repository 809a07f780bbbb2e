"""Signatures of what torch's collectives say between ranks on any backend: mostly the words of victims."""

from unisono.causes.signature import Signature

_TORCH = "torch 2.13, "
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
        source=_GLOO + ": a rank did not come in time; who says so has waited",
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
        source=_TORCH + "libtorch_cpu (TCPStore): rank 0 is gone, or its port is another program's",
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
)  # fmt: skip
