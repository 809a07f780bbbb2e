"""Accelerators and processors: which there are, how they are joined, whether they are well, and whether the choice is a good one."""

from unisono.doctor.devices.catalogue import CATALOGUE
from unisono.doctor.devices.checks import check_devices, check_processors

CHECKS = (check_devices, check_processors)

__all__ = ["CATALOGUE", "CHECKS"]
