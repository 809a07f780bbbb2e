"""Causes that lie in files: checkpoints, caches, packages, the hub. At the end the two answers that blame nobody."""

from unisono.causes.cause import Cause, Ours

CAUSES: tuple[Cause, ...] = (
    Cause(
        id="corrupt_checkpoint",
        title="a checkpoint is damaged",
        meaning=(
            "A file of the checkpoint is missing, too short, or holds other bytes than were written. torch.load, safetensors and DCP load a flipped bit without a word; unisono compares every file with its digest."
        ),
        telltales=(
            "`Error while deserializing header: incomplete metadata, file not fully covered`",
            "`PytorchStreamReader failed reading zip archive: failed finding central directory`",
            "trainer_state.json is missing when resuming",
            "`unisono checkpoint verify RUN` names the file",
        ),
        neighbours=(
            ("checkpoint_mismatch", "the files are whole and belong to another model or world size"),
            ("checkpoint_not_shared", "the files are whole, on another node's disk"),
        ),
        remedy=(
            Ours(
                "See what is there: `unisono checkpoint verify RUN`. Resuming takes the newest intact one by itself."
            ),
            Ours("If none is intact, start anew with `--fresh`, or from a copy."),
            "Damage that comes again means a bad disk, bad memory, or two writers.",
        ),
        exit_code=7,
        retry_helps=True,
        when=("before", "after"),
    ),
    Cause(
        id="checkpoint_mismatch",
        title="a checkpoint belongs to another model or another world size",
        meaning=(
            "The files are whole, and their shapes, names or number of parts do not fit what is being built: another base model, adapter rank, vocabulary, or number of ranks."
        ),
        telltales=(
            "`size mismatch for model.embed_tokens.weight`",
            "`Missing key(s) in state_dict`, `Unexpected key(s) in state_dict`",
            "`You set ignore_mismatched_sizes to False`",
            "DeepSpeed: `used a DP world size of 8 but the current world size is 4`",
        ),
        neighbours=(
            ("corrupt_checkpoint", "the files themselves cannot be read"),
            ("config_mismatch", "nodes disagree with each other, not with the checkpoint"),
        ),
        remedy=(
            "Use the config that the run was started with: config.yaml in its directory.",
            "Convert the checkpoint if the number of ranks must change (DeepSpeed: universal checkpoint).",
            "Do not train on with ignore_mismatched_sizes: the layer in question starts from random values.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="checkpoint_not_shared",
        title="parts of a checkpoint are on other nodes' disks",
        meaning=(
            "output_dir is a local path. One node wrote or renamed what another one now looks for, and each has a part only."
        ),
        telltales=(
            "on other nodes only: `FileNotFoundError: … tmp-checkpoint-100 -> checkpoint-100`",
            "`zero_pp_rank_1_mp_rank_00_optim_states.pt` is missing",
            "Ray: `A local path on the head node is not accessible by worker nodes`",
        ),
        neighbours=(
            ("storage_not_shared", "the same, found before the start"),
            ("corrupt_checkpoint", "the parts are nowhere, or damaged"),
        ),
        remedy=(
            "Use storage that all nodes share for output_dir.",
            "transformers' Trainer: save_on_each_node=True, if each node shall keep a whole copy.",
            "For this run: gather the parts from all nodes into one directory before resuming.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="output_removed",
        title="the run's directory was removed, renamed or replaced in mid-run",
        meaning=(
            "Somebody removed or renamed output_dir, its checkpoints/ or its run.lock while the run lived, or the file system below it was unmounted. The run makes again what it can and goes on; what was saved before is gone,"
            " or where it was moved to. It ends where another directory or another start is in its place: nothing is written there."
        ),
        telltales=(
            "the warning `was removed after step N, while its run lives: it is made again`",
            "`checkpoint ls` shows checkpoints of later steps only",
            "a clean-up job, a second terminal, or `rm -rf` in a script that starts the run",
        ),
        neighbours=(
            ("storage_unfit", "the directory is there, and cannot be written"),
            ("io_blocked", "the storage does not answer"),
        ),
        remedy=(
            "End a run (Ctrl-C) before you remove or rename its directory.",
            "Delete old checkpoints with `unisono checkpoint prune RUN`.",
            "Keep run directories out of the way of clean-up jobs.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("during",),
    ),
    Cause(
        id="dataset_cache_race",
        title="ranks built the same data cache at the same time",
        meaning=(
            "Several processes wrote or replaced the same cache files, and one read a file that another had just moved or not yet finished. unisono prepares the data once, before any rank starts."
        ),
        telltales=(
            "`FileNotFoundError` on `cache-….arrow` on one rank",
            "`pyarrow.lib.ArrowInvalid` while opening a cache file",
            "`Stale file handle` below the cache directory",
        ),
        neighbours=(
            ("io_blocked", "the storage does not answer at all"),
            ("corrupt_checkpoint", "the file is a checkpoint, not a cache"),
        ),
        remedy=(
            "Build the cache on one rank first: `with training_args.main_process_first():`.",
            "Delete the half-built cache and start again.",
            "Keep HF_HOME on a local disk of each node.",
        ),
        exit_code=5,
        retry_helps=True,
        when=("after",),
    ),
    Cause(
        id="missing_dependency",
        title="a Python package is missing",
        meaning="The environment that runs the program lacks a package; on several nodes perhaps only one of them.",
        telltales=(
            "`ModuleNotFoundError: No module named 'sentencepiece'`",
            "`requires the following packages that were not found`",
        ),
        neighbours=(
            ("version_mismatch", "the package is there in a version that does not fit"),
            ("flash_attn_missing", "the package is flash-attn"),
        ),
        remedy=(
            "Install it into the environment that runs: `python -m pip install PACKAGE`.",
            "Check that it is that environment: `python -c 'import sys; print(sys.prefix)'` on every node.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="flash_attn_missing",
        title="FlashAttention was asked for and is not installed",
        meaning="The program, or the model's config, asks for flash-attn's kernels, which need a package of their own and a supported GPU.",
        telltales=(
            "`FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed`",
        ),
        neighbours=(
            ("missing_dependency", "another package is missing"),
            ("cuda_arch_unsupported", "it is installed and has no code for this GPU"),
        ),
        remedy=(
            "Use torch's own kernels instead: attn_implementation='sdpa'.",
            "Or install it for the installed torch: `pip install flash-attn --no-build-isolation`.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="bnb_no_gpu",
        title="bitsandbytes cannot use this machine",
        meaning="Quantised loading or an 8-bit optimizer was asked for, and bitsandbytes finds no supported device, or not its own library.",
        telltales=(
            "`CUDA Setup failed despite GPU being available`",
            "`Using `bitsandbytes` 4-bit quantization requires` the latest version of bitsandbytes",
            "`libbitsandbytes_cpu.so: undefined symbol: cget_managed_ptr`",
        ),
        neighbours=(
            ("no_cuda_build", "torch itself has no CUDA"),
            ("missing_dependency", "bitsandbytes is not installed"),
        ),
        remedy=(
            "`pip install --upgrade bitsandbytes`, then `python -m bitsandbytes`.",
            "Or do without quantisation: bfloat16 weights and an adapter.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="hub_unreachable",
        title="the model hub cannot be reached",
        meaning="Files must be downloaded, and the hub does not answer from this machine: no way to the internet, a proxy, an outage, a rate limit.",
        telltales=(
            "`We couldn't connect to 'https://huggingface.co' to load the files`",
            "`Max retries exceeded with url`",
            "`LocalEntryNotFoundError`, `OfflineModeIsEnabled`",
        ),
        neighbours=(
            ("gated_model", "the hub answers 401 or 403"),
            ("model_path_missing", "it was meant to be a local directory"),
        ),
        remedy=(
            "Download where there is a way out, `hf download NAME --local-dir DIR`, and set model.path to DIR.",
            "Set HF_ENDPOINT to a mirror, or HTTPS_PROXY.",
            "If everything is in the cache already: HF_HUB_OFFLINE=1.",
        ),
        exit_code=2,
        retry_helps=True,
        when=("before", "after"),
    ),
    Cause(
        id="gated_model",
        title="access to the model was refused",
        meaning="The model asks for its terms to be accepted, or is private, and the request carried no token with that right.",
        telltales=(
            "`Cannot access gated repo for url`",
            "`401 Client Error`, `403 Client Error`",
            "`GatedRepoError`",
        ),
        neighbours=(
            ("hub_unreachable", "the hub does not answer at all"),
            ("model_path_missing", "404: there is no such model, or it is private and you are not logged in"),
        ),
        remedy=(
            "Accept the terms on the model's page, with the account whose token you use.",
            "Make the token known on every node: `hf auth login`, or HF_TOKEN in the environment, never in a config.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="model_path_missing",
        title="the model's directory or its files are not there",
        meaning="The path leads nowhere on this node, so that it is taken for a hub id; or the directory lacks a file that the model needs.",
        telltales=(
            "`Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data/models/x'`",
            "`does not appear to have a file named config.json`",
            "`Error no file named model.safetensors`",
        ),
        neighbours=(
            ("hub_unreachable", "it is a hub id, and the hub does not answer"),
            ("storage_not_shared", "the path is right on another node"),
        ),
        remedy=(
            "Check on every node: `ls PATH`, and the spelling of model.path.",
            "Copy the whole directory: config.json, the safetensors files and their index, the tokenizer's files.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="healthy",
        title="nothing is wrong",
        meaning="The run has finished, or is running as it should. Warnings that look frightening can stand in a healthy log.",
        telltales=(
            "a line of the end after the last error: `train_runtime`, `max_epochs=N reached`, `worker group successfully finished`",
            "a launcher that restarted after a failure and came through",
        ),
        neighbours=(
            ("nan_loss", "it finished, and the loss is nan: the result is worthless"),
            ("teardown_crash", "it finished, and aborted afterwards"),
        ),
        remedy=("Nothing needs to be done.",),
        exit_code=0,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="undetermined",
        title="the cause cannot be told from what is there",
        meaning="Only consequences are visible: lost connections, time-outs, aborted communicators. The rank that was first is not among them, or its log was not given.",
        telltales=(
            "`Connection closed by peer`, `recvValue failed`, `failed to recv, got 0 bytes`, `NCCL communicator was aborted`, and nothing else",
        ),
        neighbours=(
            ("rank_died_first", "one log stops earlier than the others"),
            ("rank_stalled", "the others timed out, and one log shows work going on"),
        ),
        remedy=(
            "Collect what is missing: the logs of all ranks and nodes, `dmesg -T`, the scheduler's messages.",
            "For the next time: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1, PYTHONFAULTHANDLER=1.",
        ),
        exit_code=5,
        retry_helps=True,
        when=("after",),
    ),
)
