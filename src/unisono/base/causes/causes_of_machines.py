"""Causes on a machine or in files: devices, memory, limits and networks of one node; configs, data,
models and checkpoints.
"""

from unisono.base.causes.verdict import Cause, OwnRunOnly

MACHINE_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="cuda_oom",
        title="the accelerator ran out of memory",
        meaning=(
            "Weights, optimizer state and activations together need more memory than is free on the device."
            " The longest batch decides, not the average one."
        ),
        telltales=(
            "`CUDA out of memory. Tried to allocate 2.00 GiB`",
            "`torch.OutOfMemoryError`",
            "inside NCCL: `Cuda failure 2 'out of memory'`",
        ),
        neighbours=(
            ("host_oom_killed", "host memory, not device memory"),
            ("stale_process", "`nvidia-smi` shows a process of an earlier start that holds the memory"),
            ("healthy", "a trainer that halves its batch after this error and continues"),
        ),
        remedy=(
            OwnRunOnly(
                "Set memory.gradient_checkpointing to true: activations are recomputed instead of stored."
            ),
            OwnRunOnly("Lower batch.micro; the global batch, and so the result, stays the same."),
            OwnRunOnly("Lower data.max_length, if the longest rows need not stay complete."),
            "Train an adapter instead of all weights, or lower adapter.rank.",
        ),
        exit_code=5,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="host_oom_killed",
        title="the machine ran out of memory, and the kernel killed a process",
        meaning=(
            "The host's RAM, or the limit of the container, was used up, and the kernel killed a process. Its"
            " own log shows nothing."
        ),
        telltales=(
            "dmesg: `oom-kill:` and `Killed process 1234 (python)`",
            (
                "`Reason: OOMKilled` (Kubernetes), `oom_kill events` (Slurm), oom_kill in the cgroup's"
                " memory.events"
            ),
            "`DefaultCPUAllocator: can't allocate memory`",
            "`DataLoader worker (pid 1234) is killed by signal: Killed`",
        ),
        neighbours=(
            ("cuda_oom", "device memory: an exception with numbers in it"),
            ("rank_killed", "SIGKILL, but no OOM kill recorded: killed by a user or the scheduler"),
            ("shm_too_small", "only /dev/shm was full"),
        ),
        remedy=(
            "Request more memory, or raise the container's limit.",
            OwnRunOnly("Lower batch.micro or data.max_length; set memory.gradient_checkpointing to true."),
            "Run fewer data workers and other processes on the node.",
        ),
        exit_code=5,
        retry_helps=False,
        when=("before", "during", "after"),
    ),
    Cause(
        id="disk_full",
        title="no space is left on a disk",
        meaning=(
            "A file could not be written: the disk, a quota, or the number of inodes is used up. Usually"
            " checkpoints fill it."
        ),
        telltales=(
            "`[Errno 28] No space left on device`",
            "`PytorchStreamWriter failed writing file`",
            "torch.save on a full disk may report only `basic_ios::clear: iostream error`",
            "`StorageFull`, `Disk quota exceeded`",
        ),
        neighbours=(
            ("shm_too_small", "the path is below /dev/shm"),
            ("storage_unfit", "there was not enough space from the start"),
        ),
        remedy=(
            "Free space: `df -h PATH`, `df -i PATH`, `du -xh --max-depth=1 PATH | sort -h`.",
            OwnRunOnly("Keep fewer checkpoints (checkpoint.keep), or put output_dir on a larger disk."),
            "Move the hub's cache: HF_HOME=/larger/disk.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="gpu_fell_off",
        title="a GPU has fallen off the bus",
        meaning=(
            "The driver lost contact with the device: power, heat, a riser, or the device itself. Software"
            " cannot restore it without a reset."
        ),
        telltales=(
            "dmesg: `NVRM: Xid (PCI:0000:3b:00): 79, … GPU has fallen off the bus`",
            "`Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error`",
        ),
        neighbours=(
            ("ecc_error", "the device is present and reports memory errors"),
            ("driver_too_old", "no device has ever worked with this torch"),
        ),
        remedy=(
            "Take the node out of service and reboot it.",
            "If it happens again: check power and seating, and replace the device.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="ecc_error",
        title="a GPU has uncorrectable ECC errors",
        meaning=(
            "The device found more flipped bits than its error correction can fix. Results computed with them"
            " cannot be trusted."
        ),
        telltales=(
            "`CUDA error: uncorrectable ECC error encountered`",
            "dmesg: NVRM Xid 48, 63, 64, 94 or 95",
        ),
        neighbours=(
            ("gpu_fell_off", "Xid 79: the device is gone"),
            ("replicas_diverged", "values differ, but no device reports an error"),
        ),
        remedy=(
            "Reset the device (`nvidia-smi --gpu-reset -i N`, nothing running on it) or reboot.",
            "If Xid 63 or 64 (row remapping) returns, replace the device.",
            "Resume from a checkpoint before the error.",
        ),
        exit_code=6,
        retry_helps=True,
        when=("during", "after"),
    ),
    Cause(
        id="driver_too_old",
        title="the NVIDIA driver is older than torch needs",
        meaning="The CUDA version of this torch build requires a newer driver than the machine has.",
        telltales=(
            "`The NVIDIA driver on your system is too old (found version 11040)`",
            "`CUDA driver version is insufficient for CUDA runtime version`",
        ),
        neighbours=(
            ("no_cuda_build", "this torch was built without CUDA"),
            (
                "cuda_arch_unsupported",
                "the driver is right, but the build lacks the device's generation",
            ),
        ),
        remedy=(
            "Update the driver; `nvidia-smi` shows the CUDA version that it supports.",
            "Or install torch for an older CUDA version.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="cuda_arch_unsupported",
        title="this torch has no code for this GPU's generation",
        meaning=(
            "The build of torch, or of an extension, does not contain kernels for the device, because the"
            " device is too new or too old."
        ),
        telltales=(
            "`CUDA error: no kernel image is available for execution on the device`",
            "`with CUDA capability sm_120 is not compatible with the current PyTorch installation`",
        ),
        neighbours=(("driver_too_old", "the driver is too old"),),
        remedy=(
            "Install a torch build that lists the generation: torch.cuda.get_arch_list().",
            "Rebuild or upgrade the extension in the message (flash-attn, bitsandbytes).",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="no_cuda_build",
        title="this torch was built without CUDA, or the device is not visible",
        meaning=(
            "A program needs CUDA or NCCL, but the installed torch is the CPU build, or the container was"
            " started without access to the devices."
        ),
        telltales=(
            "`Torch not compiled with CUDA enabled`",
            "`Distributed package doesn't have NCCL built in`",
            "`No supported gpu backend found!`",
            "`module 'torch._C' has no attribute '_cuda_setDevice'`",
        ),
        neighbours=(
            ("driver_too_old", "torch has CUDA, but the driver is too old"),
            ("bnb_no_gpu", "only bitsandbytes reports an error"),
        ),
        remedy=(
            "Install a CUDA build of torch: torch.version.cuda must not be None.",
            "Give the container access to the devices: `docker run --gpus all …`.",
            "Or train on the CPU: set `device: cpu`.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="shm_too_small",
        title="shared memory is too small",
        meaning=(
            "The file system /dev/shm is full. Containers get 64 MB of it by default; NCCL and data loaders"
            " need more."
        ),
        telltales=(
            "`Error while creating shared memory segment /dev/shm/nccl-AbCdEf`",
            "`failed to extend /dev/shm/nccl-…`",
            "`unable to allocate shared memory(shm) for file </torch_…>: No space left on device (28)`",
            (
                "`DataLoader worker … is killed by signal: Bus error. It is possible that dataloader's"
                " workers are out of shared memory`"
            ),
        ),
        neighbours=(
            ("disk_full", "the path is not below /dev/shm"),
            ("ulimit", "`Too many open files` is part of the same message"),
        ),
        remedy=(
            (
                "`docker run --shm-size=8g …` or `--ipc=host`; in Kubernetes mount an emptyDir with medium"
                " Memory at /dev/shm."
            ),
            "Look for leftovers of dead processes: `ls -l /dev/shm`.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="ulimit",
        title="a limit of the operating system was reached",
        meaning=(
            "The process cannot open more files, write a larger file, lock more memory, or start more"
            " threads."
        ),
        telltales=(
            "`OSError: [Errno 24] Too many open files`, also inside `unable to open shared memory object`",
            "`OSError: [Errno 27] File too large`, or a program killed by SIGXFSZ: `ulimit -f`",
            "`Resource temporarily unavailable` when a thread or process is started",
            "`ibv_reg_mr` or `Cannot allocate memory` with a small `ulimit -l`",
        ),
        neighbours=(("shm_too_small", "space, not the number of files"),),
        remedy=(
            "`ulimit -n 65536` before the start, or LimitNOFILE= in the service, nofile in limits.conf.",
            (
                "`ulimit -f unlimited` before the start, or LimitFSIZE=infinity in the service, fsize in"
                " limits.conf."
            ),
            "torch.multiprocessing.set_sharing_strategy('file_system') where loaders share many tensors.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "during", "after"),
    ),
    Cause(
        id="nccl_socket_iface",
        title="NCCL uses a network interface that does not lead to the other nodes",
        meaning=(
            "NCCL found no interface, or used one that exists on every host but does not connect them:"
            " docker0, virbr0, lo, a veth."
        ),
        telltales=(
            "`Bootstrap : no socket interface found`",
            "`connecting to address  with family 0 is neither AF_INET(2) nor AF_INET6(10)`",
            (
                "`Bootstrap : Using docker0:172.17.0.1` (NCCL_DEBUG=INFO), and a different interface on the"
                " next node"
            ),
        ),
        neighbours=(
            ("single_device_nccl", "the world has only one member"),
            ("address_unreachable", "other libraries cannot connect either"),
            ("ib_unreachable", "the message is about NET/IB"),
        ),
        remedy=(
            "Set NCCL_SOCKET_IFNAME to the interface of the common network on each node (`ip -br addr`).",
            "For gloo set GLOO_SOCKET_IFNAME too; it requires exact names, without NCCL's ^ and = signs.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="ib_unreachable",
        title="the InfiniBand or RoCE path does not work",
        meaning=(
            "NCCL uses the RDMA adapter, but packets do not arrive: a port that is down, a wrong GID index, a"
            " different subnet, or a limit on locked memory."
        ),
        telltales=(
            "`NET/IB : Got completion from peer … with status=12 … vendor err 129`",
            "`Call to ibv_modify_qp failed`",
            "`Call to ibv_reg_mr failed`",
        ),
        neighbours=(
            ("rank_died_first", "status=5, vendor err 249 is flushed work: a peer failed first"),
            ("ulimit", "ibv_reg_mr fails for lack of lockable memory: ulimit -l"),
            ("nccl_socket_iface", "the message is about sockets"),
        ),
        remedy=(
            "`ibstat`: the port must be Active, LinkUp; select working ones with NCCL_IB_HCA.",
            "On RoCE set NCCL_IB_GID_INDEX to the RoCE v2 entry (`show_gids`).",
            "To continue without it, on all nodes: NCCL_IB_DISABLE=1 (slower).",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="p2p_blocked",
        title="GPUs of one machine cannot reach each other's memory",
        meaning=(
            "The topology promises peer-to-peer transfers, but the IOMMU, ACS or the virtual machine blocks"
            " them. NCCL sets them up and then hangs, or gets an error."
        ),
        telltales=(
            "`peer access is not supported between these two devices`",
            "`via P2P/…` in NCCL's log, then a hang, and `IO_PAGE_FAULT` in dmesg",
        ),
        neighbours=(
            ("healthy", "`P2P is disabled between connected GPUs` is information, not an error"),
            ("device_unbound_barrier", "the hang goes away when devices are bound first"),
        ),
        remedy=(
            "Set NCCL_P2P_DISABLE=1 on all ranks of the machine to test this.",
            "Then fix it: IOMMU off or in pass-through mode, ACS off on the PCIe switches.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "after"),
    ),
)


FILE_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="corrupt_checkpoint",
        title="a checkpoint is damaged",
        meaning=(
            "A file of the checkpoint is missing, too short, or differs from what was written. torch.load,"
            " safetensors and DCP silently load a flipped bit; unisono compares every file with its digest."
        ),
        telltales=(
            "`Error while deserializing header: incomplete metadata, file not fully covered`",
            "`PytorchStreamReader failed reading zip archive: failed finding central directory`",
            "trainer_state.json is missing when resuming",
            "`unisono checkpoint verify RUN` reports the file",
        ),
        neighbours=(
            ("checkpoint_mismatch", "the files are complete, but belong to a different model or world size"),
            ("checkpoint_not_shared", "the files are complete, but on a different node's disk"),
        ),
        remedy=(
            OwnRunOnly(
                "Check them: `unisono checkpoint verify RUN`. A resume automatically uses the latest valid"
                " one."
            ),
            OwnRunOnly("If none is valid, start from scratch with `--fresh`, or from a copy."),
            "Repeated damage means a bad disk, bad memory, or two writers.",
        ),
        exit_code=7,
        retry_helps=True,
        when=("before", "after"),
    ),
    Cause(
        id="checkpoint_mismatch",
        title="a checkpoint belongs to a different model or world size",
        meaning=(
            "The files are complete, but their shapes, names or number of parts do not fit: a different base"
            " model, adapter rank, vocabulary, or number of ranks."
        ),
        telltales=(
            "`size mismatch for model.embed_tokens.weight`",
            "`Missing key(s) in state_dict`, `Unexpected key(s) in state_dict`",
            "`You set ignore_mismatched_sizes to False`",
            "DeepSpeed: `used a DP world size of 8 but the current world size is 4`",
        ),
        neighbours=(
            ("corrupt_checkpoint", "the files themselves cannot be read"),
            ("config_mismatch", "nodes disagree with each other, not with the checkpoint"),
        ),
        remedy=(
            "Use the original config of the run: config.yaml in its directory.",
            "Convert the checkpoint if the number of ranks must change (DeepSpeed: universal checkpoint).",
            (
                "Do not continue with ignore_mismatched_sizes: the affected layer would start from random"
                " values."
            ),
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="checkpoint_not_shared",
        title="parts of a checkpoint are on other nodes' disks",
        meaning=(
            "output_dir is a local path. One node wrote or renamed files that a different node needs, and"
            " each has only a part."
        ),
        telltales=(
            "on other nodes only: `FileNotFoundError: … tmp-checkpoint-100 -> checkpoint-100`",
            "`zero_pp_rank_1_mp_rank_00_optim_states.pt` is missing",
            "Ray: `A local path on the head node is not accessible by worker nodes`",
        ),
        neighbours=(
            ("storage_not_shared", "the same, found before the start"),
            ("corrupt_checkpoint", "the parts are lost, or damaged"),
        ),
        remedy=(
            "Use storage that all nodes share for output_dir.",
            "transformers' Trainer: save_on_each_node=True, if each node should keep a complete copy.",
            "For this run: copy the parts from all nodes into one directory before resuming.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="output_removed",
        title="the run's directory was removed, renamed or replaced during the run",
        meaning=(
            "output_dir or the run.lock in it was removed, renamed or replaced during the run, or the file"
            " system below it was unmounted. The run ends after its current step, and saves it in a new"
            " directory beside, OUTPUT_DIR-rescued-RUN_ID; what was saved before is gone, or where it was"
            " moved to. Nothing is written at the old path."
        ),
        telltales=(
            "the verdict `was removed after step N, while the run was active; step N was saved in DIRECTORY`",
            "a directory `OUTPUT_DIR-rescued-…` with one checkpoint",
            "a cleanup job, a second terminal, or `rm -rf` in a script that starts the run",
        ),
        neighbours=(
            ("storage_unfit", "the directory exists, but cannot be written"),
            ("io_blocked", "the storage does not answer"),
        ),
        remedy=(
            "To continue, run the same command with output_dir= the directory that the message names.",
            "End a run (Ctrl-C) before you remove or rename its directory.",
            "Delete old checkpoints with `unisono checkpoint prune RUN`.",
            "Keep run directories out of the scope of cleanup jobs.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("during",),
    ),
    Cause(
        id="dataset_cache_race",
        title="ranks built the same data cache at the same time",
        meaning=(
            "Several processes wrote or replaced the same cache files, and one read a file that was just"
            " moved or not yet complete. unisono prepares the data once, before any rank starts."
        ),
        telltales=(
            "`FileNotFoundError` on `cache-….arrow` on one rank",
            "`pyarrow.lib.ArrowInvalid` while opening a cache file",
            "`Stale file handle` below the cache directory",
        ),
        neighbours=(
            ("io_blocked", "the storage does not answer at all"),
            ("corrupt_checkpoint", "the file is a checkpoint, not a cache"),
        ),
        remedy=(
            "Build the cache on one rank first: `with training_args.main_process_first():`.",
            "Delete the incomplete cache and start again.",
            "Keep HF_HOME on a local disk of each node.",
        ),
        exit_code=5,
        retry_helps=True,
        when=("after",),
    ),
    Cause(
        id="missing_dependency",
        title="a Python package is missing",
        meaning=(
            "The environment of the program lacks a package; with several nodes perhaps only on one of them."
        ),
        telltales=(
            "`ModuleNotFoundError: No module named 'sentencepiece'`",
            "`requires the following packages that were not found`",
        ),
        neighbours=(
            ("version_mismatch", "the package is installed in an incompatible version"),
            ("flash_attn_missing", "the package is flash-attn"),
        ),
        remedy=(
            "Install it into the environment of the program: `python -m pip install PACKAGE`.",
            "Check that it is that environment: `python -c 'import sys; print(sys.prefix)'` on every node.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="flash_attn_missing",
        title="FlashAttention was requested but is not installed",
        meaning=(
            "The program or the model's config requests flash-attn's kernels, which need a separate package"
            " and a supported GPU."
        ),
        telltales=(
            (
                "`FlashAttention2 has been toggled on, but it cannot be used due to the following error: the"
                " package flash_attn seems to be not installed`"
            ),
        ),
        neighbours=(
            ("missing_dependency", "a different package is missing"),
            ("cuda_arch_unsupported", "it is installed, but has no code for this GPU"),
        ),
        remedy=(
            "Use torch's own kernels instead: attn_implementation='sdpa'.",
            "Or install it for the installed torch: `pip install flash-attn --no-build-isolation`.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="bnb_no_gpu",
        title="bitsandbytes cannot use this machine",
        meaning=(
            "Quantized loading or an 8-bit optimizer was requested, and bitsandbytes finds no supported"
            " device, or not its own library."
        ),
        telltales=(
            "`CUDA Setup failed despite GPU being available`",
            "`Using `bitsandbytes` 4-bit quantization requires` the latest version of bitsandbytes",
            "`libbitsandbytes_cpu.so: undefined symbol: cget_managed_ptr`",
        ),
        neighbours=(
            ("no_cuda_build", "torch itself has no CUDA"),
            ("missing_dependency", "bitsandbytes is not installed"),
        ),
        remedy=(
            "`pip install --upgrade bitsandbytes`, then `python -m bitsandbytes`.",
            "Or avoid quantization: bfloat16 weights and an adapter.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="hub_unreachable",
        title="the model hub cannot be reached",
        meaning=(
            "Files must be downloaded, but the hub does not answer from this machine: no internet access, a"
            " proxy, an outage, a rate limit."
        ),
        telltales=(
            "`We couldn't connect to 'https://huggingface.co' to load the files`",
            "`Max retries exceeded with url`",
            "`LocalEntryNotFoundError`, `OfflineModeIsEnabled`",
        ),
        neighbours=(
            ("gated_model", "the hub answers 401 or 403"),
            ("model_path_missing", "it was intended to be a local directory"),
        ),
        remedy=(
            (
                "Download on a machine with internet access, `hf download NAME --local-dir DIR`, and set"
                " model.path to DIR."
            ),
            "Set HF_ENDPOINT to a mirror, or HTTPS_PROXY.",
            "If everything is in the cache already: HF_HUB_OFFLINE=1.",
        ),
        exit_code=2,
        retry_helps=True,
        when=("before", "after"),
    ),
    Cause(
        id="gated_model",
        title="access to the model was refused",
        meaning=(
            "The model requires acceptance of its terms, or is private, and the request had no token with"
            " that permission."
        ),
        telltales=(
            "`Cannot access gated repo for url`",
            "`401 Client Error`, `403 Client Error`",
            "`GatedRepoError`",
        ),
        neighbours=(
            ("hub_unreachable", "the hub does not answer at all"),
            (
                "model_path_missing",
                "404: the model does not exist, or it is private and you are not logged in",
            ),
        ),
        remedy=(
            "Accept the terms on the model's page, with the account of your token.",
            (
                "Set the token on every node: `hf auth login`, or HF_TOKEN in the environment, never in a"
                " config."
            ),
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="model_path_missing",
        title="the model's directory or its files are missing",
        meaning=(
            "The path does not exist on this node and is interpreted as a hub id; or the directory lacks a"
            " file that the model needs."
        ),
        telltales=(
            "`Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data/models/x'`",
            "`does not appear to have a file named config.json`",
            "`Error no file named model.safetensors`",
        ),
        neighbours=(
            ("hub_unreachable", "it is a hub id, and the hub does not answer"),
            ("storage_not_shared", "the path exists on other nodes"),
        ),
        remedy=(
            "Check on every node: `ls PATH`, and the spelling of model.path.",
            (
                "Copy the complete directory: config.json, the safetensors files and their index, the"
                " tokenizer's files."
            ),
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="healthy",
        title="nothing is wrong",
        meaning="The run has finished, or is running normally. A healthy log can contain alarming warnings.",
        telltales=(
            (
                "a final line after the last error: `train_runtime`, `max_epochs=N reached`, `worker group"
                " successfully finished`"
            ),
            "a launcher that restarted after a failure and succeeded",
        ),
        neighbours=(
            ("nan_loss", "it finished, but the loss is NaN: the result is useless"),
            ("teardown_crash", "it finished, but aborted afterwards"),
        ),
        remedy=("Nothing needs to be done.",),
        exit_code=0,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="undetermined",
        title="the cause cannot be determined from the logs",
        meaning=(
            "Only consequences are visible: lost connections, timeouts, aborted communicators. The log of the"
            " rank that failed first is missing, or contains no cause."
        ),
        telltales=(
            (
                "`Connection closed by peer`, `recvValue failed`, `failed to recv, got 0 bytes`, `NCCL"
                " communicator was aborted`, and nothing else"
            ),
        ),
        neighbours=(
            ("rank_died_first", "one log stops earlier than the others"),
            ("rank_stalled", "the others timed out, and one log shows that work continues"),
        ),
        remedy=(
            (
                "Collect the missing information: the logs of all ranks and nodes, `dmesg -T`, the"
                " scheduler's messages."
            ),
            (
                "For the next time: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1,"
                " PYTHONFAULTHANDLER=1."
            ),
        ),
        exit_code=5,
        retry_helps=True,
        when=("after",),
    ),
)
