"""The checks of devices, as data."""

from unisono.doctor.check import Check

SEEN = Check(
    "devices.seen", "Visible and physical devices",
    "a rank that does not find its device fails at once, and a device that has dropped out takes its whole job with it",
    "NVML's list (nvidia-ml-py) is held against the PCI bus and CUDA_VISIBLE_DEVICES. PASS: also where a device on the bus is not given to this container or job."
    " FAIL: the driver cannot be used, a device that it lists does not answer, or one has fallen off the bus (Xid 79 in the kernel's log)."
    " UNKNOWN: NVIDIA hardware is here and nvidia-ml-py is not, or the driver has said nothing for 30 s.",
    ("gpu_fell_off", "no_cuda_build"),
)  # fmt: skip
LINKS = Check(
    "devices.links", "What joins the devices",
    "two devices without a direct way send every gradient through the host's memory, at a fraction of the speed",
    "Topology, NVLinks and peer access of each two devices from NVML; which transport NCCL is expected to take follows its own rule"
    " (NCCL_P2P_LEVEL, the processor's make). FAIL: NVLink without peer access. WARN: a setting keeps devices from the way that they have, or PCIe"
    " switches send what they exchange up to the host (ACS in the bridges' registers, which only root can read): slow, and with an IOMMU it may hang.",
    ("p2p_blocked",),
)  # fmt: skip
SELECTION = Check(
    "devices.selection", "The chosen devices",
    "across sockets, of several types or in somebody else's use, the slowest pair sets the pace of all",
    "All choices of as many devices, each as large and as new as the chosen ones, are weighed: errors, memory in use, MIG, types, transport between each two, NUMA nodes, gaps."
    " In a Slurm job only those that it was given. WARN: another choice is better; it is written out.",
    ("device_mismatch", "duplicate_gpu"),
)  # fmt: skip
MEMORY = Check(
    "devices.memory", "Memory of the devices in use",
    "a forgotten process that holds memory makes the run fail with `out of memory` when the longest batch comes",
    "NVML's list of processes for each chosen device. WARN: more than a tenth is in use. FAIL: more than half, or the device takes one process"
    " and has it.",
    ("cuda_oom", "stale_process"),
)  # fmt: skip
HEALTH = Check(
    "devices.health", "Errors of the devices",
    "a device with memory errors computes wrong numbers or stops the job after hours",
    "ECC counts, retired pages and rows, reasons for a low clock, NVLinks and the NVSwitch fabric from NVML; Xid errors of the last day from the"
    " kernel's log. FAIL: a grave one on a chosen device; WARN: others.",
    ("ecc_error", "gpu_fell_off"),
)  # fmt: skip
DRIVER = Check(
    "devices.driver", "Driver, CUDA and torch",
    "a torch that is newer than the driver, or older than the device, fails with the first tensor on the device",
    "The driver's newest CUDA (NVML), the CUDA that torch was built for (its files, without importing it) and the devices' capability.",
    ("driver_too_old", "cuda_arch_unsupported", "no_cuda_build"),
)  # fmt: skip
SLICES = Check(
    "devices.mig", "MIG slices",
    "NCCL cannot talk between two slices of one device, and a sliced device cannot be used whole",
    "MIG mode and slices from NVML. FAIL: several ranks, and a chosen device is sliced.",
)  # fmt: skip
PROCESSOR = Check(
    "devices.processor", "Processors",
    "idle cores and ranks that reach across sockets for their memory cost a half of the speed, and nothing says so",
    "Sockets, cores, NUMA nodes and instruction sets from /proc and /sys. Judged where ranks run on the CPU: WARN where half of the cores stay idle, or ranks do not divide over NUMA nodes.",
)  # fmt: skip
BFLOAT16 = Check(
    "devices.bfloat16", "bfloat16 on this processor",
    "emulated bfloat16 is slower than float32 on a CPU",
    "The flags amx_bf16, avx512_bf16 and bf16 of /proc/cpuinfo. WARN: the config asks for it and none is there.",
)  # fmt: skip

CATALOGUE = (SEEN, LINKS, SELECTION, MEMORY, HEALTH, DRIVER, SLICES, PROCESSOR, BFLOAT16)
