"""The processor of a vision-language model, of transformers: how many tokens a picture has, and
what the model gets of it.
"""

import math
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.base.child import loading_modules
from unisono.base.errors import ModelError, UsageError
from unisono.base.files import read_object
from unisono.base.text import library_words, one_line
from unisono.trainer.config.sections import PixelsSection
from unisono.trainer.data import PictureSource, RowError
from unisono.trainer.data.tokenizer import digest_file

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
_EXTRA = "pip install 'unisono[vision]'"

Size = tuple[int, int]
"""Width and height in pixels."""


def has_processor(directory: Path) -> bool:
    """Whether a model's directory has a processor of pictures."""
    return any((directory / name).is_file() for name in PROCESSOR_FILES)


def processor_digests(directory: Path) -> dict[str, str]:
    """The digests of a processor's files."""
    files = (directory / name for name in PROCESSOR_FILES)
    return {file.name: digest_file(file, str(file)) for file in files if file.is_file()}


def need_pillow(where: str) -> None:
    """Refuses pictures without Pillow.

    Raises:
        UsageError: with the command that installs it.
    """
    if find_spec("PIL") is None:
        raise UsageError.of(
            "the rows have pictures, and Pillow is not installed",
            where=where,
            why="pictures are decoded with it",
            fix=_EXTRA,
        )


class PictureProcessor:
    """A processor of transformers for one picture at a time.

    Attributes:
        processor: of transformers.
        placeholder: the text that a chat template writes for a picture.
        image_ids: the tokens of which each stands for one feature of a picture.
    """

    def __init__(self, directory: Path, *, trust_remote_code: bool = False) -> None:
        """Loads it.

        Raises:
            ModelError: if transformers cannot, or it does not expand the places of pictures.
            UsageError: if it needs a package that is not installed.
        """
        self._directory = directory
        self.processor = _load(directory, trust_remote_code=trust_remote_code)
        self.placeholder = getattr(self.processor, "image_token", None) or ""
        ids = [i for i in getattr(self.processor, "image_token_ids", ()) if isinstance(i, int)]
        self.image_ids = tuple(ids)
        if not self.placeholder or not ids:
            raise self._refusal("it has no token for the place of a picture")

    @cached_property
    def template(self) -> str | None:
        """Its own chat template; None if it has none, or the tokenizer has the same."""
        text = getattr(self.processor, "chat_template", None)
        return text if isinstance(text, str) and text else None

    def expansion(self, size: Size) -> str:
        """The text that takes the place of a picture of this size, with a token for each feature.

        Raises:
            RowError: if the processor refuses the size.
        """
        return self._expansion(size)

    @cached_property
    def _expansion(self) -> Any:
        return lru_cache(maxsize=1 << 16)(self._expand)

    def _expand(self, size: Size) -> str:
        from PIL import Image

        blank = Image.new("RGB", size, (127, 127, 127))
        made = self._called(blank, size, return_text_replacement_offsets=True)
        places = made.get("text_replacement_offsets")
        if not places or len(places[0]) != 1:
            raise self._refusal("it does not report what takes the place of a picture")
        return str(places[0][0]["replacement"])

    def seen_size(self, size: Size) -> Size:
        """The size of a picture after the processor has resized it to whole patches, of a
        processor that makes a grid of them (Qwen's).

        Raises:
            RowError: if the processor refuses the size.
        """
        return self._seen_size(size)

    @cached_property
    def _seen_size(self) -> Any:
        return lru_cache(maxsize=1 << 16)(self._see_size)

    def _see_size(self, size: Size) -> Size:
        from PIL import Image

        grid = self._called(Image.new("RGB", size), size).get("image_grid_thw")
        if grid is None:
            raise self._refusal("it does not report the size to which it resizes pictures")
        _, rows, columns = (int(number) for number in grid[0])
        side = int(self.processor.image_processor.patch_size)
        return columns * side, rows * side

    def inputs(self, image: Any) -> dict[str, Any]:
        """What the model gets of a picture in RGB: tensors by name, the first axis of each is of
        pictures, tiles or patches.

        Raises:
            RowError: if the processor refuses the picture.
        """
        made = self._called(image, image.size, return_tensors="pt")
        return {name: value for name, value in made.items() if name not in _OF_TEXT}

    def _called(self, image: Any, size: Size, **options: Any) -> Any:
        try:
            return self.processor(text=[self.placeholder], images=[image], **options)
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError, ZeroDivisionError) as error:
            raise RowError(
                f"the model's processor refuses a picture of {size[0]} × {size[1]} pixels:"
                f" {one_line(str(error), limit=120)}",
                "remove the row, or resize the picture",
            ) from error

    def _refusal(self, why: str) -> ModelError:
        return ModelError.of(
            f"the processor {type(self.processor).__name__} cannot be used for training",
            where=str(self._directory),
            why=why,
            fix="remove the pictures from the rows (the source's columns: {images: null}), or use a different model",
        )


def _load(directory: Path, *, trust_remote_code: bool) -> Any:
    need_pillow(str(directory))
    with loading_modules():
        from transformers import AutoProcessor
        from transformers.utils import logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns that Pillow is used instead of torchvision
    try:
        processor = AutoProcessor.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except ImportError as error:
        without_video = _without_video(directory)
        if without_video is not None:
            return without_video
        missing = "torchvision" if "torchvision" in str(error).lower() else one_line(str(error), limit=80)
        raise UsageError.of(
            f"the model's processor needs {missing}",
            where=str(directory),
            why=f"{_class_named(directory)} of transformers loads it",
            fix=_EXTRA,
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError.of(
            "the model's processor cannot be loaded",
            where=str(directory),
            why=library_words(error),
            fix=f"copy {' and '.join(PROCESSOR_FILES[:2])} of the model again",
        ) from error
    finally:
        logging.set_verbosity(before)
    if not hasattr(processor, "image_processor"):
        raise ModelError.of(
            "the model has no processor of pictures",
            where=str(directory),
            why=f"transformers loads {type(processor).__name__} from it",
            fix=f"copy {' and '.join(PROCESSOR_FILES[:2])} of the model again",
        )
    return processor


def _without_video(directory: Path) -> Any | None:
    """A processor of pictures alone, of a class that reads videos, too, for which transformers
    needs torchvision; None if its class is not known.

    Only the check of its arguments wants a processor of videos.
    """
    import transformers

    kind = getattr(transformers, _class_named(directory), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.ProcessorMixin)):
        return None

    class PicturesOnly(kind):  # type: ignore[misc, valid-type]  # whichever it is
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    try:
        pictures = transformers.AutoImageProcessor.from_pretrained(str(directory), local_files_only=True)
        return PicturesOnly(pictures, tokenizer, None, chat_template=tokenizer.chat_template)
    except (ImportError, OSError, ValueError, TypeError, AttributeError):
        return None


def _class_named(directory: Path) -> str:
    """The processor's class by its files."""
    for name in PROCESSOR_FILES:
        named = read_object(directory / name).get("processor_class")
        if isinstance(named, str):
            return named
    return "its class"


def fitted_size(size: Size, source: PictureSource, pixels: PixelsSection) -> Size:
    """The size of a picture within the bounds of its row, else of the config: LLaMA-Factory's
    arithmetic, which keeps the ratio of the sides.
    """
    width, height = size
    most, least = source.most_pixels or pixels.max, source.least_pixels or pixels.min
    if most is not None and width * height > most:
        factor = math.sqrt(most / (width * height))
        width, height = int(width * factor), int(height * factor)
    if least is not None and width * height < least:
        factor = math.sqrt(least / (width * height))
        width, height = int(width * factor), int(height * factor)
    return max(width, 1), max(height, 1)
