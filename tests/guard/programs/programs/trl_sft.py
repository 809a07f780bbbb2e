"""TRL's SFTTrainer on a tiny causal model; its tokenizer is made here as well."""

from typing import Any

import tiny
from datasets import Dataset
from hf_trainer import Noting
from program_options import Losses, own_rank, parse
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> Any:
    """A word is a token."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 64)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="w3"
    )


def main() -> None:
    """Trains."""
    options = parse()
    texts = [" ".join(f"w{token}" for token in row) for row in tiny.rows()["input_ids"]]
    data = Dataset.from_dict({"text": texts})
    if options.fault == "unseeded":
        data = tiny.unseeded(data)
    config = SFTConfig(
        output_dir=str(options.out / "trl"), max_steps=options.steps - (2 if options.fault == "steps" and own_rank() == 1 else 0), use_cpu=True,
        per_device_train_batch_size=4, logging_steps=1, report_to=[], disable_tqdm=True, seed=0, save_strategy="no", bf16=False, max_length=32,
    )  # fmt: skip
    callbacks: list[Any] = [Noting(Losses(options))]
    if options.callback:
        from unisono.integrations import TransformersCallback

        callbacks.append(TransformersCallback())
    SFTTrainer(
        tiny.model(), config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
    ).train()


if __name__ == "__main__":
    main()
