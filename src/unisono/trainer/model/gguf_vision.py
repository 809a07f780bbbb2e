"""The vision part of a model as GGUF for llama.cpp, which reads it from a file of its own beside
the language model (`--mmproj`).

Names and keys are those of llama.cpp's convert_hf_to_gguf.py (`Gemma3VisionModel`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import torch

from unisono.base.errors import ModelError
from unisono.trainer.model.gguf import Setting
from unisono.trainer.model.multimodal import text_prefixes

ARCHITECTURE = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ]
PROJECTORS = {"gemma3": gguf.VisionProjectorType.GEMMA3}
"""llama.cpp's kind of the projector, by the `model_type` of config.json."""
_UNUSED = "model.vision_tower.head."
"""Of SigLIP: gives one vector for a whole picture, which the decoder does not get."""
_USUAL_SCALE = 4


@dataclass(frozen=True)
class VisionLayout:
    """How the vision part of a model is laid out in a GGUF file.

    Attributes:
        config: of the model.
        pictures: the model's image processor, of transformers.
        names: from names of transformers to those of llama.cpp.
    """

    config: Any
    pictures: Any
    names: Any

    @classmethod
    def of(cls, config: Any, pictures: Any) -> "VisionLayout":
        """The layout for a config of transformers.

        Raises:
            ModelError: if llama.cpp computes something else than a setting says.
        """
        vision = config.vision_config
        if vision.hidden_act != "gelu_pytorch_tanh":
            raise ModelError.of(
                f"the vision part has hidden_act {vision.hidden_act}, which llama.cpp does not compute",
                where="config.json: vision_config.hidden_act",
                why="it computes gelu_pytorch_tanh",
                fix="write a directory with `unisono export --merge`",
            )
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
        return cls(config, pictures, names)

    def settings(self) -> list[Setting]:
        """The keys of the file besides those that any file has."""
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        scale = side // int(self.config.mm_tokens_per_image**0.5)
        settings: list[Setting] = [
            ("clip.has_vision_encoder", "bool", True),
            ("clip.projector_type", "string", PROJECTORS[self.config.model_type]),
            ("clip.use_gelu", "bool", True),
            ("clip.vision.image_size", "uint32", vision.image_size),
            ("clip.vision.patch_size", "uint32", vision.patch_size),
            ("clip.vision.embedding_length", "uint32", vision.hidden_size),
            ("clip.vision.feed_forward_length", "uint32", vision.intermediate_size),
            ("clip.vision.block_count", "uint32", vision.num_hidden_layers),
            ("clip.vision.attention.head_count", "uint32", vision.num_attention_heads),
            ("clip.vision.attention.layer_norm_epsilon", "float32", vision.layer_norm_eps),
            ("clip.vision.projection_dim", "uint32", self.config.get_text_config().hidden_size),
            ("clip.vision.image_mean", "array", [float(value) for value in self.pictures.image_mean]),
            ("clip.vision.image_std", "array", [float(value) for value in self.pictures.image_std]),
        ]
        if scale != _USUAL_SCALE:
            settings.append(("clip.vision.projector.scale_factor", "uint32", scale))
        return settings

    def tensors(self, base: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the vision part and the projector in the file's names and layout, in
        float32, one after the other.

        Raises:
            ModelError: if llama.cpp has no name for one.
        """
        inside = text_prefixes(base)
        for name, tensor in base.state_dict().items():
            if name.startswith((*inside, _UNUSED)):
                continue
            value = tensor.detach().float()
            # This norm of Gemma multiplies by 1 + weight, and llama.cpp by what the file has.
            yield self._name(name), value + 1 if name.endswith("soft_emb_norm.weight") else value

    def _name(self, name: str) -> str:
        plain = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        stored = self.names.get_name(plain.replace("_weight", ".weight"), try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ModelError.of(
                f"llama.cpp has no name for the tensor {name}",
                where=f"model type {self.config.model_type}",
                fix="convert a merged export with llama.cpp's convert_hf_to_gguf.py --mmproj",
            )
        return str(stored)
