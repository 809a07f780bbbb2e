"""Causes found before training: nodes or ranks that disagree, and nodes that do not find each
other.
"""

from unisono.base.causes.verdict import Cause, OwnRunOnly

DISAGREEMENT_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="nproc_mismatch",
        title="nodes would start different numbers of ranks",
        meaning=(
            "One node counts a different number of processes, most often because it was inferred from the"
            " visible devices and CUDA_VISIBLE_DEVICES is set only there. The ranks then wait for ranks that"
            " are never started, or the code assumes that the world size is nodes × ranks, which is wrong."
            " Unequal numbers that were declared on every node work with plain data parallelism; inferred"
            " unequal numbers do not."
        ),
        telltales=(
            "`Initializing 8 distributed tasks at: HOST:PORT` on one node, a different number on the next",
            "CUDA_VISIBLE_DEVICES is set on some nodes but not on others",
            "all ranks wait in the first collectives (SeqNum 1 to 3), then the watchdog's timeout",
            "WORLD_SIZE is not nodes × ranks per node",
        ),
        neighbours=(
            ("node_missing", "a whole node never connected; here all nodes connected, with different counts"),
            (
                "rdzv_timeout",
                "the rendezvous itself never completed; here it did, and the first collective hangs",
            ),
            ("unequal_steps", "the first steps succeeded; here no step was made"),
        ),
        remedy=(
            "Give CUDA_VISIBLE_DEVICES the same number of devices on all nodes, or unset it on all.",
            "Declare the number on every node: NPROC_PER_NODE, or torchrun's --nproc_per_node.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="config_mismatch",
        title="nodes were given different configs",
        meaning=(
            "At least one setting that affects training differs between nodes: a learning rate, a batch size,"
            " a dtype. Each node trains with its own file, so replicas diverge, or their collectives stop"
            " matching."
        ),
        telltales=(
            "a key with different values on two nodes, e.g. `optim.lr` 1e-4 here and 1e-5 there",
            "two ranks log different loss curves where they should be equal",
        ),
        neighbours=(
            ("env_mismatch", "the files are equal, but an environment variable differs"),
            ("code_mismatch", "the files are equal, but the installed code differs"),
        ),
        remedy=(
            "Copy one config to all nodes, or keep it on shared storage.",
            "Give the same key=value overrides in the command of every node.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="data_mismatch",
        title="nodes read different training data",
        meaning=(
            "The data files of one node differ from those of the others, or some are missing: an old copy, a"
            " download that was cut off, a different row order. Ranks then train on wrong rows, and may end"
            " after different numbers of steps."
        ),
        telltales=(
            "different row counts or file sizes on two nodes",
            "`Received data size doesn't match expected size` or a timeout near the end of an epoch",
        ),
        neighbours=(
            ("split_mismatch", "the files are equal, but the rows chosen from them, or their order, differ"),
            ("tokenizer_files_mismatch", "the rows are equal, but their tokens differ"),
        ),
        remedy=(
            "Compare the files: `sha256sum FILE` on every node; replace the files that differ.",
            "Keep the data on shared storage, or pin the revision of a hub dataset.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="split_mismatch",
        title="ranks have different rows, a different order, or different numbers of steps",
        meaning=(
            "All ranks read the same files but train on different rows: the split into training and"
            " evaluation, the shuffle or the filter was drawn separately on every rank. An unseeded"
            " train_test_split is the usual cause. Ranks with fewer batches leave early, and the others wait"
            " for them."
        ),
        telltales=(
            "train_test_split(…) or shuffle(…) without a seed in the program",
            "the ranks print different dataset lengths",
            "the run works for a whole epoch and hangs at its end",
        ),
        neighbours=(
            ("data_mismatch", "the files themselves differ"),
            (
                "unequal_steps",
                "the result of a split mismatch, when the shorter rank has reached its end",
            ),
        ),
        remedy=(
            (
                "Give every split and shuffle the same fixed seed on all ranks, or do them once and share the"
                " result."
            ),
            "Compute the number of steps in one place, not from the length of each rank's own data.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="tokenizer_files_mismatch",
        title="nodes use different tokenizers or chat templates",
        meaning=(
            "tokenizer.json, the special tokens or the chat template differ on one node. Nothing fails, but a"
            " part of every batch has a different content, and the model learns from noise."
        ),
        telltales=(
            "the same text gives different token ids on two nodes",
            "a local edit of tokenizer_config.json or chat_template.jinja on one machine",
        ),
        neighbours=(
            ("tokenizer_mismatch", "tokenizer and model do not match; here two tokenizers do not match"),
            ("weights_mismatch", "the tokenizers are equal, but the weights differ"),
        ),
        remedy=(
            "Copy one model directory to all nodes, or pin model.revision.",
            "Delete the hub cache entry on the odd node and download it again.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="weights_mismatch",
        title="ranks would start from different weights",
        meaning=(
            "The initial parameters are not the same everywhere: a different revision, a damaged download, or"
            " random initialization with a different seed. Data parallelism assumes equal starts; gradients"
            " of unequal models are averaged and fit neither model."
        ),
        telltales=(
            "weight files of the same name with different digests",
            "no error, only a loss that is worse than expected",
        ),
        neighbours=(
            ("replicas_diverged", "they were equal at the start and diverged later"),
            ("corrupt_checkpoint", "the file cannot be read or fails its own digest"),
        ),
        remedy=(
            "Compare `sha256sum *.safetensors` on every node and replace the files that differ.",
            "Pin model.revision; set the seed before new layers are initialized.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="code_mismatch",
        title="nodes run different code",
        meaning=(
            "The training package or the user's script is not the same on all nodes: an edit on one machine,"
            " or a checkout of a different commit. Ranks may then call different collectives in the same"
            " step."
        ),
        telltales=(
            "`git status` or `git rev-parse HEAD` differ between nodes",
            "tracebacks of two nodes show different lines for the same function",
        ),
        neighbours=(
            ("version_mismatch", "an installed package differs, not the project's own code"),
            ("collective_mismatch", "the result in a run that was started anyway"),
        ),
        remedy=("Bring all nodes to the same commit, or install the same wheel.",),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="version_mismatch",
        title="package versions are incompatible",
        meaning=(
            "Either nodes have different versions of Python, torch, CUDA, NCCL or a library, or one"
            " environment contains versions that are incompatible. Between nodes this leads to hangs or"
            " truncated messages; within one environment to import errors."
        ),
        telltales=(
            "`is required for a normal functioning of this module, but found`",
            "`undefined symbol:` while a compiled extension is loaded",
            "Ray: `Version mismatch: The cluster was started with:`",
            "NCCL `Message truncated` with different `NCCL version` lines on two nodes",
            "`does not recognize this architecture`: transformers is older than the model",
        ),
        neighbours=(
            ("missing_dependency", "the package is not installed at all"),
            ("driver_too_old", "the packages match, but the NVIDIA driver is too old for them"),
            ("code_mismatch", "the installed packages are equal, but the project's own code differs"),
        ),
        remedy=(
            (
                "Install the same pinned versions on all nodes: `pip install -c constraints.txt …`, or one"
                " container image."
            ),
            "If the message names a compiled extension, reinstall it for the installed torch.",
            "For an unknown architecture: `pip install --upgrade transformers`.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="env_mismatch",
        title="an environment variable that must be equal differs",
        meaning=(
            "Some variables are part of the protocol between ranks: algorithm, transport, debugging level,"
            " numerics. If one rank has a different value, initialization hangs, or results silently differ."
            " TORCH_DISTRIBUTED_DEBUG=DETAIL on only one rank makes initialization hang on all of them."
        ),
        telltales=(
            "initialization hangs until its timeout although every node is present",
            "a variable exported in one machine's shell profile only",
        ),
        neighbours=(
            ("config_mismatch", "the difference is in the config file or its overrides"),
            (
                "nccl_socket_iface",
                "the variable may differ, but names a wrong interface on its node",
            ),
        ),
        remedy=(
            (
                "Set the variable to the same value on all nodes, or unset it on all. `unisono explain"
                " VARIABLE` shows whether it may differ."
            ),
            "Start all nodes from one script that sets the environment, not from interactive shells.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="env_suspicious",
        title="a setting is wrong, misspelled, or left over",
        meaning=(
            "An environment variable does not have the intended effect, independent of the other nodes: a"
            " name that no library reads, a workaround that costs speed, a switch that removes a safety net."
            " The run starts anyway."
        ),
        telltales=(
            "NCCL_TIMEOUT, or any other name that no library reads",
            "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 on machines whose fast links work",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a failed collective hangs forever",
        ),
        neighbours=(
            ("env_mismatch", "the value is correct, but differs between nodes"),
            ("nccl_socket_iface", "the variable names a network interface that does not reach the peers"),
        ),
        remedy=(
            "Unset variables without a known reason; `unisono explain VARIABLE` describes each.",
            "Also check /etc/nccl.conf, ~/.nccl.conf and the shell profile.",
        ),
        exit_code=0,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="version_known_bad",
        title="an installed version has a known bug",
        meaning=(
            "A package is in a range of versions with known hangs, crashes or wrong values. It may work here;"
            " if it does not, this is the first suspect."
        ),
        telltales=("a hang or crash that goes away with the next patch release",),
        neighbours=(
            ("version_mismatch", "the version is good, but differs between nodes"),
            ("driver_too_old", "the driver is too old"),
        ),
        remedy=(
            "Install at least the fixed version in the message, on all nodes.",
            "Or set the workaround variable in the message, on all nodes.",
        ),
        exit_code=0,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="device_mismatch",
        title="nodes have different kinds of devices",
        meaning=(
            "The ranks would train on different hardware: GPU here and CPU there, or devices with different"
            " memory or arithmetic than the plan assumes. The smallest one fails, or the slowest one sets the"
            " pace."
        ),
        telltales=(
            "different GPU names or memory sizes in `nvidia-smi -L` on two nodes",
            "one node reports that no device was found, and falls back to the CPU",
        ),
        neighbours=(
            ("duplicate_gpu", "the devices are alike, but two ranks use the same one"),
            ("nproc_mismatch", "the devices are alike, but their numbers differ"),
        ),
        remedy=(
            "Choose devices of one kind with CUDA_VISIBLE_DEVICES on each node.",
            "On the odd node find out why its devices are not visible: `nvidia-smi`, then the driver.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="duplicate_gpu",
        title="two ranks use the same GPU",
        meaning=(
            "Each rank needs its own device. Two of them chose the same one, usually because the program"
            " never called torch.cuda.set_device(LOCAL_RANK), or because each node was restricted to a single"
            " device but started several ranks."
        ),
        telltales=(
            "`Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000` with ncclInvalidUsage",
            "`nvidia-smi` shows two training processes on one device and none on the next",
        ),
        neighbours=(
            (
                "invalid_device_ordinal",
                "a rank requests a device that does not exist, instead of one in use",
            ),
            (
                "device_unbound_barrier",
                "the device was not bound before the first barrier, and the job hangs instead of failing",
            ),
        ),
        remedy=(
            "Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything touches CUDA.",
            "Make all devices visible that the ranks of a node should use: check CUDA_VISIBLE_DEVICES.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="plan_mismatch",
        title="nodes made different plans from the same config",
        meaning=(
            "The configs are equal, but the derived values are not: micro batch, threads, dtype or strategy"
            " came out differently because the machines differ. A plan must be made once, and be the same"
            " everywhere."
        ),
        telltales=("the plans of two nodes have a different micro batch, dtype, or number of steps",),
        neighbours=(
            ("config_mismatch", "the configs themselves differ"),
            ("device_mismatch", "the usual cause: the devices differ"),
        ),
        remedy=(
            OwnRunOnly(
                "Set the value that was left to `auto`: batch.micro, model.dtype,"
                " memory.gradient_checkpointing."
            ),
            "Use machines of the same kind.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="resume_mismatch",
        title="nodes would resume from different checkpoints",
        meaning=(
            "The latest valid checkpoint is not the same on all nodes, because each uses its own directory or"
            " one copy is damaged. Ranks would resume from different steps with different weights."
        ),
        telltales=(
            "different highest steps in the checkpoint directories of two nodes",
            "after a restart one rank logs a different step number",
        ),
        neighbours=(
            ("storage_not_shared", "the cause, if output_dir is not the same storage on all nodes"),
            ("corrupt_checkpoint", "the cause, if one copy is damaged"),
        ),
        remedy=(
            (
                "Put output_dir on storage that all nodes share, or copy the latest valid checkpoint to all"
                " of them."
            ),
            OwnRunOnly(
                "List the checkpoints: `unisono checkpoint ls RUN` and `unisono checkpoint verify RUN`."
            ),
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="world_mismatch",
        title="the ranks formed a smaller or larger world than planned",
        meaning=(
            "The rendezvous completed with a different number of ranks than intended. torchrun's dynamic"
            " rendezvous can drop a live node whose clock is wrong, and then silently trains with the others."
        ),
        telltales=(
            "`rank 0/1` in a job that should have two ranks",
            "every node reports success, and each trained alone",
        ),
        neighbours=(
            ("clock_skew", "a common cause with torchrun's c10d rendezvous"),
            ("node_missing", "the others wait for a node; here none waits"),
        ),
        remedy=(
            (
                "Give an exact number of nodes (`--nnodes 2`, not `1:2`) and check WORLD_SIZE at the start of"
                " the program."
            ),
            "Synchronize the clocks: `chronyc tracking` or `timedatectl` on every node.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before", "during"),
    ),
)


RENDEZVOUS_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="node_missing",
        title="a node never connected",
        meaning=(
            "The job waits for a node that has not been started, has failed before it could report it, or"
            " cannot reach the head. The waiting nodes only know which node is absent."
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
        title="a node refused to start",
        meaning=(
            "A node of the job has refused to start, e.g. because its config is wrong or a file is missing"
            " there, or because it was stopped. Nothing was trained on any node."
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
            "The same node rank was given twice, often because one command line was copied to all nodes"
            " without changing it, or because an earlier start is still running on a node."
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
            "A rank or a launcher that should have ended still holds a port, a lock, or GPU memory, or"
            " answers instead of the new one."
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
            (
                "Find the process: `ps -ef | grep -E 'torchrun|unisono.worker'`, `nvidia-smi`, `ss -ltnp`;"
                " end it by its pid."
            ),
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
            "The address or port of the head does not answer: it is not started, it listens elsewhere, or a"
            " firewall drops the packets."
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
            (
                "From this node: `nc -vz HEAD PORT`. Refused: start the head first. No answer: open the"
                " firewall."
            ),
            "Use an address in a network that both nodes share, not in a management or container network.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before",),
    ),
    Cause(
        id="token_rejected",
        title="a node has a wrong or missing token",
        meaning=(
            "A process connected that could not authenticate: it has a different or an old token, or does not"
            " belong to this job."
        ),
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
            "Both reach the head, but not each other: a firewall that opens only one port, an interface with"
            " the same address on every host (docker0, virbr0), or a route in one direction. Ranks"
            " communicate on ports that are chosen at run time."
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
            "The path MTU is smaller than the interface MTU, and no router reports it. Handshakes succeed;"
            " the first large tensor never arrives."
        ),
        telltales=(
            "connections open and then stall at the first large message",
            "`ping -M do -s 8972 HOST` gets no answer while `ping HOST` does",
        ),
        neighbours=(("address_unreachable", "nothing passes at all, not even a handshake"),),
        remedy=(
            (
                "Use the same MTU on all interfaces and switches of the path; as a quick fix: `ip link set"
                " dev IFACE mtu 1500`."
            ),
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="hostname_loopback",
        title="a node's name resolves to a loopback address",
        meaning=(
            "The name that peers use for a node resolves to 127.0.0.1 or 127.0.1.1, usually through a line of"
            " /etc/hosts that the installer wrote. Every node then connects to itself."
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
            (
                "Remove or fix the 127.0.1.1 line in /etc/hosts; `getent hosts $(hostname)` must give a real"
                " address."
            ),
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
            "The same path is on different disks. Each node keeps its own part of what should be one"
            " directory, and a checkpoint spread like this cannot be loaded."
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
            "output_dir is read-only, belongs to a different user, hangs, or has less space than all"
            " checkpoints of the run need. Without a check this appears at a save, hours later."
        ),
        telltales=(
            "`Permission denied`, `Read-only file system`",
            "`df -h PATH` or `df -i PATH` (inodes) is near 100 %",
            "`touch PATH/x` does not return",
            (
                "`the checkpoints of this run do not fit: up to 5 at the same time need 7.3 GB, and 4.1 GB"
                " are available`, after the first of them"
            ),
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
            "A different program, or an earlier start, listens on the head's port. The head fails at once;"
            " other nodes may connect to the foreign program and wait for an answer that never comes."
        ),
        telltales=(
            (
                "`The server socket has failed to listen on any local network address. port: 29500, useIpv6:"
                " false, code: -98, name: EADDRINUSE, message: address already in use`"
            ),
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
            "unisono does not depend on clocks of different machines, but other tools do: torchrun's dynamic"
            " rendezvous treats a node whose clock is tens of seconds off as dead, trains without it, or"
            " hangs at the end of a job that succeeded."
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
            "The rendezvous ended without all members, and the log does not show which node was missing or"
            " why. An absent node failed first: its own log has the cause."
        ),
        telltales=(
            "`torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError`",
            "`Timed out after 601 seconds waiting for clients. 1/2 clients joined.`",
            "`RendezvousConnectionError: The connection to the C10d store has failed`",
            "`has timed out after 60000ms while trying to connect to (HOST, PORT)`",
        ),
        neighbours=(
            ("dns_failure", "a `gai error` above it: the name has no address"),
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
            "At least one node cannot resolve the name of the head. torch tries for a long time; its last"
            " line only reports that the client timed out."
        ),
        telltales=(
            (
                "`The IPv4 network addresses of (HOST, PORT) cannot be retrieved (gai error: -2 - Name or"
                " service not known)`"
            ),
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
