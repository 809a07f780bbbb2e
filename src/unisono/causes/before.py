"""Causes found before the start: nodes or ranks that do not agree on what they are about to do."""

from unisono.causes.cause import Cause, Ours

DISAGREEMENT_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="nproc_mismatch",
        title="nodes would start different numbers of ranks",
        meaning=(
            "One node counts a different number of processes, most often because it was inferred from the visible devices"
            " and CUDA_VISIBLE_DEVICES is set only there. The ranks then wait for ranks that are never started, or the code"
            " assumes that the world size is nodes × ranks, which is wrong. Unequal numbers that were declared on every"
            " node work with plain data parallelism; inferred unequal numbers do not."
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
            "At least one setting that affects training differs between nodes: a learning rate, a batch size, a dtype."
            " Each node trains with its own file, so replicas diverge, or their collectives stop matching."
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
            "The data files of one node differ from those of the others, or some are missing: an old copy, a download that"
            " was cut off, a different row order. Ranks then train on wrong rows, and may end after different numbers of steps."
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
            "All ranks read the same files but train on different rows: the split into training and evaluation, the"
            " shuffle or the filter was drawn separately on every rank. An unseeded train_test_split is the usual cause."
            " Ranks with fewer batches leave early, and the others wait for them."
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
            "Give every split and shuffle the same fixed seed on all ranks, or do them once and share the result.",
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
            "tokenizer.json, the special tokens or the chat template differ on one node. Nothing fails, but a part of every batch"
            " has a different content, and the model learns from noise."
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
            "The initial parameters are not the same everywhere: a different revision, a damaged download, or random"
            " initialization with a different seed. Data parallelism assumes equal starts; gradients of unequal models are averaged"
            " and fit neither model."
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
            "The training package or the user's script is not the same on all nodes: an edit on one machine, or a"
            " checkout of a different commit. Ranks may then call different collectives in the same step."
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
            "Either nodes have different versions of Python, torch, CUDA, NCCL or a library, or one environment contains versions"
            " that are incompatible. Between nodes this leads to hangs or truncated messages; within one environment to import errors."
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
            "Install the same pinned versions on all nodes: `pip install -c constraints.txt …`, or one container image.",
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
            "Some variables are part of the protocol between ranks: algorithm, transport, debugging level, numerics. If one"
            " rank has a different value, initialization hangs, or results silently differ."
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
            "Set it to the same value on all nodes, or unset it on all. `unisono explain VARIABLE` shows whether it may differ.",
            "Start all nodes from one script that sets the environment, not from interactive shells.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="env_suspicious",
        title="a setting is wrong, misspelt, or left over",
        meaning=(
            "An environment variable does not have the intended effect, independent of the other nodes: a name that"
            " no library reads, a workaround that costs speed, a switch that removes a safety net. The run starts anyway."
        ),
        telltales=(
            "NCCL_TIMEOUT, or another name that no library reads",
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
            "A package is in a range of versions with known hangs, crashes or wrong values. It may work here; if"
            " it does not, this is the first suspect."
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
            "The ranks would train on different hardware: GPU here and CPU there, or devices with different memory or arithmetic than"
            " the plan assumes. The smallest one fails, or the slowest one sets the pace."
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
            "Each rank needs its own device. Two of them chose the same one, usually because the program never called"
            " torch.cuda.set_device(LOCAL_RANK), or because each node was restricted to a single device but started several ranks."
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
            "The configs are equal, but the derived values are not: micro batch, threads, dtype or strategy came out"
            " differently because the machines differ. A plan must be made once, and be the same everywhere."
        ),
        telltales=("the plans of two nodes have a different micro batch, dtype, or number of steps",),
        neighbours=(
            ("config_mismatch", "the configs themselves differ"),
            ("device_mismatch", "the usual cause: the devices differ"),
        ),
        remedy=(
            Ours(
                "Set the value that was left to `auto`: batch.micro, model.dtype, memory.gradient_checkpointing."
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
            "The latest valid checkpoint is not the same on all nodes, because each uses its own directory or one copy is"
            " damaged. Ranks would resume from different steps with different weights."
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
            "Put output_dir on storage that all nodes share, or copy the latest valid checkpoint to all of them.",
            Ours("List the checkpoints: `unisono checkpoint ls RUN` and `unisono checkpoint verify RUN`."),
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="world_mismatch",
        title="the ranks formed a smaller or larger world than planned",
        meaning=(
            "The rendezvous completed with a different number of ranks than intended. torchrun's dynamic rendezvous can drop a"
            " live node whose clock is wrong, and then silently trains with the others."
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
            "Give an exact number of nodes (`--nnodes 2`, not `1:2`) and check WORLD_SIZE at the start of the program.",
            "Synchronize the clocks: `chronyc tracking` or `timedatectl` on every node.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before", "during"),
    ),
)
