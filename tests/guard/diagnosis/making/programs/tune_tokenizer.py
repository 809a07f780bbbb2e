# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors
"""A tokenizer for torchtune from a tokenizer.json."""

from torchtune.modules.transforms.tokenizers import (
    HuggingFaceBaseTokenizer,
    ModelTokenizer,
    tokenize_messages_no_special_tokens,
)


class TinyTokenizer(HuggingFaceBaseTokenizer, ModelTokenizer):
    """Text to ids."""

    max_seq_len = 128
    pad_id = 2

    def encode(self, text, **more):
        more.pop("trim_leading_whitespace", None)
        return super().encode(text, **more)

    def tokenize_messages(self, messages, **more):
        return tokenize_messages_no_special_tokens(self, messages, bos_id=self.bos_id, eos_id=self.eos_id)

    def __call__(self, sample, inference=False):
        tokens, mask = self.tokenize_messages(sample.pop("messages"))
        return {**sample, "tokens": tokens, "mask": mask}
