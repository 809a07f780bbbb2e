"""While modules are imported Python's collector rests; afterwards it works, and leaves alone what
they made.
"""

import gc
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.base.child import Names, kept_names, loading_modules


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_rests_and_works_again() -> None:
    with loading_modules():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), loading_modules():
        import no_such_module  # type: ignore[import-not-found] # noqa: F401
    assert gc.isenabled()


def test_what_came_before_is_not_looked_at_and_new_garbage_is_found() -> None:
    gc.unfreeze()
    with loading_modules():
        kept: list[list[int]] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= len(kept)

    class Ring:
        """Refers to itself."""

    ring = Ring()
    ring.me = ring  # type: ignore[attr-defined]
    del ring
    assert gc.collect() > 0


def test_a_rank_and_a_task_collect_nothing_while_they_load() -> None:
    """Seen in a process of its own: no collection begins within the imports of a task that brings
    torch.
    """
    program = (
        "import gc\n"
        "seen = []\n"
        "from unisono.base.child import loading_modules\n"
        "gc.callbacks.append(lambda moment, facts: seen.append(moment))\n"
        "with loading_modules():\n"
        "    import unisono.trainer.task.evaluate\n"
        "print(len(seen))"
    )
    reported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert reported.stdout.strip() == "0"


@pytest.mark.parametrize("start", ["first", "later"])
def test_transformers_reads_its_models_once_and_finds_in_them_what_it_does_alone(
    start: str, tmp_path: Path
) -> None:
    """A table of names that lacks one would make a model unknown."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from unisono.base.child import loading_modules\n"
        "with loading_modules(Path(sys.argv[1])), loading_modules():\n"
        "    import transformers\n"
        "    from transformers.utils import import_utils as utils\n"
        "    before = utils.create_import_structure_from_path.cache_info().misses\n"
        "    import transformers.models as models\n"
        "print(before > 100, utils.create_import_structure_from_path.cache_info().misses - before)\n"
        "print(not any('unisono' in type(f).__module__ for f in sys.meta_path))\n"
        "scan = utils.define_import_structure\n"
        "alone = utils._LazyModule('transformers.models', models.__file__, scan(models.__file__), models.__spec__)\n"
        "print(alone._class_to_module == models._class_to_module, alone._modules == models._modules)\n"
        "print(sorted(dir(alone)) == sorted(dir(models)), len(alone._class_to_module) > 1000)\n"
        "names = {f'models.{module}' for module in alone._class_to_module.values()}\n"
        "print(names <= set(transformers._class_to_module.values()), scan.__module__)\n"
        "from transformers import LlamaConfig, TrainerControl\n"  # one of the models, one of its other modules
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    if start == "later":
        subprocess.run(command, capture_output=True, check=True)
    reported = subprocess.run(command, capture_output=True, text=True, check=True)
    whole = ["True", "0", "True", "True", "True", "True", "True", "True", "transformers.utils.import_utils"]
    if start == "later":
        whole[0] = "False"  # nothing was read
    assert reported.stdout.split() == whole


FOUND: Names = {
    frozenset(): {"a.configuration_a": {"AConfig"}},
    frozenset({"torch"}): {"a.modeling_a": {"A", "B"}},
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder of models with a file two levels deep."""
    folder = tmp_path / "models"
    (folder / "a" / "parts").mkdir(parents=True)
    for path in (folder / "__init__.py", folder / "a" / "modeling_a.py", folder / "a" / "parts" / "part.py"):
        path.write_text("__all__ = []\n")
    return folder


def _no_scan() -> Names:
    raise AssertionError("read though nothing has changed")


def test_names_are_kept_until_a_file_changes(models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert kept_names(models, lambda: FOUND, cache) == FOUND
    assert kept_names(models, _no_scan, cache) == FOUND
    (models / "a" / "parts" / "part.py").write_text("__all__ = ['Part']\n")
    other: Names = {frozenset(): {"a.parts.part": {"Part"}}}
    assert kept_names(models, lambda: other, cache) == other
    assert kept_names(models, _no_scan, cache) == other
    (models / "a" / "modeling_a.py").unlink()
    assert kept_names(models, dict, cache) == {}
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b'{"files": 3}', b"\xff"])
def test_a_damaged_table_of_names_is_read_again(models: Path, tmp_path: Path, damage: bytes) -> None:
    cache = tmp_path / "cache"
    kept_names(models, lambda: FOUND, cache)
    (file,) = cache.iterdir()
    file.write_bytes(damage)
    assert kept_names(models, lambda: FOUND, cache) == FOUND
    assert kept_names(models, _no_scan, cache) == FOUND


def test_a_cache_that_cannot_be_written_costs_only_its_time(models: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert kept_names(models, lambda: FOUND, tmp_path / "cache") == FOUND


def test_places_of_calls_have_no_source_unless_it_is_wanted() -> None:
    frame = inspect.currentframe()
    assert frame is not None
    with loading_modules():
        place, whole = inspect.getframeinfo(frame), inspect.getframeinfo(frame, context=1)
    assert (place.filename, place.code_context) == (__file__, None)
    assert whole.code_context is not None
    assert inspect.getframeinfo(frame).code_context is not None
