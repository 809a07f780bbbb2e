"""The checks of the network, as data."""

from unisono.doctor.check import Check

INTERFACES = Check(
    "network.interfaces", "Network interfaces",
    "nodes meet over one interface of each; where it is down, slow or missing they wait for each other until a time-out",
    "The kernel's list over netlink: kind, state, addresses, MTU, speed. FAIL: several nodes, and no interface but loopback and bridges is up with"
    " an address. WARN: those that are up differ in MTU.",
    ("address_unreachable", "mtu_blackhole"),
)  # fmt: skip
CHOICE = Check(
    "network.choice", "The interface that NCCL and gloo take",
    "a variable that was copied from another machine, or a bridge of containers, leads ranks to addresses that no peer reaches",
    "NCCL_SOCKET_IFNAME (prefixes, ^, =) and GLOO_SOCKET_IFNAME (exact names) against the interfaces that are here; without them the orders of NCCL"
    " (ib…, others, docker…, lo) and gloo (the host name's address). FAIL: nothing fits, or several nodes and it leads to none.",
    ("nccl_socket_iface", "address_unreachable"),
)  # fmt: skip
NAMES = Check(
    "network.names", "Host names",
    "a host name that leads to 127.0.1.1, as some installers write it, sends each peer to itself",
    "This machine's own name and the head's, through the system's resolver. FAIL: the head's name has no address, or leads another node to"
    " itself. WARN: the own name leads to loopback or nowhere, or the resolver takes more than a second.",
    ("hostname_loopback", "dns_failure"),
)  # fmt: skip
INFINIBAND = Check(
    "network.infiniband", "InfiniBand and RoCE ports",
    "a port that is not active, or switched off by a variable, leaves a job on a network that is ten times slower",
    "States, rates and NUMA nodes from /sys/class/infiniband, and NCCL_IB_DISABLE and NCCL_IB_HCA. WARN: a port is down, rates differ, or"
    " active ports are not used.",
)  # fmt: skip
PORT = Check(
    "network.port", "The port on which the head listens",
    "on a port that another program has, the other nodes meet that program and hang without a word",
    "On node 0 the port of --head or MASTER_PORT (else 29500, where torchrun's ranks meet) is bound and let go. FAIL: it is taken, and the job needs it. WARN: it is"
    " taken and only torchrun's default, or lies where the system gives out ports by chance.",
    ("port_in_use",),
)  # fmt: skip
FIREWALL = Check(
    "network.firewall", "Firewall of this machine",
    "ranks listen on ports that are chosen at run time, so a firewall that opens only some lets a job begin and hang",
    "Rules for packets that come in, from iptables and nft; only root can list them. WARN: several nodes, and some are refused. UNKNOWN: several nodes, and no root or neither program."
    " Firewalls elsewhere are found by the nodes' dialling of each other (--nodes).",
    ("address_unreachable",),
)  # fmt: skip

CATALOGUE = (INTERFACES, CHOICE, NAMES, INFINIBAND, PORT, FIREWALL)
