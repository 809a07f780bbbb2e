"""How busy accelerators are: at 100 % without progress, kernels wait for another rank's; at 0 %, nobody has given them work."""

import queue
import threading
import time
from typing import Any, Protocol

_FRESH_S = 3.0


class GpuUse(Protocol):
    """Tells how busy a device is. Asked a few times a second, so an answer must cost nothing."""

    def percent(self, uuid: str) -> int | None:
        """Of the last moment; None where it is not known, or not known yet."""
        ...


class NoGpuUse:
    """Knows of none."""

    def percent(self, uuid: str) -> int | None:
        """Not known."""
        del uuid
        return None


class NvidiaUse:
    """Asks the NVIDIA driver, in a thread: a driver that has lost its device may not answer for minutes. The thread ends with the process."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._known: dict[str, tuple[float, int]] = {}
        threading.Thread(target=self._run, name="gpu-use", daemon=True).start()

    def percent(self, uuid: str) -> int | None:
        """What was found last, if that is not old; asks for it again."""
        if uuid not in self._asked:
            self._asked.add(uuid)
            self._wanted.put(uuid)
        at, percent = self._known.get(uuid, (0.0, 0))
        return percent if time.monotonic() - at < _FRESH_S and uuid in self._known else None

    def _run(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return  # nothing is known, as without a driver
        while True:
            uuid = self._wanted.get()
            try:
                rates = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByUUID(uuid))
                self._known[uuid] = time.monotonic(), int(rates.gpu)
            except nvml.NVMLError:
                self._known.pop(uuid, None)
            self._asked.discard(uuid)


def gpu_use() -> GpuUse:
    """By nvidia-ml-py, where that is installed."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return NoGpuUse()
    return NvidiaUse(pynvml)
