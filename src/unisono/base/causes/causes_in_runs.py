"""Causes found while a run trains: a rank that is gone, stuck, late or without progress, and errors
of the training program.
"""

from unisono.base.causes.verdict import Cause, OwnRunOnly

RUN_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="rank_killed",
        title="a rank was killed by a signal",
        meaning=(
            "The process ended by a signal from outside or by a crash of native code, without a Python"
            " exception. Its own log stops abruptly."
        ),
        telltales=(
            "exit status -9 (SIGKILL), -11 (SIGSEGV), -6 (SIGABRT), -7 (SIGBUS)",
            "the others report `Connection closed by peer [IP]:PORT`, which is the consequence",
        ),
        neighbours=(
            ("host_oom_killed", "SIGKILL, and the kernel or the cgroup counted an out-of-memory kill"),
            ("preempted_sigterm", "SIGTERM from the scheduler: a request, not an accident"),
            ("user_code_error", "a Python traceback is in the rank's log"),
        ),
        remedy=(
            "Find the sender: `dmesg -T | tail`, the scheduler's log, an administrator.",
            (
                "For SIGSEGV, SIGBUS or SIGABRT: run with PYTHONFAULTHANDLER=1 and read the stack; SIGBUS"
                " often means a full /dev/shm."
            ),
            OwnRunOnly("Start again: the run resumes from its last checkpoint."),
        ),
        exit_code=5,
        retry_helps=True,
        when=("during",),
    ),
    Cause(
        id="rank_died_first",
        title="a rank ended, and the log does not show why",
        meaning=(
            "Several ranks report a lost peer, and one log simply stops: that rank ended first. Without its"
            " exit status, dmesg or a core dump the cause remains unknown."
        ),
        telltales=(
            "torchrun: `exitcode  : -11` (or -6, -9) and `traceback : To enable traceback see …`",
            "one log ends without an error while all others report `Connection closed by peer`",
            "a rank left early with exit code 0 or 3",
        ),
        neighbours=(
            ("host_oom_killed", "exit code -9 with `oom-kill` in dmesg, or `OOMKilled` from the container"),
            ("rank_killed", "the signal was seen while the run was watched"),
            ("teardown_crash", "all work was done before it"),
        ),
        remedy=(
            "On that rank's host: `dmesg -T`, the container's exit reason, core dumps (`coredumpctl`).",
            "Set PYTHONFAULTHANDLER=1 and start again; the stack will be in that rank's log.",
        ),
        exit_code=5,
        retry_helps=True,
        when=("after",),
    ),
    Cause(
        id="rank_stalled",
        title="a rank stopped making progress, and the log does not show why",
        meaning=(
            "The others wait in a collective until their timeout, and one rank never arrived. It is alive:"
            " tokenizing, downloading, waiting for a lock, or looping. Ranks that timed out are victims."
        ),
        telltales=(
            "gloo: `Timed out waiting 1800000ms for recv operation to complete`",
            "NCCL: `Watchdog caught collective operation timeout`",
            "the culprit's log still shows a progress bar, a download, a retry",
        ),
        neighbours=(
            ("rank_stopped", "the process is in state T: it was stopped"),
            ("io_blocked", "the process is in state D: it waits for storage"),
            ("data_starved", "the process waits for its own data loader"),
            ("unequal_steps", "the rank has finished, rather than stalled"),
        ),
        remedy=(
            "On the rank that is not waiting: `py-spy dump --pid PID` shows where it is.",
            "Do slow preparation once, before the group exists, and let the other ranks read the result.",
            (
                "If the work is expected to be slow, raise the group's timeout (torch: timeout=…,"
                " transformers: ddp_timeout)."
            ),
        ),
        exit_code=4,
        retry_helps=True,
        when=("after",),
    ),
    Cause(
        id="rank_stopped",
        title="a rank is suspended",
        meaning=(
            "The process is in state T: it got SIGSTOP, is in a debugger, was suspended by its terminal, or"
            " its cgroup is frozen. It does nothing until it is continued."
        ),
        telltales=(
            "`ps -o stat= -p PID` shows T",
            "the other ranks wait in a collective; nothing is in any log",
        ),
        neighbours=(
            ("io_blocked", "state D instead of T"),
            ("user_code_stuck", "the process runs or sleeps (R or S)"),
        ),
        remedy=(
            "Continue it: `kill -CONT PID`; for a frozen container: `docker unpause`.",
            "Find out what stopped it: Ctrl-Z in a terminal, a debugger, a scheduler that suspends jobs.",
        ),
        exit_code=4,
        retry_helps=True,
        when=("during",),
    ),
    Cause(
        id="gil_held",
        title="native code holds the GIL",
        meaning=(
            "A rank is inside a C extension that does not release the interpreter lock. None of its Python"
            " threads can run: no heartbeat, no logging, no signal handler."
        ),
        telltales=(
            "no thread of the process advances although it is not suspended",
            "faulthandler shows every thread in the same place, one of them inside a C call",
        ),
        neighbours=(
            ("user_code_stuck", "other threads of the process still run"),
            ("rank_stopped", "the process is in state T"),
        ),
        remedy=(
            "The stack shows file and line of the call: limit its work, or move it to a separate process.",
            (
                "At the very end of a program on gloo it may be the process group, which waits for its own"
                " thread (pytorch#56297): put time.sleep(0.1) between the last collective and the code that"
                " drops the group or the DDP model."
            ),
            "Upgrade the package that contains the call.",
        ),
        exit_code=4,
        retry_helps=True,
        when=("during",),
    ),
    Cause(
        id="user_code_stuck",
        title="a rank's Python code does not return",
        meaning=(
            "The rank sleeps, waits for a lock, or loops in Python outside any collective. Its peers wait for"
            " it. Custom data functions, callbacks and metrics are common places."
        ),
        telltales=(
            "`py-spy dump --pid PID` shows the same frame for minutes",
            "one core at 100 % (a loop), or none (a wait)",
            "the GPU at 100 %, while the stack shows a copy or a synchronization: a kernel does not end",
        ),
        neighbours=(
            ("gil_held", "no other thread of the process can run"),
            ("data_starved", "the frame is the wait for a data loader's worker"),
            ("straggler", "it does return, but late, in every step"),
        ),
        remedy=(
            "Fix the code that the stack shows; give network calls in training code a timeout.",
            (
                "If the rank waits for its GPU, run with CUDA_LAUNCH_BLOCKING=1: the stack then shows the"
                " call that started the kernel."
            ),
            "Do not call code on only one rank that all ranks must call.",
        ),
        exit_code=4,
        retry_helps=True,
        when=("during",),
    ),
    Cause(
        id="io_blocked",
        title="a rank waits for storage that does not answer",
        meaning=(
            "The process is in state D, inside the kernel: a network file system or a disk does not reply."
            " Not even SIGKILL ends it until the storage answers or is unmounted."
        ),
        telltales=(
            "`ps -o stat=,wchan= -p PID` shows D and nfs_…, rpc_…, or io_schedule",
            "dmesg: `nfs: server HOST not responding, still trying`",
            "`blocked for more than 120 seconds` in dmesg",
        ),
        neighbours=(
            ("disk_full", "the storage answers, with `No space left on device`"),
            ("rank_stopped", "state T instead of D"),
        ),
        remedy=(
            "Check the mount: `timeout 5 stat PATH`; repair the server or the network to it.",
            "Keep data and caches on a local disk, and only checkpoints on network storage.",
        ),
        exit_code=4,
        retry_helps=True,
        when=("during",),
    ),
    Cause(
        id="data_starved",
        title="a rank waits for its own data",
        meaning=(
            "The training loop is ready, but the next batch is not: a data worker died or is slow, a stream"
            " stalls, a remote store throttles."
        ),
        telltales=(
            "data_time_s is most of step_time_s in metrics.jsonl",
            "`DataLoader worker (pid N) is killed by signal`",
            "the stack is in a queue's get() below the data loader",
        ),
        neighbours=(
            ("io_blocked", "the reading process hangs in the kernel"),
            ("straggler", "slow on one rank in computation, not in data"),
        ),
        remedy=(
            "Prepare the data once on a local disk instead of streaming and tokenizing during training.",
            "Give the loader more workers, or memory to those that died.",
        ),
        exit_code=4,
        retry_helps=True,
        when=("during",),
    ),
    Cause(
        id="waits_for_input",
        title="a rank waits for input",
        meaning=(
            "The program reads from a terminal or from stdin: a prompt, a debugger, a library that asks for a"
            " login or for permission. Nobody answers, and the other ranks wait."
        ),
        telltales=(
            "the last line of a log is a question",
            "the stack shows input(), getpass, pdb, or a library's login",
            "the process is in read(2) on file descriptor 0: /proc/PID/syscall",
        ),
        neighbours=(
            ("user_code_stuck", "the process waits for something other than a terminal or stdin"),
            ("io_blocked", "the process waits for a disk, in state D"),
        ),
        remedy=(
            (
                "Answer by a setting instead of a prompt: a flag such as --yes, a token in the environment,"
                " WANDB_MODE=offline, HF_TOKEN."
            ),
            "Remove breakpoint() and pdb from code that runs on several ranks.",
            "Start the program with `</dev/null`: then a prompt fails at once, with its line.",
        ),
        exit_code=4,
        retry_helps=False,
        when=("during",),
    ),
    Cause(
        id="unequal_steps",
        title="ranks make different numbers of steps",
        meaning=(
            "One rank has run out of batches and continued with evaluation, saving or the end, while the"
            " others are still in training collectives. They wait for a peer that will not arrive, or meet it"
            " in a different operation."
        ),
        telltales=(
            (
                "the watchdog's timeout comes at the end of an epoch, with `_ALLGATHER_BASE` on some ranks"
                " and `ALLREDUCE` on others"
            ),
            "`last enqueued work` differs between ranks by a few",
            "the ranks print different lengths of their data",
            (
                "gloo: `Received data size doesn't match expected size. Is there a distributed collective"
                " mismatch in your code?`"
            ),
        ),
        neighbours=(
            ("collective_mismatch", "the lengths are equal, and the hang is in the middle of an epoch"),
            ("split_mismatch", "the cause, found before the start"),
        ),
        remedy=(
            "Use the same seed for every split and shuffle on all ranks: train_test_split(…, seed=0).",
            "Drop or pad the last incomplete batch (drop_last=True), or use torch's Join context.",
            "Agree on the number of steps before the loop begins.",
        ),
        exit_code=4,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="collective_mismatch",
        title="ranks called different collectives",
        meaning=(
            "At the same point one rank called a different operation, or the same with a different size or"
            " type. Usually a collective is inside a branch that depends on the rank or on the data."
        ),
        telltales=(
            (
                "`Detected mismatch between collectives on ranks. Rank 0 is running collective:"
                " CollectiveFingerPrint(`"
            ),
            "equal SeqNum on all ranks, and one rank with a different OpType or NumelIn",
            "gloo: `op.preamble.length <= op.nbytes` or the size mismatch, and an abort",
        ),
        neighbours=(
            ("unequal_steps", "it happens at the end of an epoch, where one rank has fewer batches"),
            ("code_mismatch", "the cause, if nodes run different code"),
        ),
        remedy=(
            "Run a few steps with TORCH_DISTRIBUTED_DEBUG=DETAIL on all ranks: it shows both operations.",
            "Move every collective out of branches such as `if rank == 0:` or `if loss > …:`.",
        ),
        exit_code=4,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="node_unreachable",
        title="a node can no longer be reached",
        meaning=(
            "A node of the job no longer answers: it is down, rebooting, or cut off from the network."
            " Processes on it may still run."
        ),
        telltales=(
            "ranks of one host fall silent at the same moment",
            "`No route to host`, `Connection timed out` to all ports of one host",
        ),
        neighbours=(
            ("rank_killed", "the node answers, but one process on it is gone"),
            ("ib_unreachable", "the node answers over Ethernet, but the InfiniBand link is dead"),
        ),
        remedy=(
            (
                "`ping` and `ssh` the node; check its console, its switch port, and the cloud's maintenance"
                " notices."
            ),
            "Start again without it, or when it is back.",
        ),
        exit_code=4,
        retry_helps=True,
        when=(
            "before",
            "during",
        ),
    ),
    Cause(
        id="straggler",
        title="one rank is slower than the rest",
        meaning=(
            "The run continues at the pace of its slowest rank: a hot or throttled device, other work on the"
            " node, slow storage, longer batches. This is a warning and does not end the run."
        ),
        telltales=(
            "one rank spends its time computing while all others wait for it, step after step",
            "`nvidia-smi -q -d PERFORMANCE` shows a clock limit that is active",
        ),
        neighbours=(
            ("rank_stalled", "no progress at all"),
            ("data_starved", "the rank spends the time waiting for data"),
        ),
        remedy=(
            (
                "Check the node: other processes (`top`), clocks and temperatures (`nvidia-smi -q`), a link"
                " at lower speed."
            ),
            "Distribute batches by tokens, not by rows.",
        ),
        exit_code=0,
        retry_helps=False,
        when=(
            "before",
            "during",
        ),
    ),
    Cause(
        id="replicas_diverged",
        title="replicas that must be equal differ",
        meaning=(
            "Ranks that hold the same parameters hold different values. A faulty device, an unsynchronized"
            " parameter or a random choice per rank has changed one of them; without this check the"
            " difference is silent."
        ),
        telltales=(
            "digests of the same parameter differ between ranks",
            "a loss that depends on the rank that prints it",
        ),
        neighbours=(
            ("weights_mismatch", "they were different from the start"),
            ("ecc_error", "the device reports memory errors: the likely culprit"),
        ),
        remedy=(
            "Go back to the last checkpoint before the difference.",
            "Look for trained parameters that the optimizer or wrapper does not handle on all ranks.",
            "If the same device always differs, remove it and test its memory.",
        ),
        exit_code=4,
        retry_helps=False,  # the newest checkpoint may hold weights that have drifted
        when=("during",),
    ),
    Cause(
        id="nan_loss",
        title="the loss or its gradient is NaN or infinite",
        meaning=(
            "A step gave NaN or infinity. A single one may be chance and is skipped; several in a row mean"
            " that training has diverged, and more steps do not help. If it happens from step 1, before any"
            " update, the weights themselves are NaN or overflow in their dtype."
        ),
        telltales=(
            "`'loss': 'nan'`, or loss 0.0 with `grad_norm: nan`",
            "`Function 'X' returned nan values in its 0th output`",
            "`Current loss scale already at minimum - cannot decrease scale anymore`",
            "while generating: `probability tensor contains either inf, nan or element < 0`",
        ),
        neighbours=(
            ("tokenizer_mismatch", "ids beyond the vocabulary, which fail with an index error instead"),
            ("healthy", "a few `OVERFLOW! Skipping step` at the start of float16 training are normal"),
        ),
        remedy=(
            (
                "From step 1 on: the weights of the model are damaged, or too large for the dtype. Download"
                " them again, or set model.dtype: float32."
            ),
            "Check the rows of the reported batch: empty, extremely long, or binary data.",
            "Lower the learning rate, optim.lr, by a factor of 3 to 10, and lengthen optim.warmup.",
            "Use bfloat16 (bf16) or float32 instead of float16: model.dtype.",
            "Clip gradients: keep optim.max_grad_norm at 1.0 or lower.",
            OwnRunOnly(
                "With `objective: FILE.py:CLASS`, check the loss in that file first; `objective: sft` trains"
                " without it."
            ),
        ),
        exit_code=4,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="preempted_sigterm",
        title="the scheduler asked the run to end",
        meaning=(
            "SIGTERM or SIGUSR1 came from outside: a time limit, a higher priority, a spot machine that is"
            " reclaimed. Nothing is wrong with the run. unisono finishes the step, saves a checkpoint and"
            " exits with code 75."
        ),
        telltales=(
            "Slurm: `CANCELLED AT … DUE TO PREEMPTION`, `DUE TO TIME LIMIT`",
            "Kubernetes: `reason: Preempted`, `Evicted`",
            "`SignalException: Process N got signal: 15`, and no error before it",
        ),
        neighbours=(
            ("rank_killed", "SIGKILL, or a signal to one rank only"),
            ("user_code_error", "an error is above it, and the SIGTERM is torchrun's own cleanup"),
        ),
        remedy=(
            OwnRunOnly("Run the same command again: it resumes from the checkpoint."),
            "Ask for more time, or for requeueing on preemption.",
        ),
        exit_code=75,
        retry_helps=True,
        when=("during", "after"),
    ),
)


PROGRAM_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="user_code_error",
        title="a rank raised an exception",
        meaning=(
            "Python code on one rank failed, and no other entry of this catalogue matches the message. The"
            " other ranks report a lost peer; that is a consequence."
        ),
        telltales=(
            "`Traceback (most recent call last):` in one rank's log, and only lost connections in the others",
            "torchrun: `exitcode  : 1` for that rank, `Root Cause (first observed failure)`",
            (
                "`KeyError: 'labels'`, `IndexError: list index out of range`, `TypeError`, `ValueError`,"
                " `AttributeError`, `AssertionError`: data without the columns that the code reads, or an API"
                " that has changed"
            ),
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
            "DDP waits for a gradient of every parameter. Some did not contribute to the loss, or contributed"
            " twice through re-entrant checkpointing. All ranks raise the error; none is the culprit."
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
            "Training is complete; during cleanup, two parts of the program destroyed the process group, and"
            " the second found none. The results are complete."
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
            (
                "Guard the call: `if dist.is_initialized(): dist.destroy_process_group()`; call it in only"
                " one place."
            ),
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
            "All steps were made and saved, and then a process aborted while exiting: a thread that was not"
            " joined, a process group that was not destroyed. The results are complete."
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
            (
                "With gloo its own threads may come too late (pytorch#190489): put time.sleep(0.1) after the"
                " last collective, or start the program with `unisono run`, which handles this."
            ),
        ),
        exit_code=0,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="tokenizer_mismatch",
        title="token ids are beyond the model's vocabulary",
        meaning=(
            "The tokenizer has more tokens than the embedding has rows: it belongs to a different model, or"
            " tokens were added but the embedding was not resized."
        ),
        telltales=(
            "CPU: `IndexError: index out of range in self` below embedding",
            (
                "CUDA: an assertion in indexSelectLargeIndex or vectorized_gather_kernel, then `device-side"
                " assert triggered`"
            ),
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
            "NCCL had to guess which device belongs to which rank, and guessed wrong, so that two ranks used"
            " one device or waited for each other. The warning alone is harmless; together with a hang in the"
            " first collective it is the cause."
        ),
        telltales=(
            "`using GPU 0 to perform barrier as devices used by this process are currently unknown`",
            (
                "`Guessing device ID based on global rank. This can cause a hang if rank to GPU mapping is"
                " heterogeneous`"
            ),
            "no step is ever logged",
        ),
        neighbours=(
            ("healthy", "the warning is there, but steps follow: it is not a cause"),
            ("p2p_blocked", "devices are bound, but the hang remains: check the transport"),
            ("duplicate_gpu", "NCCL detected it and refused"),
        ),
        remedy=(
            (
                "torch.cuda.set_device(local_rank) first, then"
                " init_process_group(device_id=torch.device('cuda', local_rank))."
            ),
            "Pass device_ids=[local_rank] to barrier().",
            (
                "If it still hangs, try one at a time: NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1,"
                " NCCL_SOCKET_IFNAME=…"
            ),
        ),
        exit_code=4,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="single_device_nccl",
        title="a process group was created for a single device",
        meaning=(
            "One process on one device needs no communication. A distributed strategy was selected anyway,"
            " and the setup of NCCL failed. unisono makes no process group for one device, whatever the"
            " environment contains."
        ),
        telltales=(
            (
                "Lightning: `GLOBAL_RANK: 0, MEMBER: 1/1`, `Starting with 1 processes`, then `unhandled"
                " system error`"
            ),
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
            "LOCAL_RANK is not smaller than the number of visible devices: a node started more ranks than it"
            " has visible GPUs, or a fixed device number is outside a restricted list."
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
            "Ray lost the process that ran a training worker. Ray's message names the actor; the cause is in"
            " that worker's own log."
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
            "The request for workers, CPUs or GPUs exceeds any node, or the free resources. Ray waits for"
            " nodes that will not be added."
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
