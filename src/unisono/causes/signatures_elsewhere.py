"""Signatures of programs beside torch's own: command lines that are refused, Horovod, JAX, Ascend, AMD."""

from unisono.causes.signature import Signature

ELSEWHERE_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="usage_error", hints=(": error: ", "Could not override '", "is not in struct", "Error: No such option", "Error: Missing ", "Error: Invalid value", "Error: Got unexpected", "can't open file '"),
        pattern=r"^[\w./-]{1,120}: error: (?:unrecognized arguments|the following arguments are required|argument |ambiguous option|one of the arguments|expected )|Could not override '|Key '[^']{1,80}' is not in struct|"
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
)  # fmt: skip
