"""This machine's network, and what lies between several: interfaces, names, ports, the firewall, speed."""
