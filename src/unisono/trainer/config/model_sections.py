"""The sections of a config that say what is trained: `model`, `adapter` and `train_only`."""

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
)

from unisono.trainer.config.sections import (
    NamesFile,
    NotNegative,
    PartWords,
    Patterns,
    Positive,
    Section,
    Share,
    TargetWord,
    float_of_yaml,
)


class RopeSection(Section):
    """Scaling of rotary position embeddings, for rows that are longer than the model was trained
    on.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3"] = Field(
        description=(
            "linear: arXiv:2306.15595; dynamic: NTK-aware, by the length of each row; yarn: arXiv:2309.00071;"
            " llama3: as in Llama 3.1"
        )
    )
    factor: Annotated[float, BeforeValidator(float_of_yaml), Field(gt=1.0)] | Literal["auto"] = Field(
        default="auto",
        description=(
            "how many times longer rows may be; auto: as data.max_length needs, in whole multiples of the"
            " model's positions"
        ),
    )


class ModelSection(Section):
    """The model to train, and how it is loaded."""

    path: Annotated[str, NamesFile()] = Field(
        min_length=1, description="a directory, a hub id, or `builtin:tiny`"
    )
    revision: str | None = Field(default=None, description="a hub revision: branch, tag or commit")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description=(
            "dtype of frozen weights and of the computation; auto: bfloat16 if the device supports it"
        ),
    )
    tokenizer: Annotated[str | None, NamesFile()] = Field(
        default=None, description="a directory or hub id; null: the model's own"
    )
    weights: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description=(
            "random: only config.json is read, for pretraining from random weights; with an adapter only for"
            " `--dry-run`"
        ),
    )
    resize_vocabulary: bool = Field(
        default=False,
        description=(
            "grow embedding and head to the tokenizer's size; with an adapter both are fully trained and"
            " saved with it"
        ),
    )
    rope: RopeSection | None = Field(
        default=None, description="scaled RoPE, stored with the result; null: as in the model's config.json"
    )
    embedding_noise: NotNegative = Field(
        default=0.0,
        description=(
            "NEFTune (arXiv:2310.05914): α of the uniform noise within ±α/√(tokens of the row × hidden size)"
            " that is added to input embeddings in training"
        ),
    )
    trust_remote_code: bool = Field(default=False, description="run Python code from the model repository")
    quantize: Literal["nf4", "fp4", "int8"] | None = Field(
        default=None,
        description=(
            "with an adapter: keep the linear layers of the base model in 4 or 8 bits (QLoRA,"
            " arXiv:2305.14314; needs `pip install bitsandbytes accelerate`); embeddings, head and norms stay"
            " in `dtype`; null: as in the model's files"
        ),
    )
    quantize_double: bool = Field(
        default=True, description="with nf4 and fp4: quantize the scales of blocks of weights, too"
    )
    quantize_embeddings: bool = Field(
        default=False,
        description=(
            "with `quantize`: keep embedding and head in 8 bits, too, with a scale for each token; peft and"
            " bitsandbytes alone keep them in 16 bits"
        ),
    )
    quantize_compute: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description=(
            "dtype that quantized weights are dequantized to, and of the products with them; auto: `dtype`"
        ),
    )


class AdapterSection(Section):
    """A low-rank adapter (LoRA, arXiv:2106.09685; rsLoRA, arXiv:2312.03732; DoRA,
    arXiv:2402.09353), or a different one of peft (OFT, arXiv:2306.07280; LoHa,
    arXiv:2108.06098; LoKr, arXiv:2309.14859).
    """

    kind: Literal["lora", "dora", "rslora", "oft", "loha", "lokr"] = Field(
        default="lora",
        description=(
            "dora trains magnitude and direction separately and is slower; rslora suits high ranks; oft"
            " rotates the weights, loha and lokr multiply small matrices by element and as Kronecker product"
        ),
    )
    rank: int = Field(
        default=16, ge=1, description="the rank r of the update B·A; for oft, the size of a rotation block"
    )
    alpha: Positive = Field(
        default=32.0, description="scale: the update is multiplied by alpha / rank (rslora: alpha / √rank)"
    )
    dropout: Share = Field(default=0.0, description="dropout on the adapter's input")
    targets: TargetWord | PartWords | Patterns = Field(
        default="all-linear",
        description=(
            "attention (and other mixers of tokens), mlp, experts and router, joined by +; all-linear: all of"
            " these and other linear layers, without router, embedding and head; or regular expressions"
            " searched in names of linear layers and of experts' weights; for image models unet (which"
            " all-linear means there, too: all linear layers of its transformer blocks), unet+text, or"
            " regular expressions searched in module names of the UNet"
        ),
    )
    modules_to_save: list[str] = Field(
        default=[], description="modules that are fully trained and saved with the adapter"
    )
    init: Literal["default", "pissa"] = Field(
        default="default",
        description=(
            "pissa (arXiv:2404.02948): begin with the principal components of the weights, and freeze the"
            " rest; stored as a plain adapter of twice the rank"
        ),
    )
    init_steps: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="with `init: pissa`: power iterations of a fast approximate SVD; null: exact",
    )
    from_: Annotated[str | None, NamesFile(shows_absence=True)] = Field(
        default=None,
        alias="from",
        min_length=1,
        description="the directory of an adapter, or of a finished run, to continue with its weights",
    )
    merge: Annotated[list[Annotated[str, Field(min_length=1)]], NamesFile(shows_absence=True)] = Field(
        default=[],
        description=(
            "adapters (directories) that are merged into the base weights in memory, in order; the result"
            " contains them"
        ),
    )

    @property
    def is_plain(self) -> bool:
        """Whether an adapted layer has two matrices more, and no other values or operations; and
        nothing else is trained.
        """
        return self.kind in ("lora", "rslora") and self.dropout == 0 and not self.modules_to_save

    @property
    def is_of_pairs(self) -> bool:
        """Whether an adapted layer has matrices A and B, as LoRA and its variants."""
        return self.kind in ("lora", "rslora", "dora")


def needs_start(adapter: AdapterSection | None) -> bool:
    """Whether the model that a run starts from is another one than that without its adapter."""
    if adapter is None:
        return True
    return bool(adapter.from_ or adapter.modules_to_save) or adapter.init == "pissa"


class TrainOnlySection(Section):
    """The parts of a model that are trained without an adapter; everything else stays as it is."""

    layers: int = Field(description="N: the last N layers; -N: the first N; 0: none")
    spread: bool = Field(
        default=False,
        description=(
            "layers: N layers at equal distances, the last of each group, where LLaMA Pro (arXiv:2401.02415)"
            " inserts new ones"
        ),
    )
    modules: Literal["all"] | list[str] = Field(
        default="all", description="all, or names of the modules inside these layers, e.g. `mlp`, `q_proj`"
    )
    extra: list[str] = Field(
        default=[],
        description="names of modules outside of the layers, e.g. `embed_tokens`, `norm`, `lm_head`",
    )


ModelPart = Literal["language", "projector", "vision"]
LANGUAGE: tuple[ModelPart, ...] = ("language",)
