"""The mesh of the ranks: every rank has one place on it, and no other module knows a strategy by name.

Run: pytest tests/plan/test_mesh.py
"""

import ast
from collections import Counter
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono
from unisono.trainer.plan.mesh import Axis, Mesh, Strategy, meshes_of, needs_several_ranks

SOURCE = Path(unisono.__file__).parent
ANY = st.builds(Mesh.of, st.sampled_from(get_args(Strategy)), st.integers(1, 64))
GRIDS = st.builds(
    lambda sizes: Mesh(cast("Any", dict(zip("abc", sizes, strict=False)))),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
"""Meshes of several axes, whose names mean nothing yet."""


@given(mesh=GRIDS)
def test_every_rank_has_coordinates_that_no_other_has(mesh: Mesh) -> None:
    points = [tuple(mesh.coordinates(rank).items()) for rank in range(mesh.world_size)]
    assert len(set(points)) == mesh.world_size
    assert all(0 <= at < mesh.axes[axis] for point in points for axis, at in point)


@given(mesh=GRIDS)
def test_the_last_axis_changes_fastest(mesh: Mesh) -> None:
    points = [[mesh.coordinates(rank)[axis] for axis in mesh.axes] for rank in range(mesh.world_size)]
    assert points == sorted(points)


@given(mesh=GRIDS)
def test_the_ranks_along_an_axis_are_a_partition_by_the_other_coordinates(mesh: Mesh) -> None:
    for axis, size in mesh.axes.items():
        groups = mesh.ranks_of(axis)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(mesh.world_size))
        for ranks in groups:
            points = [mesh.coordinates(rank) for rank in ranks]
            assert [point[axis] for point in points] == list(range(size))
            assert all(point | {axis: 0} == points[0] for point in points)


@given(mesh=ANY)
def test_every_share_of_a_batch_has_one_rank(mesh: Mesh) -> None:
    assert [mesh.dp_rank(rank) for rank in range(mesh.world_size)] == list(range(mesh.dp_size))


@given(mesh=ANY)
def test_every_rank_holds_one_part_of_the_state_and_one_rank_writes_each(mesh: Mesh) -> None:
    assert sorted(rank for ranks in mesh.holders for rank in ranks) == list(range(mesh.world_size))
    pairs = zip(mesh.checkpoint_writers, mesh.holders, strict=True)
    assert all(writer in ranks for writer, ranks in pairs)
    assert mesh.weight_shards == (mesh.world_size if mesh.shards_weights else 1)
    assert mesh.checkpoint_writers[0] == 0


@given(strategy=st.sampled_from(get_args(Strategy)), ranks=st.integers(2, 64))
def test_a_name_of_several_ranks_leads_back_to_the_mesh(strategy: Strategy, ranks: int) -> None:
    mesh = Mesh.of(strategy, ranks)
    assert Mesh.of(mesh.strategy, ranks) == mesh


@pytest.mark.parametrize(
    ("mesh", "gradients", "norms", "replicas", "together"),
    [
        (Mesh.of("single", 1), (), (), False, False),
        (Mesh.of("ddp", 4), ("dp",), (), True, False),
        (Mesh.of("fsdp", 4), ("dp",), ("dp",), False, True),
    ],
)
def test_what_each_mesh_sums_and_compares(
    mesh: Mesh, gradients: tuple[Axis, ...], norms: tuple[Axis, ...], *, replicas: bool, together: bool
) -> None:
    assert (mesh.gradient_axes, mesh.norm_axes) == (gradients, norms)
    assert (mesh.has_replicas, mesh.forwards_together) == (replicas, together)


@pytest.mark.parametrize(
    ("requested", "one", "four"),
    [
        ("auto", ["single"], ["ddp", "fsdp"]),
        ("single", ["single"], []),
        ("ddp", ["single"], ["ddp"]),
        ("fsdp", ["single"], ["fsdp"]),
    ],
)
def test_a_config_allows_meshes_by_the_number_of_ranks(
    requested: str, one: list[str], four: list[str]
) -> None:
    assert [mesh.strategy for mesh in meshes_of(requested, 1)] == one
    assert [mesh.strategy for mesh in meshes_of(requested, 4)] == four
    assert needs_several_ranks(requested) == (requested in ("ddp", "fsdp"))


def test_strategies_are_compared_by_name_in_one_module() -> None:
    comparisons = Counter(
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if _compared(node) & set(get_args(Strategy))
    )
    assert comparisons.pop("trainer/plan/mesh.py") > 0, "the search finds them"
    levels = {"front/checks/device_checks.py": 1, "front/checks/device_selection.py": 1}  # of PCIe bridges
    assert comparisons == levels | {"trainer/config/schema.py": 1, "trainer/readers/trl/command.py": 1}, (
        "the config says what fsdp cannot do; ask plan.mesh"
    )


def _compared(node: ast.AST) -> set[object]:
    """The constants that a comparison, a dict's keys or a case name."""
    match node:
        case ast.Compare(left=left, comparators=others):
            looked_at = [left, *others]
        case ast.Dict(keys=keys):
            looked_at = [key for key in keys if key is not None]
        case ast.MatchValue(value=value):
            looked_at = [value]
        case _:
            return set()
    return {part.value for side in looked_at for part in ast.walk(side) if isinstance(part, ast.Constant)}
