"""The section `diffusion`: pictures, captions and the loss of `objective: diffusion`."""

from typing import Annotated, Literal

from pydantic import Field

from unisono.config.sections import NotNegative, Positive, Section, Share

DIFFUSION = "diffusion"

TargetWord = Literal["all-linear", "unet", "unet+text"]
"""Words of `adapter.targets`; the last two are for image models."""


class DiffusionSection(Section):
    """LoRA training of Stable Diffusion models on pictures with captions."""

    prediction: Literal["auto", "epsilon", "v_prediction"] = Field(
        default="auto",
        description="what the UNet predicts: the noise, or v (arXiv:2202.00512); auto: as the scheduler of the model says",
    )
    min_snr_gamma: Positive | None = Field(
        default=None,
        description="γ of the loss weights min(SNR, γ) / SNR (arXiv:2303.09556; with v: / (SNR + 1)); 5 is usual; null: no weights",
    )
    noise_offset: NotNegative = Field(
        default=0.0, description="scale of a random constant that is added to the noise of each channel"
    )
    prior: str | None = Field(
        default=None,
        min_length=1,
        description="a folder of regularization pictures (prior preservation, arXiv:2208.12242); they are repeated until they are as many"
        " as the training pictures with their repeats",
    )
    prior_weight: NotNegative = Field(
        default=1.0, description="weight of the loss of regularization pictures"
    )
    caption_extensions: list[Annotated[str, Field(pattern=r"^\.[A-Za-z0-9_-]+$")]] = Field(
        default=[".txt", ".caption"],
        min_length=1,
        description="suffixes of caption files, in order of preference; a `metadata.jsonl` in the folder counts, too",
    )
    folder_captions: bool = Field(
        default=False,
        description="a picture without a caption gets the name of its folder, `4_NAME`, as in sd-scripts; false: it is a bad row",
    )
    caption_dropout: Share = Field(
        default=0.0, description="share of captions that are replaced by an empty one, in training"
    )
    shuffle_captions: bool = Field(
        default=False, description="shuffle the parts of a caption between commas each time it is used"
    )
    keep_tokens: int = Field(
        default=0, ge=0, description="with `shuffle_captions`: number of parts at the beginning that stay"
    )
    clip_skip: int | None = Field(
        default=None,
        ge=1,
        le=12,
        description="the hidden states of the text encoder that the UNet sees, counted from its end: 1 is the last layer; null: as the"
        " pipeline of the model does it",
    )
    buckets: bool = Field(
        default=True,
        description="pictures keep about their aspect ratio, in one of a few sizes of about the area of `data.resolution`; false: all are cut to it",
    )
    min_side: int = Field(default=256, ge=8, description="with `buckets`: shortest side, pixels")
    max_side: int = Field(default=2048, ge=8, description="with `buckets`: longest side, pixels")
    bucket_step: int = Field(
        default=64, ge=8, description="with `buckets`: sides are multiples of this many pixels"
    )
    upscale: bool = Field(
        default=True,
        description="with `buckets`: smaller pictures are enlarged to the area of `data.resolution`; false: they keep their size, cut to the step",
    )
    max_tokens: Literal[75, 150, 225] = Field(
        default=75,
        description="tokens of a caption; more than 75 are encoded in parts of 75 that the UNet sees one after the other",
    )
    cache: bool = Field(
        default=True,
        description="compute the latents of pictures and the embeddings of captions once, before training, and keep them on disk;"
        " false: in each step",
    )
    text_lr: Positive | None = Field(
        default=None,
        description="with `adapter.targets: unet+text`: learning rate of the text encoders; null: optim.lr",
    )
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="prompts of sample pictures, which are drawn at each evaluation into `samples/`, beside those of `eval.samples`",
    )
    sample_steps: int = Field(default=20, ge=1, le=1000, description="denoising steps of sample pictures")
    guidance: NotNegative = Field(
        default=7.5, description="scale of the classifier-free guidance of sample pictures; up to 1: none"
    )
