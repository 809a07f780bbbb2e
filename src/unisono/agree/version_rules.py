"""Which versions must be equal on all nodes, and down to which part: a policy table."""

import re
from dataclasses import dataclass
from typing import Literal

Part = Literal["exact", "release", "minor", "major"]

_DEPTH: dict[Part, int] = {"major": 1, "minor": 2}


@dataclass(frozen=True, slots=True)
class VersionRule:
    """How equal the versions of one package must be; a smaller difference is only a warning."""

    package: str
    part: Part
    why: str


VERSION_RULES: dict[str, VersionRule] = {
    rule.package: rule
    for rule in (
        VersionRule("unisono", "exact", "the messages between nodes and the order of steps are its own"),
        VersionRule("python", "minor", "hashes, random streams and bytecode change between minor versions"),
        VersionRule("torch", "release", "collectives, and the bits of many kernels, change between releases"),
        VersionRule("cuda", "major", "kernels and NCCL are built for one major version"),
        VersionRule("nccl", "release", "ranks with different NCCL do not understand each other"),
        VersionRule("transformers", "release", "models and chat templates change between releases"),
        VersionRule(
            "peft", "release", "names, shapes and initial values of adapters change between releases"
        ),
    )
}
"""All else differs with a warning."""

BY_HAND: dict[str, tuple[str, ...]] = {
    "python": (
        "on {who}: make the environment anew with Python {value}",
        "or use one container image on all nodes",
    ),
    "cuda": (
        "on {who}: install a torch that is built for CUDA {value}",
        "or use one container image on all nodes",
    ),
    "nccl": (
        "on {who}: install the same torch, which brings NCCL {value}",
        "LD_LIBRARY_PATH and LD_PRELOAD may lead to another NCCL",
    ),
    "driver": ("on {who}: install the NVIDIA driver {value}, if the others do well with it",),
}
"""What pip cannot install."""


def essential(package: str, version: str | None) -> str | None:
    """The part of `version` that must be equal; None where it is not installed, or where nothing is asked of the package."""
    rule = VERSION_RULES.get(package)
    if rule is None or version is None:
        return None
    if rule.part == "exact":
        return version
    public = version.partition("+")[0].strip()
    return public if rule.part == "release" else ".".join(public.split(".")[: _DEPTH[rule.part]])


def release_of(version: str) -> tuple[int, ...]:
    """`2.26.2+cuda12.2` as (2, 26, 2); empty if it does not begin with a number."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")[:6] if len(part) < 10) if found else ()
