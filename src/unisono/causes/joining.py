"""Causes found while nodes look for each other: who is missing, who cannot be reached, which names and ports are wrong."""

from unisono.causes.cause import Cause

CAUSES: tuple[Cause, ...] = (
    Cause(
        id="node_missing",
        title="a node never called",
        meaning=(
            "The job waits for a node that has not been started, has failed before it could say so, or cannot reach the head."
            " Whoever waits knows only that somebody is absent."
        ),
        telltales=(
            "the nodes that are there print nothing at all and wait",
            "`Timed out after 601 seconds waiting for clients. 1/2 clients joined.`",
        ),
        neighbours=(
            ("head_unreachable", "seen from the other side: the node is there and cannot reach the head"),
            ("rdzv_timeout", "what the log says where it is not known who was missing"),
            ("nproc_mismatch", "all nodes called, with different numbers of ranks"),
        ),
        remedy=(
            "Look at the missing node's own terminal or log; its error is there and nowhere else.",
            "Start the command on every node, with the same head, and node ranks from 0 without a gap.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before",),
    ),
    Cause(
        id="node_refused",
        title="a node does not start",
        meaning=(
            "A node of the job has refused its own start, for example because its config is bad or a file is missing there, or"
            " somebody has stopped it. Nothing was trained on any node."
        ),
        telltales=("`node 1 (b) does not start: …` with that node's own words, on every node",),
        neighbours=(
            ("node_missing", "the node never called, or left without a word"),
            ("config_mismatch", "all nodes would start, and mean different runs"),
        ),
        remedy=("Mend what that node says, there, and start the command again on every node.",),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="node_duplicate",
        title="two nodes call themselves by the same rank",
        meaning=(
            "The same node rank was given twice, often because one command line was copied to all nodes without changing it, or"
            " because an earlier start still lives on a node."
        ),
        telltales=(
            "`EADDRINUSE` on one node, silence on the others, with the same NODE_RANK in both commands",
            "two processes with RANK=0",
        ),
        neighbours=(
            ("stale_process", "the second one is left over from an earlier start"),
            ("port_in_use", "the port is held by another program, and ranks are unique"),
        ),
        remedy=("Give each node its own rank: 0, 1, 2 … (NODE_RANK, or torchrun's --node_rank).",),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="stale_process",
        title="a process of an earlier start is still alive",
        meaning=(
            "A rank or a launcher that should have ended still holds a port, a lock, or GPU memory, or answers in place of the new one."
        ),
        telltales=(
            "GPU memory in use although nothing of yours should run",
            "a rank joins with another run's id, or the port is taken by your own program",
        ),
        neighbours=(
            ("port_in_use", "the holder is a foreign program"),
            ("node_duplicate", "both were started on purpose, with one rank too often"),
        ),
        remedy=(
            "Find it: `ps -ef | grep -E 'torchrun|unisono.worker'`, `nvidia-smi`, `ss -ltnp`; end it by its pid.",
            "Then start again.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before",),
    ),
    Cause(
        id="head_unreachable",
        title="this node cannot reach the head",
        meaning=(
            "The address or port of the head does not answer: it is not started, it listens somewhere else, or something between drops the packets."
        ),
        telltales=(
            "`has timed out after 60000ms while trying to connect to (HOST, PORT)`",
            "`Connection refused` (nobody listens) or no answer at all (a firewall)",
        ),
        neighbours=(
            ("dns_failure", "the name of the head has no address"),
            ("hostname_loopback", "the name has an address, and it is this machine's own"),
            ("node_missing", "the same seen from the head"),
        ),
        remedy=(
            "From this node: `nc -vz HEAD PORT`. Refused: start the head first. No answer: open the firewall.",
            "Use an address of the network that both nodes share, not of a management or container network.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before",),
    ),
    Cause(
        id="token_rejected",
        title="a node does not know the job's secret",
        meaning="A process called whose proof does not fit: it has another token, an old one, or does not belong to this job.",
        telltales=("a node is refused at once although it reaches the head",),
        neighbours=(("stale_process", "a process of an earlier start carries that start's token"),),
        remedy=("Give the same token to all nodes of the job.", "End processes of earlier starts."),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="address_unreachable",
        title="two nodes cannot reach each other directly",
        meaning=(
            "Both reach the head, and not one another: a firewall that opens one port only, an interface with the same address on"
            " every host (docker0, virbr0), or a route in one direction. Ranks talk to each other on ports that are chosen at run time."
        ),
        telltales=(
            "the rendezvous is complete and the first collective hangs",
            "`Gloo connectFullMesh failed with …`",
            "`Connection refused` or `timed out` between two workers, not to the head",
        ),
        neighbours=(
            ("mtu_blackhole", "small messages pass and large ones do not"),
            ("nccl_socket_iface", "only NCCL chose a wrong interface"),
            ("head_unreachable", "not even the head is reached"),
        ),
        remedy=(
            "Open all TCP ports above 1023 between the nodes, in both directions.",
            "Name the right interface on each node: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="mtu_blackhole",
        title="small packets pass between two nodes, large ones are lost",
        meaning=(
            "Somewhere on the way the largest packet is smaller than the interface believes, and nobody reports it. Handshakes succeed; the first big tensor never arrives."
        ),
        telltales=(
            "connections open and then stall at the first large message",
            "`ping -M do -s 8972 HOST` gets no answer while `ping HOST` does",
        ),
        neighbours=(("address_unreachable", "nothing passes at all, not even a handshake"),),
        remedy=(
            "Set one MTU on all interfaces and switches of the path: `ip link set dev IFACE mtu 1500` as a first aid.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="hostname_loopback",
        title="a node's name leads to itself",
        meaning=(
            "The name that peers use for a node resolves to 127.0.0.1 or 127.0.1.1, mostly through a line of /etc/hosts that the"
            " installer wrote. Every node then talks to itself."
        ),
        telltales=(
            "`Unable to resolve hostname to a (local) address. Using the loopback address as fallback`",
            "`Gloo connectFullMesh failed` with 127.0.1.1 in its addresses",
            "MASTER_ADDR=localhost in a job of several nodes",
        ),
        neighbours=(
            ("dns_failure", "the name has no address at all"),
            ("head_unreachable", "the address is right and does not answer"),
        ),
        remedy=(
            "Set MASTER_ADDR to an address that other nodes can reach.",
            "Remove or mend the 127.0.1.1 line of /etc/hosts; `getent hosts $(hostname)` must give a real address.",
            "For gloo name the interface: GLOO_SOCKET_IFNAME=eth0.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="storage_not_shared",
        title="output_dir is not the same storage on all nodes",
        meaning=(
            "The same path leads to different disks. Each node keeps its own part of what should be one directory, and a checkpoint that is spread like this cannot be loaded."
        ),
        telltales=(
            "a file that one node writes is not seen by another",
            "`df PATH` shows a local disk on some nodes",
        ),
        neighbours=(
            ("checkpoint_not_shared", "how it ends where nobody checked at the start"),
            ("storage_unfit", "the storage is shared, and full, read-only or hanging"),
        ),
        remedy=(
            "Mount the same storage at the same path on all nodes, and point output_dir there.",
            "Or use a destination that all nodes reach, such as an object store.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="storage_unfit",
        title="the storage cannot take what the run will write",
        meaning=(
            "output_dir is read-only, belongs to somebody else, hangs, or has less room than the run's checkpoints will need together. Without a check this shows at a save, hours later."
        ),
        telltales=(
            "`Permission denied`, `Read-only file system`",
            "`df -h PATH` or `df -i PATH` (inodes) is near 100 %",
            "`touch PATH/x` does not come back",
            "`the checkpoints of this run do not fit: up to 5 at a time take 7.3 GB, and there are 4.1 GB`, said after the first of them",
        ),
        neighbours=(
            ("disk_full", "there was room at the start, and it was used up during the run"),
            ("io_blocked", "the storage stopped answering during the run"),
        ),
        remedy=(
            "Point output_dir at a directory that you may write and that has room for (checkpoint.keep + 2) checkpoints.",
            "Lower checkpoint.keep, or free space.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "during"),
    ),
    Cause(
        id="port_in_use",
        title="the port is taken",
        meaning=(
            "Another program, or an earlier start, listens on the port that the head should have. The head fails at once; other"
            " nodes may connect to the foreign program and wait for an answer that never comes."
        ),
        telltales=(
            "`The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use`",
            "older torch: `(errno: 98 - Address already in use)`",
            "`recvValue failed on SocketImpl(…)` before any rank was started",
        ),
        neighbours=(
            ("stale_process", "the holder is a left-over of your own"),
            ("node_duplicate", "the holder is another node of this very job, with the same rank"),
        ),
        remedy=(
            "See who has it: `ss -ltnp 'sport = :29500'`.",
            "Choose another port: MASTER_PORT, or the port of torchrun's --rdzv_endpoint.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before", "after"),
    ),
    Cause(
        id="clock_skew",
        title="the clocks of nodes differ",
        meaning=(
            "unisono does not compare clocks of different machines, but others do: torchrun's dynamic rendezvous takes a node whose"
            " clock is tens of seconds off for dead, trains without it, or hangs at the end of a job that succeeded."
        ),
        telltales=(
            "`date` differs by seconds between nodes",
            "both nodes finished training and neither torchrun returns",
            "lines of merged logs in an impossible order",
        ),
        neighbours=(("world_mismatch", "what it leads to when a node is dropped"),),
        remedy=("Synchronise: `chronyc tracking`, `timedatectl set-ntp true`; under 1 s is enough.",),
        exit_code=0,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="rdzv_timeout",
        title="the ranks did not find each other in time",
        meaning=(
            "The rendezvous ended without all members, and the log does not say who was missing or why. Something on an absent node came first: its own log knows."
        ),
        telltales=(
            "`torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError`",
            "`Timed out after 601 seconds waiting for clients. 1/2 clients joined.`",
            "`RendezvousConnectionError: The connection to the C10d store has failed`",
            "`has timed out after 60000ms while trying to connect to (HOST, PORT)`",
        ),
        neighbours=(
            ("dns_failure", "a `gai error` stands above: the name has no address"),
            ("hostname_loopback", "the address that was tried is a loopback one"),
            ("user_code_error", "the missing rank's log ends in an exception: that is the cause"),
            ("node_missing", "it is known which node never came"),
        ),
        remedy=(
            "Collect the logs of all nodes; read first the one that is shortest.",
            "Start all nodes with the same number of nodes, id and endpoint.",
            "Check the way: `nc -vz HOST PORT` from every node; open the firewall.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("after",),
    ),
    Cause(
        id="dns_failure",
        title="a host name has no address",
        meaning=(
            "The name of the head is unknown to the resolver of at least one node. torch tries for a long time; its last line says only that the client timed out."
        ),
        telltales=(
            "`The IPv4 network addresses of (HOST, PORT) cannot be retrieved (gai error: -2 - Name or service not known)`",
            "`gai error: -3 - Temporary failure in name resolution`",
            "`socket.gaierror`",
        ),
        neighbours=(
            ("hostname_loopback", "the name has an address, and a wrong one"),
            ("hub_unreachable", "it is the name of a download server"),
            ("healthy", "only the IPv6 line appears and the run goes on: harmless"),
        ),
        remedy=(
            "Put an IP address into MASTER_ADDR.",
            "Or add the name to DNS or to /etc/hosts of every node; `getent hosts NAME` must answer on each.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before", "after"),
    ),
)
