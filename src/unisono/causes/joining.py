"""Causes found while nodes look for each other: who is missing, who cannot be reached, which names and ports are wrong."""

from unisono.causes.cause import Cause

RENDEZVOUS_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="node_missing",
        title="a node never connected",
        meaning=(
            "The job waits for a node that has not been started, has failed before it could report it, or cannot reach the head."
            " The waiting nodes only know which node is absent."
        ),
        telltales=(
            "the nodes that are present print nothing and wait",
            "`Timed out after 601 seconds waiting for clients. 1/2 clients joined.`",
        ),
        neighbours=(
            (
                "head_unreachable",
                "the same from the other side: the node is present but cannot reach the head",
            ),
            ("rdzv_timeout", "the message in a log if it is unknown which node was missing"),
            ("nproc_mismatch", "all nodes connected, with different numbers of ranks"),
        ),
        remedy=(
            "Check the missing node's own terminal or log; only it contains the error.",
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
            "A node of the job has refused to start, e.g. because its config is wrong or a file is missing there, or"
            " because it was stopped. Nothing was trained on any node."
        ),
        telltales=("`node 1 (b) does not start: …` with that node's own message, on every node",),
        neighbours=(
            ("node_missing", "the node never connected, or exited silently"),
            ("config_mismatch", "nodes start, but with different run configurations"),
        ),
        remedy=("Fix the error on that node, and start the command again on every node.",),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="node_duplicate",
        title="two nodes use the same node rank",
        meaning=(
            "The same node rank was given twice, often because one command line was copied to all nodes without changing it, or"
            " because an earlier start is still running on a node."
        ),
        telltales=(
            "`EADDRINUSE` on one node, silence on the others, with the same NODE_RANK in both commands",
            "two processes with RANK=0",
        ),
        neighbours=(
            ("stale_process", "the second one is left over from an earlier start"),
            ("port_in_use", "a different program holds the port, and ranks are unique"),
        ),
        remedy=("Give each node its own rank: 0, 1, 2 … (NODE_RANK, or torchrun's --node_rank).",),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="stale_process",
        title="a process of an earlier start is still running",
        meaning=(
            "A rank or a launcher that should have ended still holds a port, a lock, or GPU memory, or answers instead of the new one."
        ),
        telltales=(
            "GPU memory is in use although none of your jobs should run",
            "a rank joins with the id of a different run, or your own program holds the port",
        ),
        neighbours=(
            ("port_in_use", "the holder is a foreign program"),
            ("node_duplicate", "both were started on purpose, with a duplicate node rank"),
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
            "The address or port of the head does not answer: it is not started, it listens elsewhere, or a firewall drops the packets."
        ),
        telltales=(
            "`has timed out after 60000ms while trying to connect to (HOST, PORT)`",
            "`Connection refused` (no listener) or no answer at all (a firewall)",
        ),
        neighbours=(
            ("dns_failure", "the name of the head has no address"),
            ("hostname_loopback", "the name resolves to this machine itself"),
            ("node_missing", "the same from the head's side"),
        ),
        remedy=(
            "From this node: `nc -vz HEAD PORT`. Refused: start the head first. No answer: open the firewall.",
            "Use an address in a network that both nodes share, not in a management or container network.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before",),
    ),
    Cause(
        id="token_rejected",
        title="a node has a wrong or missing token",
        meaning="A process connected that could not authenticate: it has a different or an old token, or does not belong to this job.",
        telltales=("a node is refused at once although it reaches the head",),
        neighbours=(("stale_process", "a process of an earlier start has that start's token"),),
        remedy=("Give the same token to all nodes of the job.", "End processes of earlier starts."),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="address_unreachable",
        title="two nodes cannot reach each other directly",
        meaning=(
            "Both reach the head, but not each other: a firewall that opens only one port, an interface with the same address on"
            " every host (docker0, virbr0), or a route in one direction. Ranks communicate on ports that are chosen at run time."
        ),
        telltales=(
            "the rendezvous completes, but the first collective hangs",
            "`Gloo connectFullMesh failed with …`",
            "`Connection refused` or `timed out` between two workers, not to the head",
        ),
        neighbours=(
            ("mtu_blackhole", "small messages pass, large ones do not"),
            ("nccl_socket_iface", "only NCCL uses a wrong interface"),
            ("head_unreachable", "not even the head can be reached"),
        ),
        remedy=(
            "Open all TCP ports above 1023 between the nodes, in both directions.",
            "Set the right interface on each node: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="mtu_blackhole",
        title="small packets pass between two nodes, large ones are lost",
        meaning=(
            "The path MTU is smaller than the interface MTU, and no router reports it. Handshakes succeed; the first large tensor never arrives."
        ),
        telltales=(
            "connections open and then stall at the first large message",
            "`ping -M do -s 8972 HOST` gets no answer while `ping HOST` does",
        ),
        neighbours=(("address_unreachable", "nothing passes at all, not even a handshake"),),
        remedy=(
            "Use the same MTU on all interfaces and switches of the path; as a quick fix: `ip link set dev IFACE mtu 1500`.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="hostname_loopback",
        title="a node's name resolves to itself",
        meaning=(
            "The name that peers use for a node resolves to 127.0.0.1 or 127.0.1.1, usually through a line of /etc/hosts that the"
            " installer wrote. Every node then connects to itself."
        ),
        telltales=(
            "`Unable to resolve hostname to a (local) address. Using the loopback address as fallback`",
            "`Gloo connectFullMesh failed` with 127.0.1.1 in its addresses",
            "MASTER_ADDR=localhost in a job of several nodes",
        ),
        neighbours=(
            ("dns_failure", "the name does not resolve at all"),
            ("head_unreachable", "the address is right, but does not answer"),
        ),
        remedy=(
            "Set MASTER_ADDR to an address that other nodes can reach.",
            "Remove or fix the 127.0.1.1 line in /etc/hosts; `getent hosts $(hostname)` must give a real address.",
            "For gloo set the interface: GLOO_SOCKET_IFNAME=eth0.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="storage_not_shared",
        title="output_dir is not the same storage on all nodes",
        meaning=(
            "The same path is on different disks. Each node keeps its own part of what should be one directory, and a checkpoint spread like this cannot be loaded."
        ),
        telltales=(
            "a file that one node writes is not visible on the others",
            "`df PATH` shows a local disk on some nodes",
        ),
        neighbours=(
            ("checkpoint_not_shared", "the result if this was not checked at the start"),
            ("storage_unfit", "the storage is shared, but full, read-only or hanging"),
        ),
        remedy=(
            "Mount the same storage at the same path on all nodes, and point output_dir there.",
            "Or use a destination that all nodes can reach, e.g. an object store.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="storage_unfit",
        title="the storage cannot hold what the run will write",
        meaning=(
            "output_dir is read-only, belongs to a different user, hangs, or has less space than all checkpoints of the run need. Without a check this appears at a save, hours later."
        ),
        telltales=(
            "`Permission denied`, `Read-only file system`",
            "`df -h PATH` or `df -i PATH` (inodes) is near 100 %",
            "`touch PATH/x` does not return",
            "`the checkpoints of this run do not fit: up to 5 at a time take 7.3 GB, and there are 4.1 GB`, after the first of them",
        ),
        neighbours=(
            ("disk_full", "there was space at the start, but it was used up during the run"),
            ("io_blocked", "the storage stopped answering during the run"),
        ),
        remedy=(
            "Set output_dir to a writable directory with space for (checkpoint.keep + 2) checkpoints.",
            "Lower checkpoint.keep, or free space.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("before", "during"),
    ),
    Cause(
        id="port_in_use",
        title="the port is in use",
        meaning=(
            "A different program, or an earlier start, listens on the head's port. The head fails at once; other"
            " nodes may connect to the foreign program and wait for an answer that never comes."
        ),
        telltales=(
            "`The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use`",
            "older torch: `(errno: 98 - Address already in use)`",
            "`recvValue failed on SocketImpl(…)` before any rank was started",
        ),
        neighbours=(
            ("stale_process", "the holder is left over from your own job"),
            ("node_duplicate", "the holder is a node of the same job, with the same rank"),
        ),
        remedy=(
            "Find the holder: `ss -ltnp 'sport = :29500'`.",
            "Choose a different port: MASTER_PORT, or the port of torchrun's --rdzv_endpoint.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before", "after"),
    ),
    Cause(
        id="clock_skew",
        title="the clocks of nodes differ",
        meaning=(
            "unisono does not depend on clocks of different machines, but other tools do: torchrun's dynamic rendezvous treats a node whose"
            " clock is tens of seconds off as dead, trains without it, or hangs at the end of a job that succeeded."
        ),
        telltales=(
            "`date` differs by seconds between nodes",
            "both nodes finished training, but neither torchrun returns",
            "lines of merged logs in an impossible order",
        ),
        neighbours=(("world_mismatch", "the result when a node is dropped"),),
        remedy=("Synchronize: `chronyc tracking`, `timedatectl set-ntp true`; under 1 s is enough.",),
        exit_code=0,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="rdzv_timeout",
        title="the ranks did not find each other in time",
        meaning=(
            "The rendezvous ended without all members, and the log does not show which node was missing or why. An absent node failed first: its own log has the cause."
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
            ("node_missing", "it is known which node was missing"),
        ),
        remedy=(
            "Collect the logs of all nodes; read the shortest one first.",
            "Start all nodes with the same number of nodes, id and endpoint.",
            "Check the connection: `nc -vz HOST PORT` from every node; open the firewall.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("after",),
    ),
    Cause(
        id="dns_failure",
        title="a host name has no address",
        meaning=(
            "At least one node cannot resolve the name of the head. torch tries for a long time; its last line only reports that the client timed out."
        ),
        telltales=(
            "`The IPv4 network addresses of (HOST, PORT) cannot be retrieved (gai error: -2 - Name or service not known)`",
            "`gai error: -3 - Temporary failure in name resolution`",
            "`socket.gaierror`",
        ),
        neighbours=(
            ("hostname_loopback", "the name has a wrong address"),
            ("hub_unreachable", "it is the name of a download server"),
            ("healthy", "only the IPv6 line appears and the run continues: harmless"),
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
