"""TRL's GRPOTrainer on a tiny causal model, whose reward never returns in a later step."""

import time
from typing import Any

import tiny
from datasets import Dataset
from program_options import parse
from trl import GRPOConfig, GRPOTrainer
from trl_sft import tokenizer

_STEPS_BEFORE = 6


class Rewards:
    """A reward function that asks a judge; one call too many, and it never answers."""

    __name__ = "rewards"

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        """One number for each completion."""
        self._calls += 1
        if self._calls > _STEPS_BEFORE:
            self.judge()
        return [float(len(text)) for text in completions]

    def judge(self) -> None:
        """Waits for ever."""
        time.sleep(1e6)


def main() -> None:
    """Trains."""
    options = parse()
    prompts = [" ".join(f"w{token}" for token in row[:4]) for row in tiny.rows()["input_ids"]]
    config = GRPOConfig(
        output_dir=str(options.out / "trl"), max_steps=100, use_cpu=True, per_device_train_batch_size=4, num_generations=2, report_to=[],
        disable_tqdm=True, seed=0, save_strategy="no", bf16=False, max_completion_length=8,
    )  # fmt: skip
    GRPOTrainer(
        tiny.model(),
        Rewards(),
        config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
    ).train()


if __name__ == "__main__":
    main()
