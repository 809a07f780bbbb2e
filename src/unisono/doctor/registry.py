"""All checks, area by area. An area's module has CATALOGUE, its checks as data, and CHECKS, the functions that make them."""

from unisono.doctor.between import CATALOGUE as BETWEEN
from unisono.doctor.check import Area, Check, CheckFunction
from unisono.doctor.devices.catalogue import CATALOGUE as DEVICES
from unisono.doctor.devices.checks import CHECKS as DEVICES_CHECKS
from unisono.doctor.ladder.checks import CATALOGUE as LADDER
from unisono.doctor.ladder.checks import CHECKS as LADDER_CHECKS
from unisono.doctor.needs import CATALOGUE as NEEDS
from unisono.doctor.needs import CHECKS as NEEDS_CHECKS
from unisono.doctor.network.catalogue import CATALOGUE as NETWORK
from unisono.doctor.network.checks import CHECKS as NETWORK_CHECKS
from unisono.doctor.peers import CATALOGUE as PEERS
from unisono.doctor.settings import CATALOGUE as SETTINGS
from unisono.doctor.settings import CHECKS as SETTINGS_CHECKS
from unisono.doctor.system import CATALOGUE as SYSTEM
from unisono.doctor.system import CHECKS as SYSTEM_CHECKS

REGISTRY: tuple[tuple[Area, tuple[CheckFunction, ...]], ...] = (
    ("system", SYSTEM_CHECKS),
    ("settings", SETTINGS_CHECKS),
    ("config", NEEDS_CHECKS),
    ("devices", DEVICES_CHECKS),
    ("network", (*NETWORK_CHECKS, *LADDER_CHECKS)),
)
"""In the order in which they are shown; areas are looked at side by side."""

CATALOGUE: tuple[Check, ...] = (
    *SYSTEM,
    *SETTINGS,
    *NEEDS,
    *DEVICES,
    *NETWORK,
    *LADDER,
    *PEERS,
    *BETWEEN,
)
"""Every check that there is."""
