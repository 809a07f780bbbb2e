"""Signatures of programs that train: exceptions, tokenizers, numbers that are none."""

from unisono.causes.signature import Signature

_TORCH = "torch 2.13, "

PROGRAM_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="traceback", hints=("Traceback (most recent call last)",),
        pattern=r"Traceback \(most recent call last\):", kind="error", cause=None, source="CPython: what it is stands in the last line",
        example="[rank1]: Traceback (most recent call last):", look_alike="traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    ),
    Signature(
        id="python_error", hints=("Error: ", "Exception: "),
        pattern=r"(?:^|\]:? {1,3}|\)(?:\x1b\[0m)? {1,3})(?:KeyError|IndexError|ValueError|TypeError|AttributeError|ZeroDivisionError|AssertionError|NameError|"
        r"UnicodeDecodeError|jinja2\.exceptions\.TemplateError|json\.decoder\.JSONDecodeError): ",
        kind="error", cause="user_code_error", source="CPython; the exceptions that a program's own code and data raise",
        example="[rank1]: KeyError: 'labels'", look_alike="WARNING: a KeyError was caught and ignored",
    ),
    Signature(
        id="exception", hints=("Error: ", "Exception: "),
        pattern=r"(?:^|\]:? {1,3}|\)(?:\x1b\[0m)? {1,3})(?:[A-Za-z_][\w.]{0,120})?(?:Error|Exception): ", kind="error", cause=None,
        source="CPython: the last line of a traceback, whatever was raised",
        example="[rank3]: RuntimeError: Message role is unexpected", look_alike="slurmstepd: error: *** STEP 81231.0 ON gpu-04 CANCELLED",
    ),
    Signature(
        id="index_outside_table", hints=("index out of range in self", "srcIndex < srcSelectDimSize", "vectorized_gather_kernel", "indexSelectLargeIndex",
               "indexSelectSmallIndex", "vectorized gather kernel index out of bounds"),
        pattern=r"index out of range in self|vectorized gather kernel index out of bounds|srcIndex < srcSelectDimSize|vectorized_gather_kernel.{0,300}Assertion|indexSelect(?:Large|Small)Index.{0,300}Assertion",
        kind="error", cause="tokenizer_mismatch", source=_TORCH + "libtorch_cpu (Embedding.cpp), Indexing.cu: an id beyond the embedding",
        example="../aten/src/ATen/native/cuda/Indexing.cu:1292: indexSelectLargeIndex: block: [41,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        look_alike="IndexError: Target 12 is out of bounds.",
    ),
    Signature(
        id="device_assert", hints=("device-side assert triggered",),
        pattern=r"CUDA error: device-side assert triggered", kind="error", cause=None, source="CUDA 12: which assertion stands above",
        example="RuntimeError: CUDA error: device-side assert triggered", look_alike="CUDA error: out of memory",
    ),
    Signature(
        id="loss_is_nan", hints=("nan", "NaN", "NAN", "in local", "found invalid values", "probably exploding", "norm", "loss", "on-finite"),
        pattern=r"(?:loss|grad[_ ]norm)['\"]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?(?:nan|NaN|inf)\b(?!\w)|returned nan values in its|contains either `?inf`?, `?nan`?|[Ll]oss is (?:nan|NaN|NAN)|"
        r"found (?:NaN|Inf|nan|inf) in local|NaN detected in|The loss returned in .{0,40} is nan|found invalid values:|Detected nan/inf|loss is probably exploding|[Nn]on-finite (?:loss|gradient|grad norm)|[Ll]oss (?:is|became) (?:infinite|Infinite) or [Nn]a[Nn]|Loss is (?:inf|-inf)\b, stopping", kind="error",
        cause="nan_loss", source="transformers 5.23, Trainer; torch anomaly mode; generation",
        example="{'loss': '0.0', 'grad_norm': 'nan', 'learning_rate': '9.1e-06', 'epoch': '0.61'}",
        look_alike="{'loss': '1.8430', 'grad_norm': '1.247434', 'learning_rate': '1.5950e-04', 'epoch': '0.61'} financial",
    ),
    Signature(
        id="loss_scale_at_minimum", hints=("loss scale already at minimum", "Minimum loss scale reached"),
        pattern=r"Current loss scale already at minimum|Minimum loss scale reached", kind="error", cause="nan_loss", source="DeepSpeed, runtime/fp16/loss_scaler.py",
        example="Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        look_alike="[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    ),
    Signature(
        id="loss_scale_falls", hints=("Skipping step",),
        pattern=r"OVERFLOW! Rank \d{1,6} Skipping step", kind="warning", cause=None, source="DeepSpeed, runtime/fp16/loss_scaler.py: a few are normal",
        example="[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768", look_alike="Skipping step 12: already done",
    ),
    Signature(
        id="fatal_python", hints=("Fatal Python error", "Segmentation fault", "Bus error"),
        pattern=r"Fatal Python error: |Segmentation fault \(core dumped\)|Bus error \(core dumped\)", kind="death", cause="rank_died_first",
        source="CPython's faulthandler; shells", example="Fatal Python error: Segmentation fault", look_alike="segmentation of the image is done",
    ),
)  # fmt: skip
