"""All checks, area by area. An area's module has CATALOGUE, its checks as data, and CHECKS, the functions that make them."""

from unisono.doctor import between, devices, ladder, needs, network, peers, settings, system
from unisono.doctor.check import Area, Check, CheckFunction

REGISTRY: tuple[tuple[Area, tuple[CheckFunction, ...]], ...] = (
    ("system", system.CHECKS),
    ("settings", settings.CHECKS),
    ("config", needs.CHECKS),
    ("devices", devices.CHECKS),
    ("network", (*network.CHECKS, *ladder.CHECKS)),
)
"""In the order in which they are shown; areas are looked at side by side."""

CATALOGUE: tuple[Check, ...] = (
    *system.CATALOGUE,
    *settings.CATALOGUE,
    *needs.CATALOGUE,
    *devices.CATALOGUE,
    *network.CATALOGUE,
    *ladder.CATALOGUE,
    *peers.CATALOGUE,
    *between.CATALOGUE,
)
"""Every check that there is."""
