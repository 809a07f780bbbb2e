"""This machine's network, and what lies between several: interfaces, names, ports, the firewall, speed."""

from unisono.doctor.network.catalogue import CATALOGUE
from unisono.doctor.network.checks import check_network, check_port

CHECKS = (check_network, check_port)

__all__ = ["CATALOGUE", "CHECKS"]
