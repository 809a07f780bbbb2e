"""Causes found before the start: nodes or ranks that do not agree on what they are about to do."""

from unisono.causes.cause import Cause, Ours

CAUSES: tuple[Cause, ...] = (
    Cause(
        id="nproc_mismatch",
        title="nodes would start different numbers of ranks",
        meaning=(
            "One node counts other processes than the rest, most often because its number was taken from the visible devices"
            " and CUDA_VISIBLE_DEVICES is set there alone. The ranks then wait for members that nobody starts, or the code"
            " takes nodes × ranks for the size of the world, which it is not. Unequal numbers that were declared on every"
            " node do work with plain data parallelism; unequal numbers that were guessed do not."
        ),
        telltales=(
            "`Initializing 8 distributed tasks at: HOST:PORT` on one node, another number on the next",
            "CUDA_VISIBLE_DEVICES is set on some nodes and not on others",
            "all ranks wait in the first collectives (SeqNum 1 to 3), then the watchdog's time-out",
            "WORLD_SIZE is not nodes × ranks per node",
        ),
        neighbours=(
            ("node_missing", "a whole node never called; here all nodes called, with other counts"),
            (
                "rdzv_timeout",
                "the rendezvous itself never completed; here it did and the first collective hangs",
            ),
            ("unequal_steps", "the first steps went well; here not one step was made"),
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
            "At least one setting that decides what is learnt differs between nodes: a learning rate, a batch size, a dtype."
            " Each node trains by its own file, so replicas drift apart, or their collectives stop matching."
        ),
        telltales=(
            "a key with different values on two nodes, as `optim.lr` 1e-4 here and 1e-5 there",
            "loss curves of two ranks that should be one, and are two",
        ),
        neighbours=(
            ("env_mismatch", "the files are equal and an environment variable differs"),
            ("code_mismatch", "the files are equal and the installed code differs"),
        ),
        remedy=(
            "Copy one config to all nodes, or keep it on storage that all of them see.",
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
            "The data files of one node hold other bytes, or fewer files, than those of the rest: an old copy, a download that"
            " was cut off, another row order. Ranks then train on rows nobody meant, and may end after different numbers of steps."
        ),
        telltales=(
            "different row counts or file sizes on two nodes",
            "`Received data size doesn't match expected size` or a time-out near the end of an epoch",
        ),
        neighbours=(
            ("split_mismatch", "the files are equal; the rows chosen from them, or their order, are not"),
            ("tokenizer_files_mismatch", "the rows are equal and their tokens are not"),
        ),
        remedy=(
            "Compare the files: `sha256sum FILE` on every node; copy the right ones over the odd ones.",
            "Keep the data on shared storage, or pin the revision of a hub dataset.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="split_mismatch",
        title="ranks have other rows, another order, or another number of steps",
        meaning=(
            "All ranks read the same files and still do not train on the same plan: the split into training and evaluation, the"
            " shuffle or the filter was drawn separately on every rank. An unseeded train_test_split is the usual reason."
            " Ranks that own fewer batches leave early and the others wait for them."
        ),
        telltales=(
            "train_test_split(…) or shuffle(…) without a seed in the program",
            "the ranks print different dataset lengths",
            "the run goes well for a whole epoch and stops at its end",
        ),
        neighbours=(
            ("data_mismatch", "the files themselves differ"),
            (
                "unequal_steps",
                "what a split mismatch looks like once the run has come to the shorter rank's end",
            ),
        ),
        remedy=(
            "Give every split and shuffle the same fixed seed on all ranks, or do them once and share the result.",
            "Take the number of steps from one place, not from the length of a rank's own data.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="tokenizer_files_mismatch",
        title="nodes use different tokenizers or chat templates",
        meaning=(
            "tokenizer.json, the special tokens or the chat template differ on one node. Nothing fails: a part of every batch"
            " simply says something else, and the model learns from noise."
        ),
        telltales=(
            "the same text gives other token ids on two nodes",
            "a local edit of tokenizer_config.json or chat_template.jinja on one machine",
        ),
        neighbours=(
            ("tokenizer_mismatch", "tokenizer and model do not fit each other; here two tokenizers do not"),
            ("weights_mismatch", "the tokenizers are equal and the weights are not"),
        ),
        remedy=(
            "Copy one model directory to all nodes, or pin model.revision.",
            "Delete the hub cache entry of the odd node and fetch it again.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="weights_mismatch",
        title="ranks would start from different weights",
        meaning=(
            "The initial values of the parameters are not the same everywhere: another revision, a damaged download, or random"
            " initialisation with another seed. Data parallelism assumes equal starts; gradients of unequal models are averaged"
            " and belong to neither."
        ),
        telltales=(
            "weight files of the same name with different digests",
            "no error at all: only a loss that is worse than it should be",
        ),
        neighbours=(
            ("replicas_diverged", "they were equal at the start and drifted apart later"),
            ("corrupt_checkpoint", "the file cannot be read or fails its own digest"),
        ),
        remedy=(
            "Compare `sha256sum *.safetensors` on every node and copy the right files over the odd ones.",
            "Pin model.revision; seed before new layers are initialised.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="code_mismatch",
        title="nodes run different code",
        meaning=(
            "The training package or the user's script is not the same on all nodes: an edit that was made on one machine, or a"
            " checkout at another commit. Ranks may then call other collectives at the same step."
        ),
        telltales=(
            "`git status` or `git rev-parse HEAD` differ between nodes",
            "tracebacks of two nodes show other lines for the same function",
        ),
        neighbours=(
            ("version_mismatch", "an installed package differs, not the project's own code"),
            ("collective_mismatch", "what it looks like in a run that was started all the same"),
        ),
        remedy=("Bring all nodes to the same commit, or install the same wheel.",),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="version_mismatch",
        title="package versions do not fit each other",
        meaning=(
            "Either nodes have different versions of Python, torch, CUDA, NCCL or a library, or one environment holds versions"
            " that exclude each other. Between nodes it ends in hangs or truncated messages; within one in import errors."
        ),
        telltales=(
            "`is required for a normal functioning of this module, but found`",
            "`undefined symbol:` while a compiled extension is loaded",
            "Ray: `Version mismatch: The cluster was started with:`",
            "NCCL `Message truncated` with different `NCCL version` lines on two nodes",
            "`does not recognize this architecture`: transformers is older than the model",
        ),
        neighbours=(
            ("missing_dependency", "the package is not there at all"),
            ("driver_too_old", "the packages agree and the NVIDIA driver is older than they need"),
            ("code_mismatch", "the installed packages are equal and the project's own code differs"),
        ),
        remedy=(
            "Install the same pinned versions on all nodes: `pip install -c constraints.txt …`, or one container image.",
            "Where a compiled extension is named, reinstall it for the installed torch.",
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
            " rank has another value, set-up hangs, or the numbers differ in silence."
            " TORCH_DISTRIBUTED_DEBUG=DETAIL on one rank alone makes initialisation hang on all of them."
        ),
        telltales=(
            "initialisation hangs to its time-out although every node is there",
            "a variable exported in one machine's shell profile only",
        ),
        neighbours=(
            ("config_mismatch", "the difference is in the config file or its overrides"),
            (
                "nccl_socket_iface",
                "the variable may differ, but names an interface that is not right on its node",
            ),
        ),
        remedy=(
            "Set it to the same value on all nodes, or unset it on all. `unisono explain VARIABLE` says which may differ.",
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
            "An environment variable has a value that does not do what it was set for, whatever the other nodes have: a name that"
            " nobody knows, a work-around that costs speed, a switch that removes a safety net. The run starts all the same."
        ),
        telltales=(
            "NCCL_TIMEOUT, or another name that no library reads",
            "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 on machines whose fast links work",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a failed collective hangs for ever",
        ),
        neighbours=(
            ("env_mismatch", "the value is a good one, and another node has another"),
            ("nccl_socket_iface", "the variable names a network interface that leads nowhere"),
        ),
        remedy=(
            "Unset what nobody can give a reason for; `unisono explain VARIABLE` says what each does.",
            "Look into /etc/nccl.conf, ~/.nccl.conf and the shell profile too.",
        ),
        exit_code=0,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="version_known_bad",
        title="an installed version has a known fault",
        meaning=(
            "A package is in a range of versions in which others have met a hang, a crash or wrong values. It may go well here; where"
            " it does not, this is the first suspect."
        ),
        telltales=("a hang or crash that goes away with the next patch release",),
        neighbours=(
            ("version_mismatch", "the version is a good one, and another node has another"),
            ("driver_too_old", "the driver is the old part"),
        ),
        remedy=(
            "Install the least good version that is named, on all nodes.",
            "Or set the variable that is named as a work-around, on all nodes.",
        ),
        exit_code=0,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="device_mismatch",
        title="nodes have different kinds of devices",
        meaning=(
            "The ranks would train on unlike hardware: GPU here and CPU there, or devices with other memory or arithmetic than"
            " the plan counts on. The smallest one fails, or the slowest one sets the pace."
        ),
        telltales=(
            "other GPU names or memory sizes in `nvidia-smi -L` on two nodes",
            "one node says that no device was found, and falls back to the CPU",
        ),
        neighbours=(
            ("duplicate_gpu", "the devices are alike, and two ranks took the same one"),
            ("nproc_mismatch", "the devices are alike, and their numbers differ"),
        ),
        remedy=(
            "Choose devices of one kind with CUDA_VISIBLE_DEVICES on each node.",
            "On the odd node find out why its devices are not seen: `nvidia-smi`, then the driver.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="duplicate_gpu",
        title="two ranks use the same GPU",
        meaning=(
            "Each rank needs a device of its own. Two of them chose the same one, mostly because the program never called"
            " torch.cuda.set_device(LOCAL_RANK), or because each node was masked to a single device and told to start several ranks."
        ),
        telltales=(
            "`Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000` with ncclInvalidUsage",
            "`nvidia-smi` shows two training processes on one device and none on the next",
        ),
        neighbours=(
            (
                "invalid_device_ordinal",
                "a rank asks for a device that does not exist, instead of one that is taken",
            ),
            (
                "device_unbound_barrier",
                "the device was not bound before the first barrier, and the job hangs instead of refusing",
            ),
        ),
        remedy=(
            "Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything touches CUDA.",
            "Show every node all the devices that its ranks shall use: check CUDA_VISIBLE_DEVICES.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="plan_mismatch",
        title="nodes made different plans from the same config",
        meaning=(
            "What was asked is equal, and what was derived from it is not: micro batch, threads, dtype or strategy came out"
            " differently because the machines differ. A plan must be made once, and be the same everywhere."
        ),
        telltales=("the plans of two nodes show another micro batch, dtype, or number of steps",),
        neighbours=(
            ("config_mismatch", "the configs themselves differ"),
            ("device_mismatch", "the usual reason: the devices are not alike"),
        ),
        remedy=(
            Ours(
                "Write down the value that was left to `auto`: batch.micro, model.dtype, memory.gradient_checkpointing."
            ),
            "Use machines of one kind.",
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="resume_mismatch",
        title="nodes would resume from different checkpoints",
        meaning=(
            "The newest intact checkpoint is not the same on all nodes, since each looks at a directory of its own or one copy is"
            " damaged. Ranks would go on from different steps with different weights."
        ),
        telltales=(
            "different highest steps in the checkpoint directories of two nodes",
            "after a restart one rank logs another step number than the rest",
        ),
        neighbours=(
            ("storage_not_shared", "the reason, where output_dir is not the same storage on all nodes"),
            ("corrupt_checkpoint", "the reason, where one copy is damaged"),
        ),
        remedy=(
            "Put output_dir on storage that all nodes share, or copy the newest intact checkpoint to all of them.",
            Ours("Look at what is there: `unisono checkpoint ls RUN` and `unisono checkpoint verify RUN`."),
        ),
        exit_code=3,
        retry_helps=False,
        when=("before",),
    ),
    Cause(
        id="world_mismatch",
        title="the ranks formed a smaller or larger world than planned",
        meaning=(
            "The rendezvous went through with another number of ranks than were meant. torchrun's dynamic rendezvous can drop a"
            " live node whose clock is off, and then trains with the rest without a word."
        ),
        telltales=(
            "`rank 0/1` in a job that should have two ranks",
            "every node reports success, and each trained alone",
        ),
        neighbours=(
            ("clock_skew", "a frequent reason with torchrun's c10d rendezvous"),
            ("node_missing", "somebody is waited for; here nobody waits"),
        ),
        remedy=(
            "Give an exact number of nodes (`--nnodes 2`, not `1:2`) and check WORLD_SIZE at the start of the program.",
            "Synchronise the clocks: `chronyc tracking` or `timedatectl` on every node.",
        ),
        exit_code=3,
        retry_helps=True,
        when=("before", "during"),
    ),
)
