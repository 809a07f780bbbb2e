"""Writes the composed machines: `python tests/front/checks/recorded/compose.py`.

See README.md beside it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GB = 10**9
MIB = 2**20
Matrix = list[list[int]]
INTERNAL, SINGLE, MULTIPLE, HOSTBRIDGE, NODE, SYSTEM = 0, 10, 20, 30, 40, 50


def device(kind: dict[str, Any], place: int, bus: str, *, used: int, **more: Any) -> dict[str, Any]:
    total = kind["memory"]
    return {
        "nvmlDeviceGetUUID": f"GPU-{place:08x}-{kind['mark']}-4b1e-9d2c-0123456789ab",
        "nvmlDeviceGetName": kind["name"],
        "nvmlDeviceGetMemoryInfo": {"total": total, "free": total - used, "used": used},
        "nvmlDeviceGetPciInfo": {"busId": f"00000000:{bus}:00.0"},
        "nvmlDeviceGetCudaComputeCapability": kind["capability"],
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetTotalEccErrors": {"1,0": 0},
        "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
        "nvmlDeviceGetComputeMode": 0,
        **(
            {"nvmlDeviceGetRemappedRows": [0, 0, 0, 0]}
            if kind["capability"] >= [8, 0]
            else {"nvmlDeviceGetRetiredPagesPendingStatus": 0}
        ),
        **more,
    }


H100 = {"name": "NVIDIA H100 80GB HBM3", "memory": 81559 * MIB, "capability": [9, 0], "mark": "a100"}
L20 = {"name": "NVIDIA L20", "memory": 46068 * MIB, "capability": [8, 9], "mark": "b200"}
A10G = {"name": "NVIDIA A10G", "memory": 23028 * MIB, "capability": [8, 6], "mark": "c300"}
A100 = {"name": "NVIDIA A100-PCIE-40GB", "memory": 40960 * MIB, "capability": [8, 0], "mark": "d400"}
T4 = {"name": "Tesla T4", "memory": 15360 * MIB, "capability": [7, 5], "mark": "e500"}


def matrix(count: int, value: Callable[[int, int], int]) -> Matrix:
    return [[0 if a == b else value(min(a, b), max(a, b)) for b in range(count)] for a in range(count)]


def machine(
    name: str, devices: Sequence[dict[str, Any]], *, numa: Sequence[int | None], level: Callable[[int, int], int],
    peers: Callable[[int, int], int] = lambda a, b: 0, log: list[list[Any]] | None = None, processes: dict[str, list[str]] | None = None,
    on_bus: Sequence[str] = (), driver: str = "550.90.07", cuda: int = 12040,
) -> None:  # fmt: skip
    buses = [one["nvmlDeviceGetPciInfo"]["busId"][4:].lower() for one in devices if "lost" not in one]
    count = len(devices)
    body = {
        "composed": True,
        "system": {"nvmlSystemGetDriverVersion": driver, "nvmlSystemGetCudaDriverVersion": cuda},
        "devices": list(devices),
        "pairs": {
            "nvmlDeviceGetTopologyCommonAncestor": matrix(count, level),
            "nvmlDeviceGetP2PStatus": {"0": matrix(count, peers), "1": matrix(count, peers)},
        },
        "beside": {
            "numa_node": {bus: node for bus, node in zip(buses, numa, strict=False) if node is not None},
            "on_bus": [*buses, *on_bus], "kernel_log": log, "processes": processes or {},
        },
    }  # fmt: skip
    (Path(__file__).parent / f"{name}.json").write_text(
        json.dumps(body, indent=None, separators=(", ", ": ")) + "\n"
    )


def h100(place: int, bus: str, **more: Any) -> dict[str, Any]:
    links = {
        "nvmlDeviceGetNvLinkState": [1] * 18,
        "nvmlDeviceGetNvLinkRemoteDeviceType": [2] * 18,
        "nvmlDeviceGetNvLinkRemotePciInfo": [
            {"busId": f"00000000:{5 + link // 5:02X}:00.0"} for link in range(18)
        ],
        "nvmlDeviceGetGpuFabricInfo": [3, 0],
    }
    return device(H100, place, bus, used=530 * MIB, **{**links, **more})


HGX = ("18", "2A", "3A", "5D", "9A", "AB", "BA", "DB")


def hgx(name: str, changes: dict[int, dict[str, Any]] | None = None, **more: Any) -> None:
    machine(
        name, [h100(place, bus, **(changes or {}).get(place, {})) for place, bus in enumerate(HGX)],
        numa=[0] * 4 + [1] * 4, level=lambda a, b: NODE if a // 4 == b // 4 else SYSTEM, **more,
    )  # fmt: skip


def main() -> None:
    hgx("h100_nvswitch_8", log=[])
    hgx(
        "h100_errors_8",
        {
            1: {"nvmlDeviceGetTotalEccErrors": {"1,0": 3}, "nvmlDeviceGetRemappedRows": [0, 1, 1, 0]},
            2: {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x40 | 0x8},
            5: {"nvmlDeviceGetNvLinkState": [1] * 16 + [0, 0]},
        },
        log=[
            ["NVRM: Xid (PCI:0000:2a:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected on GPU", 5400.0],
            ["NVRM: Xid (PCI:0000:2a:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping, reset gpu to activate.", 5399.0],
            ["NVRM: Xid (PCI:0000:ba:00): 13, pid=812, name=python, Graphics SM Warp Exception on (GPC 1, TPC 0, SM 0): Out Of Range Address", 300.0],
        ],
    )  # fmt: skip
    hgx("h100_fabric_8", {place: {"nvmlDeviceGetGpuFabricInfo": [2, 0]} for place in range(8)})
    l20 = ("16", "27", "38", "49", "5A", "98", "A8", "B8", "C8", "D8")
    pairs = ((0, 1), (2, 3), (5, 6), (7, 8))
    machine(
        "l20_two_sockets_10", [device(L20, place, bus, used=4 * MIB) for place, bus in enumerate(l20)], numa=[0] * 5 + [1] * 5,
        level=lambda a, b: SINGLE if (a, b) in pairs else NODE if a // 5 == b // 5 else SYSTEM,
    )  # fmt: skip
    machine(
        "a10g_4", [device(A10G, place, bus, used=2 * MIB) for place, bus in enumerate(("1B", "1C", "1D", "1E"))], numa=[0] * 4,
        level=lambda a, b: HOSTBRIDGE, peers=lambda a, b: 1, driver="535.183.01", cuda=12020,
    )  # fmt: skip
    busy = {"nvmlDeviceGetComputeRunningProcesses": [{"pid": 4242, "usedGpuMemory": 30 * GB}]}
    machine(
        "mixed_4",
        [
            device(A100, 0, "31", used=4 * MIB), device(T4, 1, "4B", used=4 * MIB),
            device(A100, 2, "98", used=31 * GB, **busy), device(A100, 3, "B1", used=4 * MIB),
        ],
        numa=[0, 0, 1, 1], level=lambda a, b: NODE if a // 2 == b // 2 else SYSTEM, processes={"4242": ["ann", "python train.py"]},
    )  # fmt: skip
    machine(
        "a100_mig_2",
        [
            device(A100, 0, "31", used=4 * MIB, nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=7, mig=["MIG-0f5a", "MIG-1c7b"]),
            device(A100, 1, "98", used=4 * MIB, nvmlDeviceGetMigMode=[0, 0]),
        ],
        numa=[0, 1], level=lambda a, b: SYSTEM,
    )  # fmt: skip


if __name__ == "__main__":
    main()
