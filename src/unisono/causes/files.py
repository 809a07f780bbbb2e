"""Causes that lie in files: checkpoints, caches, packages, the hub. At the end the two answers that blame nobody."""

from unisono.causes.cause import Cause, Ours

FILE_CAUSES: tuple[Cause, ...] = (
    Cause(
        id="corrupt_checkpoint",
        title="a checkpoint is damaged",
        meaning=(
            "A file of the checkpoint is missing, too short, or differs from what was written. torch.load, safetensors and DCP silently load a flipped bit; unisono compares every file with its digest."
        ),
        telltales=(
            "`Error while deserializing header: incomplete metadata, file not fully covered`",
            "`PytorchStreamReader failed reading zip archive: failed finding central directory`",
            "trainer_state.json is missing when resuming",
            "`unisono checkpoint verify RUN` reports the file",
        ),
        neighbours=(
            ("checkpoint_mismatch", "the files are complete, but belong to a different model or world size"),
            ("checkpoint_not_shared", "the files are complete, but on a different node's disk"),
        ),
        remedy=(
            Ours(
                "Check them: `unisono checkpoint verify RUN`. A resume automatically uses the latest valid one."
            ),
            Ours("If none is valid, start from scratch with `--fresh`, or from a copy."),
            "Repeated damage means a bad disk, bad memory, or two writers.",
        ),
        exit_code=7,
        retry_helps=True,
        when=("before", "after"),
    ),
    Cause(
        id="checkpoint_mismatch",
        title="a checkpoint belongs to a different model or world size",
        meaning=(
            "The files are complete, but their shapes, names or number of parts do not fit: a different base model, adapter rank, vocabulary, or number of ranks."
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
            "Use the original config of the run: config.yaml in its directory.",
            "Convert the checkpoint if the number of ranks must change (DeepSpeed: universal checkpoint).",
            "Do not continue with ignore_mismatched_sizes: the affected layer would start from random values.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="checkpoint_not_shared",
        title="parts of a checkpoint are on other nodes' disks",
        meaning=(
            "output_dir is a local path. One node wrote or renamed files that a different node needs, and each has only a part."
        ),
        telltales=(
            "on other nodes only: `FileNotFoundError: … tmp-checkpoint-100 -> checkpoint-100`",
            "`zero_pp_rank_1_mp_rank_00_optim_states.pt` is missing",
            "Ray: `A local path on the head node is not accessible by worker nodes`",
        ),
        neighbours=(
            ("storage_not_shared", "the same, found before the start"),
            ("corrupt_checkpoint", "the parts are lost, or damaged"),
        ),
        remedy=(
            "Use storage that all nodes share for output_dir.",
            "transformers' Trainer: save_on_each_node=True, if each node should keep a complete copy.",
            "For this run: copy the parts from all nodes into one directory before resuming.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("after",),
    ),
    Cause(
        id="output_removed",
        title="the run's directory was removed, renamed or replaced during the run",
        meaning=(
            "output_dir, its checkpoints/ or its run.lock was removed or renamed during the run, or the file system below it was unmounted. The run recreates what it can and continues; what was saved before is gone,"
            " or where it was moved to. If a different directory or a different run is at the path, the run ends and writes nothing there."
        ),
        telltales=(
            "the warning `was removed after step N, while its run lives: it is made again`",
            "`checkpoint ls` shows checkpoints of later steps only",
            "a cleanup job, a second terminal, or `rm -rf` in a script that starts the run",
        ),
        neighbours=(
            ("storage_unfit", "the directory exists, but cannot be written"),
            ("io_blocked", "the storage does not answer"),
        ),
        remedy=(
            "End a run (Ctrl-C) before you remove or rename its directory.",
            "Delete old checkpoints with `unisono checkpoint prune RUN`.",
            "Keep run directories out of the scope of cleanup jobs.",
        ),
        exit_code=6,
        retry_helps=False,
        when=("during",),
    ),
    Cause(
        id="dataset_cache_race",
        title="ranks built the same data cache at the same time",
        meaning=(
            "Several processes wrote or replaced the same cache files, and one read a file that was just moved or not yet complete. unisono prepares the data once, before any rank starts."
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
            "Delete the incomplete cache and start again.",
            "Keep HF_HOME on a local disk of each node.",
        ),
        exit_code=5,
        retry_helps=True,
        when=("after",),
    ),
    Cause(
        id="missing_dependency",
        title="a Python package is missing",
        meaning="The environment of the program lacks a package; with several nodes perhaps only on one of them.",
        telltales=(
            "`ModuleNotFoundError: No module named 'sentencepiece'`",
            "`requires the following packages that were not found`",
        ),
        neighbours=(
            ("version_mismatch", "the package is installed in an incompatible version"),
            ("flash_attn_missing", "the package is flash-attn"),
        ),
        remedy=(
            "Install it into the environment of the program: `python -m pip install PACKAGE`.",
            "Check that it is that environment: `python -c 'import sys; print(sys.prefix)'` on every node.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="flash_attn_missing",
        title="FlashAttention was requested but is not installed",
        meaning="The program or the model's config requests flash-attn's kernels, which need a separate package and a supported GPU.",
        telltales=(
            "`FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed`",
        ),
        neighbours=(
            ("missing_dependency", "a different package is missing"),
            ("cuda_arch_unsupported", "it is installed, but has no code for this GPU"),
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
        meaning="Quantized loading or an 8-bit optimizer was requested, and bitsandbytes finds no supported device, or not its own library.",
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
            "Or avoid quantization: bfloat16 weights and an adapter.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="hub_unreachable",
        title="the model hub cannot be reached",
        meaning="Files must be downloaded, but the hub does not answer from this machine: no internet access, a proxy, an outage, a rate limit.",
        telltales=(
            "`We couldn't connect to 'https://huggingface.co' to load the files`",
            "`Max retries exceeded with url`",
            "`LocalEntryNotFoundError`, `OfflineModeIsEnabled`",
        ),
        neighbours=(
            ("gated_model", "the hub answers 401 or 403"),
            ("model_path_missing", "it was intended to be a local directory"),
        ),
        remedy=(
            "Download on a machine with internet access, `hf download NAME --local-dir DIR`, and set model.path to DIR.",
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
        meaning="The model requires acceptance of its terms, or is private, and the request had no token with that permission.",
        telltales=(
            "`Cannot access gated repo for url`",
            "`401 Client Error`, `403 Client Error`",
            "`GatedRepoError`",
        ),
        neighbours=(
            ("hub_unreachable", "the hub does not answer at all"),
            (
                "model_path_missing",
                "404: the model does not exist, or it is private and you are not logged in",
            ),
        ),
        remedy=(
            "Accept the terms on the model's page, with the account of your token.",
            "Set the token on every node: `hf auth login`, or HF_TOKEN in the environment, never in a config.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="model_path_missing",
        title="the model's directory or its files are missing",
        meaning="The path does not exist on this node and is interpreted as a hub id; or the directory lacks a file that the model needs.",
        telltales=(
            "`Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data/models/x'`",
            "`does not appear to have a file named config.json`",
            "`Error no file named model.safetensors`",
        ),
        neighbours=(
            ("hub_unreachable", "it is a hub id, and the hub does not answer"),
            ("storage_not_shared", "the path exists on other nodes"),
        ),
        remedy=(
            "Check on every node: `ls PATH`, and the spelling of model.path.",
            "Copy the complete directory: config.json, the safetensors files and their index, the tokenizer's files.",
        ),
        exit_code=2,
        retry_helps=False,
        when=("before", "after"),
    ),
    Cause(
        id="healthy",
        title="nothing is wrong",
        meaning="The run has finished, or is running normally. A healthy log can contain alarming warnings.",
        telltales=(
            "a final line after the last error: `train_runtime`, `max_epochs=N reached`, `worker group successfully finished`",
            "a launcher that restarted after a failure and succeeded",
        ),
        neighbours=(
            ("nan_loss", "it finished, but the loss is NaN: the result is useless"),
            ("teardown_crash", "it finished, but aborted afterwards"),
        ),
        remedy=("Nothing needs to be done.",),
        exit_code=0,
        retry_helps=False,
        when=("during", "after"),
    ),
    Cause(
        id="undetermined",
        title="the cause cannot be determined from the logs",
        meaning="Only consequences are visible: lost connections, timeouts, aborted communicators. The log of the rank that failed first is missing, or contains no cause.",
        telltales=(
            "`Connection closed by peer`, `recvValue failed`, `failed to recv, got 0 bytes`, `NCCL communicator was aborted`, and nothing else",
        ),
        neighbours=(
            ("rank_died_first", "one log stops earlier than the others"),
            ("rank_stalled", "the others timed out, and one log shows that work continues"),
        ),
        remedy=(
            "Collect the missing information: the logs of all ranks and nodes, `dmesg -T`, the scheduler's messages.",
            "For the next time: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1, PYTHONFAULTHANDLER=1.",
        ),
        exit_code=5,
        retry_helps=True,
        when=("after",),
    ),
)
