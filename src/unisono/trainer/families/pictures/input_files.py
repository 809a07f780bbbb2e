"""The files of an image model and its pictures, found without torch."""

from pathlib import Path

from unisono.base.errors import UnisonoError
from unisono.guard.facts import read_environment
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data.tokenizer import TOKENIZER_FILES
from unisono.trainer.families.family import InputFiles, labelled_sources, present
from unisono.trainer.families.pictures.picture_folders import list_files
from unisono.trainer.families.pictures.pipeline_files import all_files, locate_pipeline
from unisono.trainer.families.pictures.single_file import open_files, single_file, tokenizer_of_file

_MOST_PICTURES = 2_000  # of a folder, in a report that goes to the head


def list_inputs(config: RunConfig) -> InputFiles:
    """Pictures with their captions, and the files of the pipeline."""
    listed = InputFiles()
    folders = [(label, named) for label, _, named in labelled_sources(config)]
    if config.diffusion.prior is not None:
        folders.append(("prior", config.diffusion.prior))
    for label, named in folders:
        root = Path(named).expanduser()
        try:
            files = [path for path, _, _ in list_files(root) if path.is_file()]
        except UnisonoError as error:
            listed.notes.append(error.problems[0].what)
            continue
        listed.data += [
            (f"{label}: {path.relative_to(root).as_posix()}", path) for path in files[:_MOST_PICTURES]
        ]
        if len(files) > _MOST_PICTURES:
            listed.notes.append(
                f"{named} has {len(files)} files: the first {_MOST_PICTURES} are compared by name, all of"
                " them after they are prepared"
            )
    try:
        file = single_file(config)
        if file is not None:
            listed.model, listed.weights = [("model file", file)], [file]
            listed.tokenizer = present(tokenizer_of_file(config.model.tokenizer), TOKENIZER_FILES)
            return listed
        pipeline = locate_pipeline(config)
        listed.model = all_files(pipeline)
        listed.weights = pipeline.weights("unet")
    except UnisonoError as error:
        listed.notes.append(error.problems[0].what)
    return listed


def find_base(config: RunConfig) -> Path:
    """The directory of the pipeline; a model in one file is converted."""
    return open_files(config, cache_dir=read_environment().cache_dir)[0].root


def check_adapter(directory: Path) -> None:
    """Does nothing: a LoRA file is read with errors of its own."""
    del directory
