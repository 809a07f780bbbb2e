"""The processor of a vision-language model, of transformers: how many tokens a picture has, and
what the model gets of it.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from unisono.trainer.plan.families import ROW_COUNTS

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
EXTRA = "pip install 'unisono[vision]'"
"""The command that installs what processors need."""
_TRIED = (200, 100)
_VIDEOS = "video_processor"
_STACKED = 5  # axes: videos, frames, channels, height, width

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True, slots=True)
class ClipTimes:
    """When the frames of a video are.

    Attributes:
        times: of each frame that is used, in seconds after the first one of the video.
        seconds: of the video.
    """

    times: tuple[float, ...]
    seconds: float

    @property
    def metadata(self) -> dict[str, Any]:
        """The same for a processor. As if the video had one frame a second, its frames' numbers
        are their times: those of a real video are not evenly spaced.
        """
        numbers = list(self.times)  # a processor may extend it
        return {
            "fps": 1.0,
            "duration": self.seconds,
            "total_num_frames": self.seconds,
            "frames_indices": numbers,
        }


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
            fix=EXTRA,
        )


class PictureProcessor:
    """A processor of transformers for one picture or video at a time.

    Attributes:
        processor: of transformers.
        placeholder: the text that a chat template writes for a picture.
        video_placeholder: likewise for a video; None: videos are read as pictures, or not at all.
        image_ids: the tokens of which each stands for one feature of a picture, and of a video if
            that is a different one. Those that begin or end one are not among them.
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
        features = _feature_ids(directory, self.processor, trust_remote_code=trust_remote_code)
        if not self.placeholder or not features:
            raise self._refusal("it has no token for the place of a picture")
        videos: Any = getattr(self.processor, _VIDEOS, None)
        self.video_placeholder = None if videos is None else getattr(self.processor, "video_token", None)
        if getattr(videos, "cap_pixels_per_frame", False) is None:
            videos.cap_pixels_per_frame = False  # as transformers 5.23 has it; later ones may not
        self.image_ids = features if self.video_placeholder else features[:1]

    @property
    def lacks_videos(self) -> bool:
        """Whether the model has tokens for videos that cannot be used without torchvision."""
        return self.video_placeholder is None and _VIDEOS in type(self.processor).get_attributes()

    def placeholder_of(self, source: PictureSource) -> str:
        """What a chat template writes for a picture or video."""
        return self.placeholder if source.clip is None else self.video_placeholder or ""

    @cached_property
    def template(self) -> str | None:
        """Its own chat template; None if it has none, or the tokenizer has the same."""
        text = getattr(self.processor, "chat_template", None)
        return text if isinstance(text, str) and text else None

    def expansion(self, size: Size, *, several: bool = False) -> str:
        """The text that takes the place of a picture of this size, with a token for each feature.

        Args:
            size: of it.
            several: whether its row has more pictures.

        Raises:
            RowError: if the processor refuses the size.
        """
        return str(self._expansion(size, several and self.reads_rows)[0])

    def count_values(self, size: Size, *, several: bool = False) -> int:
        """How many values the pixels of a picture of this size have, as the model gets them.

        Args:
            size: of the picture.
            several: whether its row has more pictures.

        Raises:
            RowError: if the processor refuses the size.
        """
        return int(self._expansion(size, several and self.reads_rows)[1])

    @cached_property
    def reads_rows(self) -> bool:
        """Whether a picture is different among others of its row: LLaVA-OneVision makes tiles of
        the only one of a row.
        """
        try:
            return bool(self._expansion(_TRIED, True)[0] != self._expansion(_TRIED, False)[0])
        except RowError:
            return False

    @cached_property
    def _expansion(self) -> Any:
        return lru_cache(maxsize=1 << 16)(self._expand)

    def _expand(self, size: Size, several: bool) -> tuple[str, int]:  # noqa: FBT001 - lru_cache has positions
        from PIL import Image

        blank = Image.new("RGB", size, (127, 127, 127))
        made = self._called(blank, several=several, return_text_replacement_offsets=True)
        places = made.get("text_replacement_offsets")
        if not places or len(places[0]) != 1 + several:
            raise self._refusal("it does not report what takes the place of a picture")
        pixels = _nested_size(made.get("pixel_values"))
        return str(places[0][0]["replacement"]), pixels // (1 + several)

    @cached_property
    def clip_expansion(self) -> Any:
        """A function of the size and the ClipTimes of a video, which gives the text that takes its
        place, with a token for each feature, and the number of values of its pixels. It raises a
        RowError if the processor refuses the video.
        """
        return lru_cache(maxsize=1 << 12)(self._expand_clip)

    def _expand_clip(self, size: Size, times: ClipTimes) -> tuple[str, int]:
        from PIL import Image

        blank = Image.new("RGB", size, (127, 127, 127))
        options = {"return_text_replacement_offsets": True, "return_tensors": "pt"}
        made = self._called_on_clip([blank] * len(times.times), times, **options)
        places = made.get("text_replacement_offsets")
        if not places or len(places[0]) != 1:
            raise self._refusal("it does not report what takes the place of a video")
        if getattr(made.get("pixel_values_videos"), "ndim", 0) == _STACKED:
            name = named_class(self.processor)
            raise RowError(
                f"{name} gives videos as a stack, in which all need the same number of frames",
                "write some of the frames as pictures, in the column images, or remove the row",
            )
        pixels = [value for name, value in made.items() if name.startswith("pixel_values")]
        return str(places[0][0]["replacement"]), sum(map(_nested_size, pixels))

    def clip_inputs(self, frames: Sequence[Any], times: ClipTimes) -> dict[str, Any]:
        """What the model gets of a video: tensors by name, like `inputs`.

        Args:
            frames: pictures in RGB, of the same size.
            times: of the frames.

        Raises:
            RowError: if the processor refuses the video.
        """
        made = self._called_on_clip(list(frames), times, return_tensors="pt")
        return {name: value for name, value in made.items() if name not in _OF_TEXT}

    def _called_on_clip(self, frames: list[Any], times: ClipTimes, **options: Any) -> Any:
        # Temporal patches are of several frames: the last one is repeated, as LLaMA-Factory does.
        patch = int(getattr(self.processor.video_processor, "temporal_patch_size", None) or 1)
        frames = frames + frames[-1:] * (-len(frames) % patch)
        options |= {"video_metadata": [times.metadata], "do_sample_frames": False}
        what = f"a video of {len(frames)} frames of {frames[0].size[0]} × {frames[0].size[1]} pixels"
        with _refusing(what):
            return self.processor(text=[self.video_placeholder], videos=[frames], **options)

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

        grid = self._called(Image.new("RGB", size), several=False).get("image_grid_thw")
        if grid is None:
            raise self._refusal("it does not report the size to which it resizes pictures")
        _, rows, columns = (int(number) for number in grid[0])
        side = int(self.processor.image_processor.patch_size)
        return columns * side, rows * side

    def inputs(self, image: Any, *, several: bool = False) -> dict[str, Any]:
        """What the model gets of a picture in RGB: tensors by name, the first axis of each is of
        pictures, tiles or patches.

        Args:
            image: the picture.
            several: whether its row has more pictures; if the processor minds, `ROW_COUNTS` of the
                picture is then not 1.

        Raises:
            RowError: if the processor refuses the picture.
        """
        among = several and self.reads_rows
        made = self._called(image, several=among, return_tensors="pt")
        tensors = {
            name: value.float() if value.is_floating_point() else value  # Llama 4's are in bfloat16
            for name, value in made.items()
            if name not in _OF_TEXT
        }
        if not among:
            return tensors
        return {
            name: value if name == ROW_COUNTS else value[: len(value) // 2] for name, value in tensors.items()
        }

    def _called(self, image: Any, *, several: bool, **options: Any) -> Any:
        count, size = 1 + several, image.size
        with _refusing(f"a picture of {size[0]} × {size[1]} pixels"):
            return self.processor(text=[self.placeholder * count], images=[[image] * count], **options)

    def _refusal(self, why: str) -> ModelError:
        return ModelError.of(
            f"the processor {type(self.processor).__name__} cannot be used for training",
            where=str(self._directory),
            why=why,
            fix="remove the pictures from the rows (the source's columns: {images: null}), or use a different model",
        )


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """A context in which errors of a processor are those of the row."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, ZeroDivisionError) as error:
        raise RowError(
            f"the model's processor refuses {what}: {one_line(str(error), limit=120)}",
            "remove the row, or resize the picture",
        ) from error


def _nested_size(value: Any) -> int:
    """The number of values in arrays, or in lists of them."""
    if isinstance(value, list | tuple):
        return sum(map(_nested_size, value))
    return math.prod(getattr(value, "shape", (0,)))


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
    except (ImportError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        needs_torchvision = "torchvision" in str(error).lower()
        if needs_torchvision or isinstance(error, ImportError):
            pictures_only = _without_other_media(directory)
            if pictures_only is not None:
                return pictures_only
            missing = "torchvision" if needs_torchvision else one_line(str(error), limit=80)
            raise UsageError.of(
                f"the model's processor needs {missing}",
                where=str(directory),
                why=f"{_class_named(directory)} of transformers loads it",
                fix=EXTRA,
            ) from error
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


def _without_other_media(directory: Path) -> Any | None:
    """A processor of pictures alone, of a class that also reads videos or recordings, for which
    transformers needs other packages; None if its class cannot be used so.
    """
    import transformers

    named = getattr(transformers, _class_named(directory), None)
    if not (isinstance(named, type) and issubclass(named, transformers.ProcessorMixin)):
        return None
    kind: Any = named

    class PicturesOnly(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """Accepts that a processor of other media is None."""
            if argument is None and argument_name not in ("image_processor", "tokenizer"):
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    made = {"image_processor": transformers.AutoImageProcessor, "tokenizer": transformers.AutoTokenizer}
    try:
        settings, _ = kind.get_processor_dict(str(directory), local_files_only=True)
        parts = [
            made[name].from_pretrained(str(directory), local_files_only=True) if name in made else None
            for name in kind.get_attributes()
        ]
        return PicturesOnly.from_args_and_dict(parts, settings)
    except (ImportError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _feature_ids(directory: Path, processor: Any, *, trust_remote_code: bool) -> tuple[int, ...]:
    """The token that stands for a feature of a picture, and of a video if that has one: the
    model's, since the processor of some names the one of its template.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, LookupError):
        config = None
    features = []
    for kind in ("image", "video"):
        names = (f"{kind}_token_id", f"{kind}_token_index")
        ids = [*(getattr(config, name, None) for name in names), getattr(processor, names[0], None)]
        features.append(next((i for i in ids if isinstance(i, int)), None))
    return tuple(i for i in features if i is not None) if features[0] is not None else ()


def named_class(processor: Any) -> str:
    """The name of a processor's class in transformers."""
    return next(one.__name__ for one in type(processor).__mro__ if one.__name__.endswith("Processor"))


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
