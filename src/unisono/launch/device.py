"""Chooses the one device of a run. Pure: the machine and the environment are handed in."""

from unisono.errors import UsageError
from unisono.facts import Machine
from unisono.facts.machine import Gpu
from unisono.plan import DeviceChoice

_BFLOAT16_SINCE = (8, 0)  # Ampere


def choose_device(
    machine: Machine, *, wish: str, named: str | None, visible: str | None, torch_version: str = ""
) -> tuple[DeviceChoice, str]:
    """The device, and where the choice came from.

    Args:
        machine: this machine.
        wish: the config's `device`: auto, cpu or cuda.
        named: `--devices`: a physical index or a UUID.
        visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
        torch_version: of the installed torch; `+cpu` in it means that it cannot use an accelerator.

    Raises:
        UsageError: if there is no such device, or it may not be used.
    """
    if wish == "cpu":
        if named is not None:
            raise UsageError.of(
                f"--devices {named} names an accelerator, but the config says `device: cpu`",
                where="command line", fix="leave out --devices, or pass device=cuda",
            )  # fmt: skip
        return _cpu(machine), "device: cpu"
    gpus = _visible(machine.gpus, visible)
    why_not = _why_none(machine, gpus, visible, torch_version)
    if named is None and wish == "auto" and why_not:
        return _cpu(machine), f"auto: {why_not}"
    if why_not:
        raise UsageError.of(
            "there is no CUDA device for this run", where="--devices" if named else "device", why=why_not,
            fix="set `device: cpu`, or mend what the line above says",
        )  # fmt: skip
    if named is not None:
        return _cuda(_named(gpus, machine.gpus, named, visible)), "--devices"
    origin = (
        f"the first of {len(gpus)} visible; --devices picks another" if len(gpus) > 1 else "the visible one"
    )
    return _cuda(gpus[0]), f"{wish}: {origin}"


def _visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """Those of the machine's GPUs that CUDA_VISIBLE_DEVICES lets through, in its order."""
    if visible is None:
        return gpus
    found = []
    for word in (part.strip() for part in visible.split(",")):
        gpu = _match(gpus, word)
        if gpu is None:  # as CUDA does: an entry that is no device ends the list
            break
        found.append(gpu)
    return found


def _match(gpus: list[Gpu], word: str) -> Gpu | None:
    if word.isascii() and word.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(word)), None)
    near = [gpu for gpu in gpus if word and gpu.uuid.lower().startswith(word.lower())]
    return near[0] if len(near) == 1 else None


def _why_none(machine: Machine, gpus: list[Gpu], visible: str | None, torch_version: str) -> str:
    """Why no accelerator can be used; empty where one can."""
    if not machine.gpus:
        return machine.gpu_note or "no accelerator was found"
    if not gpus:
        return f"CUDA_VISIBLE_DEVICES={visible} hides the {len(machine.gpus)} that are here"
    if "+cpu" in torch_version:
        return f"torch {torch_version} is built without CUDA"
    return ""


def _named(gpus: list[Gpu], everything: list[Gpu], word: str, visible: str | None) -> Gpu:
    if "," in word:
        raise UsageError.of(
            f"--devices {word} names several devices", where="command line", why="a run has one device",
            fix="name one, by its index or its UUID",
        )  # fmt: skip
    gpu = _match(gpus, word.strip())
    if gpu is not None:
        return gpu
    known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
    hidden = _match(everything, word.strip()) is not None
    raise UsageError.of(
        f"there is no device {word} for this run", where="command line, --devices",
        why=f"CUDA_VISIBLE_DEVICES={visible} hides it" if hidden else "", fix=f"one of {known}",
    )  # fmt: skip


def _cpu(machine: Machine) -> DeviceChoice:
    return DeviceChoice(
        kind="cpu", name=machine.cpu_name, memory_bytes=machine.memory_available_bytes,
        bfloat16=machine.cpu_bfloat16,
    )  # fmt: skip


def _cuda(gpu: Gpu) -> DeviceChoice:
    return DeviceChoice(
        kind="cuda", index=gpu.index, uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_free_bytes,
        bfloat16=gpu.capability >= _BFLOAT16_SINCE,
    )  # fmt: skip
