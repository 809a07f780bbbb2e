"""Causes that lie in the training program and its use of devices, process groups, and Ray."""

from unisono.causes.cause import Cause

PROGRAM_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="user_code_error",
        title="a rank raised an exception",
        meaning=(
            "Python code on one rank failed, and no other entry of this catalogue matches the message. The other ranks report a lost peer; that is a consequence."
        ),
        telltales=(
            "`Traceback (most recent call last):` in one rank's log, and only lost connections in the others",
            "torchrun: `exitcode  : 1` for that rank, `Root Cause (first observed failure)`",
        ),
        neighbours=(
            ("rank_died_first", "no traceback anywhere"),
            ("tokenizer_mismatch", "the exception is an index out of range in the embedding"),
            ("missing_dependency", "the exception is `No module named …`"),
        ),
        remedy=(
            "Fix the last line of the traceback, or the row or column of the dataset that it received.",
            "Reproduce it on one device: it is faster, and there is only one traceback.",
        ),
        exit_code=5,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="unused_parameters_ddp",
        title="parameters got no gradient under DistributedDataParallel",
        meaning=(
            "DDP waits for a gradient of every parameter. Some did not contribute to the loss, or contributed twice through re-entrant checkpointing. All ranks raise the error; none is the culprit."
        ),
        telltales=(
            "`Expected to have finished reduction in the prior iteration before starting a new one`",
            "`Parameter indices which did not receive grad for rank 0: 12 13`",
            "`Expected to mark a variable ready only once`",
        ),
        neighbours=(("collective_mismatch", "one rank differs from the others; here all report the same"),),
        remedy=(
            "Freeze untrained parameters (requires_grad=False) before DDP wraps the model.",
            "`marked ready only once`: gradient_checkpointing_kwargs={'use_reentrant': False}.",
            "Otherwise find_unused_parameters=True, at the cost of a search in every step.",
        ),
        exit_code=5,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="process_group_destroyed_twice",
        title="the process group was destroyed twice",
        meaning=(
            "Training is complete; during cleanup, two parts of the program destroyed the process group, and the second found none. The results are complete."
        ),
        telltales=(
            "`AssertionError: Process group cannot be None` below destroy_process_group",
            "older torch: `assert pg is not None`",
            "training metrics are above it",
        ),
        neighbours=(
            ("teardown_crash", "the end is an abort in native code instead of this assertion"),
            ("user_code_error", "it happens before training is complete"),
        ),
        remedy=(
            "Guard the call: `if dist.is_initialized(): dist.destroy_process_group()`; call it in only one place.",
            "With Ray Train: upgrade ray, which now has this guard.",
            "The results may be used as they are.",
        ),
        exit_code=0,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="teardown_crash",
        title="the program crashed after its work was done",
        meaning=(
            "All steps were made and saved, and then a process aborted while exiting: a thread that was not joined, a process group that was not destroyed. The results are complete."
        ),
        telltales=(
            "all ranks report the end, then `terminate called without an active exception` and exit code -6",
            "a hang or a segmentation fault below `_Py_Finalize`, atexit, or a logger's shutdown",
        ),
        neighbours=(
            ("rank_died_first", "it happened before the last step"),
            ("process_group_destroyed_twice", "a Python assertion in destroy_process_group"),
        ),
        remedy=(
            "Check that the final weights exist, and use them.",
            "Destroy the process group and close loggers before the interpreter ends.",
            "With gloo its own threads may come too late (pytorch#190489): put time.sleep(0.1) after the last collective, or start the program with `unisono run`, which handles this.",
        ),
        exit_code=0,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="tokenizer_mismatch",
        title="token ids are beyond the model's vocabulary",
        meaning=(
            "The tokenizer has more tokens than the embedding has rows: it belongs to a different model, or tokens were added but the embedding was not resized."
        ),
        telltales=(
            "CPU: `IndexError: index out of range in self` below embedding",
            "CUDA: an assertion in indexSelectLargeIndex or vectorized_gather_kernel, then `device-side assert triggered`",
        ),
        neighbours=(
            ("user_code_error", "`Target N is out of bounds`: the labels are wrong, not the inputs"),
            ("tokenizer_files_mismatch", "the ids are valid, but differ between nodes"),
        ),
        remedy=(
            "Use the tokenizer that came with the model: remove model.tokenizer.",
            "In your own program: model.resize_token_embeddings(len(tokenizer)) after adding tokens.",
        ),
        exit_code=5,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="device_unbound_barrier",
        title="a barrier ran before the ranks had bound their devices",
        meaning=(
            "NCCL had to guess which device belongs to which rank, and guessed wrong, so that two ranks used one device or waited for each other. The warning alone is harmless; together with a hang in the first collective it is the cause."
        ),
        telltales=(
            "`using GPU 0 to perform barrier as devices used by this process are currently unknown`",
            "`Guessing device ID based on global rank. This can cause a hang if rank to GPU mapping is heterogeneous`",
            "no step is ever logged",
        ),
        neighbours=(
            ("healthy", "the warning is there, but steps follow: it is not a cause"),
            ("p2p_blocked", "devices are bound, but the hang remains: check the transport"),
            ("duplicate_gpu", "NCCL detected it and refused"),
        ),
        remedy=(
            "torch.cuda.set_device(local_rank) first, then init_process_group(device_id=torch.device('cuda', local_rank)).",
            "Pass device_ids=[local_rank] to barrier().",
            "If it still hangs, try one at a time: NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1, NCCL_SOCKET_IFNAME=…",
        ),
        exit_code=4,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="single_device_nccl",
        title="a process group was made for a single device",
        meaning=(
            "One process on one device needs no communication. A distributed strategy was selected anyway, and the setup of NCCL failed. unisono makes no process group for one device, whatever the environment contains."
        ),
        telltales=(
            "Lightning: `GLOBAL_RANK: 0, MEMBER: 1/1`, `Starting with 1 processes`, then `unhandled system error`",
            "`ncclSystemError` with WORLD_SIZE=1",
        ),
        neighbours=(
            ("nccl_socket_iface", "the same error in a world of more than one"),
            ("no_cuda_build", "NCCL is not in this torch at all"),
        ),
        remedy=(
            "Choose no distributed strategy for one device (Lightning: strategy='auto', devices=1).",
            "Make only one device visible: CUDA_VISIBLE_DEVICES=0.",
            "Unset RANK, WORLD_SIZE, MASTER_ADDR left over from an earlier job.",
        ),
        exit_code=5,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="invalid_device_ordinal",
        title="a rank requests a device that does not exist",
        meaning=(
            "LOCAL_RANK is not smaller than the number of visible devices: a node started more ranks than it has visible GPUs, or a fixed device number is outside a restricted list."
        ),
        telltales=(
            "`CUDA error: invalid device ordinal` (RuntimeError; torch.AcceleratorError in newer torch)",
        ),
        neighbours=(
            ("duplicate_gpu", "the device exists, but a different rank uses it"),
            ("nproc_mismatch", "the number of ranks differs between nodes"),
        ),
        remedy=(
            "Start no more ranks per node than `nvidia-smi -L` lists devices.",
            "Check CUDA_VISIBLE_DEVICES: inside it devices are counted from 0.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="ray_worker_died",
        title="a Ray worker process died",
        meaning=(
            "Ray lost the process that ran a training worker. Ray's message names the actor; the cause is in that worker's own log."
        ),
        telltales=(
            "`Worker exit type: SYSTEM_ERROR`",
            "`ray.exceptions.ActorDiedError`",
            "`ray.exceptions.OutOfMemoryError`: Ray's memory monitor killed it",
            "the rank: `(ip=…, pid=P) world_rank=1` with the dead pid P",
        ),
        neighbours=(
            ("host_oom_killed", "the kernel killed it, according to dmesg or the cgroup"),
            ("user_code_error", "the worker raised an exception that Ray reports"),
        ),
        remedy=(
            "Read the worker's log below /tmp/ray/session_latest/logs, file worker-*-P.err.",
            "On memory: fewer workers per node, smaller batches, or more RAM.",
        ),
        exit_code=5,
        retry_helps=True,
        when=("after",),
    ),
    Cause(
        id="ray_resources_unsatisfiable",
        title="the Ray cluster does not have the requested resources",
        meaning=(
            "The request for workers, CPUs or GPUs exceeds any node, or the free resources. Ray waits for nodes that will not be added."
        ),
        telltales=(
            "`No available node types can fulfill resource request {'GPU': 1.0}`",
            "`The worker group startup timed out after 30.0 seconds`",
        ),
        neighbours=(
            ("ray_worker_died", "the workers were started, and one died"),
            ("healthy", "the line appears while the cluster scales up, and training starts after it"),
        ),
        remedy=(
            "Compare the request with `ray status`.",
            "Lower num_workers or resources_per_worker; use_gpu=False on a cluster without GPUs.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("after",),
    ),
)
