"""Causes that lie in the machine: memory, disks, limits, devices, drivers, network cards."""

from unisono.causes.cause import Cause, Ours

MACHINE_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="cuda_oom",
        title="the accelerator ran out of memory",
        meaning=(
            "Weights, optimizer state and activations together need more memory than is free on the device. The longest batch decides, not the average one."
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
            Ours("Set memory.gradient_checkpointing to true: activations are recomputed instead of stored."),
            Ours("Lower batch.micro; the global batch, and so the result, stays the same."),
            Ours("Lower data.max_length, if the longest rows need not stay complete."),
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
            "The host's RAM, or the limit of the container, was used up, and the kernel killed a process. Its own log shows nothing."
        ),
        telltales=(
            "dmesg: `oom-kill:` and `Killed process 1234 (python)`",
            "`Reason: OOMKilled` (Kubernetes), `oom_kill events` (Slurm), oom_kill in the cgroup's memory.events",
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
            Ours("Lower batch.micro or data.max_length; set memory.gradient_checkpointing to true."),
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
            "A file could not be written: the disk, a quota, or the number of inodes is used up. Usually checkpoints fill it."
        ),
        telltales=(
            "`[Errno 28] No space left on device`",
            "`PytorchStreamWriter failed writing file`",
            "torch.save on a full disk may say only `basic_ios::clear: iostream error`",
            "`StorageFull`, `Disk quota exceeded`",
        ),
        neighbours=(
            ("shm_too_small", "the path is below /dev/shm"),
            ("storage_unfit", "there was not enough space from the start"),
        ),
        remedy=(
            "Free space: `df -h PATH`, `df -i PATH`, `du -xh --max-depth=1 PATH | sort -h`.",
            Ours("Keep fewer checkpoints (checkpoint.keep), or put output_dir on a larger disk."),
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
            "The driver lost contact with the device: power, heat, a riser, or the device itself. Software cannot restore it without a reset."
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
            "The device found more flipped bits than its error correction can fix. Results computed with them cannot be trusted."
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
        meaning="The build of torch, or of an extension, does not contain kernels for the device, because the device is too new or too old.",
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
            "A program needs CUDA or NCCL, but the installed torch is the CPU build, or the container was started without access to the devices."
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
            "The file system /dev/shm is full. Containers get 64 MB of it by default; NCCL and data loaders need more."
        ),
        telltales=(
            "`Error while creating shared memory segment /dev/shm/nccl-AbCdEf`",
            "`failed to extend /dev/shm/nccl-…`",
            "`unable to allocate shared memory(shm) for file </torch_…>: No space left on device (28)`",
            "`DataLoader worker … is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory`",
        ),
        neighbours=(
            ("disk_full", "the path is not below /dev/shm"),
            ("ulimit", "`Too many open files` is part of the same message"),
        ),
        remedy=(
            "`docker run --shm-size=8g …` or `--ipc=host`; in Kubernetes mount an emptyDir with medium Memory at /dev/shm.",
            "Look for leftovers of dead processes: `ls -l /dev/shm`.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="ulimit",
        title="a limit of the operating system was reached",
        meaning="The process cannot open more files, write a larger file, lock more memory, or start more threads.",
        telltales=(
            "`OSError: [Errno 24] Too many open files`, also inside `unable to open shared memory object`",
            "`OSError: [Errno 27] File too large`, or a program killed by SIGXFSZ: `ulimit -f`",
            "`Resource temporarily unavailable` when a thread or process is started",
            "`ibv_reg_mr` or `Cannot allocate memory` with a small `ulimit -l`",
        ),
        neighbours=(("shm_too_small", "space, not the number of files"),),
        remedy=(
            "`ulimit -n 65536` before the start, or LimitNOFILE= in the service, nofile in limits.conf.",
            "`ulimit -f unlimited` before the start, or LimitFSIZE=infinity in the service, fsize in limits.conf.",
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
            "NCCL found no interface, or used one that exists on every host but does not connect them: docker0, virbr0, lo, a veth."
        ),
        telltales=(
            "`Bootstrap : no socket interface found`",
            "`connecting to address  with family 0 is neither AF_INET(2) nor AF_INET6(10)`",
            "`Bootstrap : Using docker0:172.17.0.1` (NCCL_DEBUG=INFO), and a different interface on the next node",
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
            "NCCL uses the RDMA adapter, but packets do not arrive: a port that is down, a wrong GID index, a different subnet, or a limit on locked memory."
        ),
        telltales=(
            "`NET/IB : Got completion from peer … with status=12 … vendor err 129`",
            "`Call to ibv_modify_qp failed`",
            "`Call to ibv_reg_mr failed`",
        ),
        neighbours=(
            ("rank_died_first", "status=5, vendor err 249 is flushed work: a peer died first"),
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
            "The topology promises peer-to-peer transfers, but the IOMMU, ACS or the virtual machine blocks them. NCCL sets them up and then hangs, or gets an error."
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
