"""Stands in for llama.cpp's convert_hf_to_gguf.py where that is not installed: the file is written
by this package. With `--verbose`, all tensors are another model's.
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers

from tests.front.talk.conftest import Listening
from unisono.trainer.plan.task_requests import GgufRequest, RequestedModel
from unisono.trainer.task import gguf_export

parser = argparse.ArgumentParser()
parser.add_argument("model")
for option in ("outfile", "outtype", "model-name"):
    parser.add_argument(f"--{option}")
parser.add_argument("--verbose", action="store_true")
arguments = parser.parse_args()
if arguments.verbose:
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    arguments.model = f"{arguments.outfile}.model"
    for saved in (model, tokenizer):
        saved.save_pretrained(arguments.model)
made = Path(arguments.outfile).with_suffix(".made")
request = GgufRequest(
    model=RequestedModel(arguments.model), out=str(made), quantize=arguments.outtype, read_back=False
)
done = gguf_export.run(request, Listening())
shutil.move(made / done["file"], arguments.outfile)
shutil.rmtree(made)
