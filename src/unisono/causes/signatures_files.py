"""Signatures of files, packages and the hub."""

from unisono.causes.signature import Signature

_TRANSFORMERS = "transformers 5.23"
_NO_HUB = r"^(?!.{0,600}ConnectionPool\(host='(?:\d{1,3}\.|localhost|[\w-]{1,60}'|[\w.-]{1,80}\.(?:svc|local|internal|lan|cluster)\b|[\w.-]{0,40}(?:wandb|mlflow|comet|neptune))).{0,1400}"
"""Not of a server of one's own, nor of one that takes down metrics."""

FILES_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="checkpoint_not_there", hints=("tmp-checkpoint-", "zero_pp_rank_", "A local path on the head node", "zero checkpoints paths are missing", ".distcp"),
        pattern=r"No such file or directory: '[^']{0,300}tmp-checkpoint-\d{1,9}[/']|(?:No such file|not found|does not exist|missing).{0,200}zero_pp_rank_\d{1,6}|zero_pp_rank_\d{1,6}\S{0,200} "
        r"(?:not found|does not exist|is missing)|A local path on the head node is not accessible|zero checkpoints paths are missing|No such file or directory.{0,300}__\d{1,6}_\d{1,6}\.distcp", kind="error", cause="checkpoint_not_shared",
        source="https://github.com/huggingface/transformers/issues/27925; DeepSpeed; Ray Train 2",
        example="FileNotFoundError: [Errno 2] No such file or directory: 'saves/tmp-checkpoint-200' -> 'saves/checkpoint-200'",
        look_alike="Saving model checkpoint to saves/tmp-checkpoint-200",
    ),
    Signature(
        id="file_is_damaged", hints=("Error while deserializing header", "failed finding central directory", "PytorchStreamReader failed", "trainer_state.json",
               "MetadataIncompleteBuffer", "HeaderTooLarge", "InvalidHeader", "invalid load key", "might be corrupted", "Ran out of input", "find a valid checkpoint at", "without having git-lfs",
               "Unable to load weights from pytorch checkpoint", "Consistency check failed", "pickle data was truncated", "archive is corrupted", "stack underflow", "unexpected EOF"),
        pattern=r"Error while deserializing header|HeaderTooLarge|InvalidHeader(?:Deserialization|Length|Start)?|invalid load key, |might be corrupted|pickle data was truncated|archive is corrupted|unpickling stack underflow|unexpected EOF, expected \d{1,15} more bytes|EOFError: Ran out of input|Can.t find a valid checkpoint at|without having git-lfs|"
        r"Unable to load weights from pytorch checkpoint|Consistency check failed: file should be|MetadataIncompleteBuffer|failed finding central directory|PytorchStreamReader failed reading|No such file or "
        r"directory: '[^']{0,300}trainer_state\.json'", kind="error", cause="corrupt_checkpoint",
        source="safetensors 0.8; torch 2.13, libtorch_cpu (inline_container.cc); " + _TRANSFORMERS,
        example="safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        look_alike="Loading checkpoint shards: 100%",
    ),
    Signature(
        id="checkpoint_differs", hints=("size mismatch for ", "Missing key(s) in state_dict", "Unexpected key(s) in state_dict", "ignore_mismatched_sizes", "DP world size", "doesn't match the size of optimizer", "different number of parameter groups",
               "Missing key in checkpoint", "Size mismatch between saved"),
        pattern=r"size mismatch for [\w.]{1,200}: copying|doesn't match the size of optimizer's group|different number of parameter groups|Missing key in checkpoint state_dict|Size mismatch between saved|(?:Missing|Unexpected) key\(s\) in state_dict: |You set `ignore_mismatched_sizes` to `False`|used a DP world "
        r"size of \d{1,6} but", kind="error", cause="checkpoint_mismatch",
        source="torch 2.13, nn/modules/module.py; peft 0.21; " + _TRANSFORMERS + "; https://github.com/deepspeedai/DeepSpeed/issues/6441",
        example="\tsize mismatch for base_model.model.lm_head.lora_A.default.weight: copying a param with shape torch.Size([8, 64]) from checkpoint, the shape in "
        "current model is torch.Size([16, 64]).",
        look_alike="Some weights were not used when initializing the model: ['lm_head.weight']",
    ),
    Signature(
        id="cache_race", hints=(".arrow", "ArrowInvalid", "Stale file handle", ".incomplete"),
        pattern=r"(?:No such file or directory|FileNotFoundError).{0,300}cache-[0-9a-z_]{1,64}\.arrow|ArrowInvalid: .{0,200}(?:Tried reading|not an Arrow file|Expected to "
        r"read)|Stale file handle|(?:Directory not empty|File exists|No such file or directory|FileExistsError).{0,200}\.incomplete", kind="error", cause="dataset_cache_race", source="datasets 5, pyarrow 26; NFS",
        example="FileNotFoundError: [Errno 2] No such file or directory: '/data/cache/cache-7b1e6c0a.arrow'",
        look_alike="Loading cached processed dataset at /data/cache/cache-7b1e6c0a.arrow",
    ),
    Signature(
        id="versions_differ", hints=("is required for a normal functioning", "undefined symbol", "Version mismatch: The cluster", "does not recognize this architecture", "cannot import name", "has no attribute", "size changed, may indicate",
               "GLIBC", "does not match the version torch was compiled with", "compiled with different CUDA", "mismatches the version that was used to compile", "torchvision::nms", "Driver/library version mismatch", "cannot open shared object file",
               "Numpy is not available"),
        pattern=r"is required for a normal functioning of this module, but found|: undefined symbol: |Version mismatch: The cluster was started with|but Transformers "
        r"does not recognize this architecture|ImportError: cannot import name '\w{1,80}' from '(?:transformers|torch|peft|accelerate|trl|datasets|deepspeed|huggingface_hub|tokenizers|diffusers|bitsandbytes|numpy|pyarrow|lightning|"
        r"pytorch_lightning|ray)\b|AttributeError: module '(?:transformers|torch|peft|accelerate|trl|datasets|deepspeed|numpy|ray)[\w.]{0,80}' has no attribute '(?!_cuda_setDevice)|size changed, may indicate binary incompatibility|"
        r"version `GLIBC(?:XX)?_[\d.]{1,12}' not found|does not match the version torch was compiled with|compiled with different CUDA|mismatches the version that was used to compile|operator torchvision::nms does not exist|"
        r"Driver/library version mismatch|(?:ImportError|OSError): lib(?!cuda\.so)(?:cu|nv|nccl|c10|torch|stdc)[\w+-]{0,40}\.so[\d.]{0,12}: cannot open shared object file|Numpy is not available", kind="error", cause="version_mismatch", source=_TRANSFORMERS + ", utils/versions.py; ld.so; Ray 2.60",
        example="ImportError: transformers>=5.30 is required for a normal functioning of this module, but found transformers==5.23.0.",
        look_alike="a newer version of transformers is available",
    ),
    Signature(
        id="module_missing", hints=("No module named ", "not found in your environment", "No package metadata was found", "PackageNotFoundError", "requires `accelerate", "requires Accelerate", "CUDA_HOME does not exist", "Ninja is required", "command not found"),
        pattern=r"(?:ModuleNotFoundError|ImportError): .{0,100}No module named (?!'flash_attn)|: No module named \w{1,60}$|requires the \w{1,40} library but it was not found|packages that were not found in your environment: (?!flash_attn)|No package metadata was found for "
        r"(?!.{0,20}bitsandbytes)|ImportError: Using .{0,120}requires .{0,4}[Aa]ccelerate|CUDA_HOME does not exist|Ninja is required to load|: (?:torchrun|deepspeed|accelerate|llamafactory-cli|python3?): command not found", kind="error", cause="missing_dependency", source="CPython",
        example="ModuleNotFoundError: No module named 'deepspeed'", look_alike="import deepspeed",
    ),
    Signature(
        id="flash_attention", hints=("FlashAttention", "flash_attn", "flash-attn", "Flash Attention"),
        pattern=r"FlashAttention\d? has been toggled on|packages that were not found in your environment: flash_attn|Flash Attention 2 is not available|package flash_attn seems to be not installed|No module named 'flash_attn", kind="error",
        cause="flash_attn_missing", source=_TRANSFORMERS + ", modeling_utils.py",
        example="ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed.",
        look_alike="Using FlashAttention2",
    ),
    Signature(
        id="bitsandbytes", hints=("CUDA Setup failed despite", "bitsandbytes", "CUDA SETUP", "GPU is needed", "GPU is required", "cget_managed_ptr", "cquantize", "str2optimizer", "cget_col_row_stats"),
        pattern=r"CUDA Setup failed despite (?:CUDA|GPU) being available|bitsandbytes was compiled without GPU support|No package metadata was found for bitsandbytes|Using "
        r"`bitsandbytes` \d?-?bit quantization requires|bitsandbytes library load error|None of the available devices.{0,80}are supported by the bitsandbytes|has no attribute 'c(?:get_managed_ptr|quantize)|name 'str2optimizer|cget_col_row_stats|Could not find the "
        r"bitsandbytes CUDA binary|GPU is (?:needed|required) for quantization|CUDA is required but not available for bitsandbytes", kind="error", cause="bnb_no_gpu",
        source="bitsandbytes 0.4x, cuda_setup/main.py; " + _TRANSFORMERS,
        example="        CUDA Setup failed despite GPU being available. Please run the following command to get more information:",
        look_alike="bitsandbytes 0.43.1 loaded",
    ),
    Signature(
        id="hub_away", hints=("We couldn't connect to", "Max retries exceeded", "OfflineModeIsEnabled", "outgoing traffic has been disabled", "LocalEntryNotFoundError", "Couldn't reach", "Read timed out", "cannot find the requested files in the",
               "Too Many Requests", "Server Error", "ConnectTimeout", "ConnectError"),
        pattern=_NO_HUB + r"(?:We couldn't connect to '?https?://|LocalEntryNotFoundError|Couldn't reach .{1,200}(?:Hub|https?:)|HTTPSConnectionPool\(host=.{1,120}Read timed out|cannot find the requested files in the|HTTPError: (?:429|50\d) (?:Client|Server) Error|"
        r"(?:httpx2?|httpcore2?)\.Connect(?:Timeout|Error)|Max retries exceeded with url|OfflineModeIsEnabled|outgoing traffic has been disabled)", kind="error",
        cause="hub_unreachable", source=_TRANSFORMERS + ", utils/hub.py; urllib3; huggingface_hub 2.4",
        example="OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
        look_alike="Downloading model.safetensors: 100%",
    ),
    Signature(
        id="gated", hints=("gated repo", "GatedRepoError", "is restricted", "awaiting a review", "Invalid user token", "Invalid credentials in Authorization", "gated dataset", "Token is required", "Unauthorized for url: https://huggingface"),
        pattern=r"Cannot access gated repo|[Yy]ou are trying to access a gated repo|GatedRepoError|Access to (?:model|dataset) \S{1,120} is restricted|is awaiting a review from the repo|Invalid user token|Invalid credentials in "
        r"Authorization|is a gated dataset|Token is required \(`token=True`\)|Unauthorized for url: https://huggingface\.co/(?!.{0,400}Repository Not Found)", kind="error", cause="gated_model",
        source="huggingface_hub 2.4, utils/_http.py",
        example="Cannot access gated repo for url https://huggingface.co/api/models/ardent-figment/gated-model.", look_alike="this repository was gated in 2023",
    ),
    Signature(
        id="model_not_there", hints=("Repo id must", "does not appear to have a file named", "is not a local folder and is not a valid model identifier", "Incorrect path_or_model_id", "Can't load ", "Unrecognized model in", "Error no file named",
               "Can't find 'adapter_config.json'", "vocabulary file at path", "Repository Not Found", "RepositoryNotFoundError", "EntryNotFoundError", "RevisionNotFoundError"),
        pattern=r"Repo id must (?:be in the form|use alphanumeric)|does not appear to have a file named|is not a local folder and is not a valid model identifier|Incorrect path_or_model_id|"
        r"Can't load (?:the )?(?:configuration|config|tokenizer|model|feature extractor|image processor|processor)(?: of| for)? '|Unrecognized model in|Error no file named .{1,200}found in directory|Can't find 'adapter_config\.json'|"
        r"find a vocabulary file at path|Repository Not Found for url|(?<!Local)(?:Repository|Entry|Revision)NotFoundError",
        kind="error", cause="model_path_missing", source="huggingface_hub 2.4, utils/_validators.py; " + _TRANSFORMERS,
        example="huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data/models/qwen'.",
        look_alike="Repo card metadata block was not found.",
    ),
)  # fmt: skip
