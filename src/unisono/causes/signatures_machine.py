"""Signatures of machines: memory, disks, devices, drivers, limits."""

from unisono.causes.signature import Signature

_TORCH = "torch 2.13, "

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
        source="CUDA 12: of a kernel, or of a device that is about to fail; dmesg tells which",
        example="[rank3]: RuntimeError: CUDA error: unspecified launch failure", look_alike="CUDA error: device-side assert triggered",
    ),
)  # fmt: skip
