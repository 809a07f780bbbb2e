"""What the hooks use of torch's and others' private names: each fails here when it changes.

Run: pytest tests/guard/programs/inside/test_private.py

docs/explanation/run.md has the table.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    TensorDataset,
    dataloader,
    random_split,
)

from unisono.base.torch_internals import gloo_states, let_gloo_finish, recorders
from unisono.guard.integrations.inside.guarded_process import begun_of, pending_of
from unisono.guard.integrations.inside.loaders import digest_of, sharded_rows_of
from unisono.guard.integrations.inside.path.sitecustomize import HOOKS
from unisono.guard.integrations.inside.process_groups import _NAMES, _forgetting, with_own_names

_RECORDING = """
import json, os, time, torch, torch.distributed as dist
from unisono.guard.integrations.inside.guarded_process import begun_of, count_begun, dump_of_interest, pending_of
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2))
dist.barrier()
until = time.monotonic() + 60
while pending_of(whole := json.loads(dump_of_interest())) and time.monotonic() < until:
    time.sleep(0.01)  # gloo retires a collective after it has woken us
print(json.dumps([count_begun(), pending_of(whole), len(whole["entries"]), begun_of(whole)]), flush=True)
os._exit(0)  # else gloo's thread may abort it (pytorch#190489)
"""


def test_hooked_modules_are_loaded_by_importing_torch_or_its_launcher() -> None:
    assert {name for name in HOOKS if name not in sys.modules} <= {dynamic_rendezvous.__name__}
    source = inspect.getsource(sys.modules["torch.distributed.elastic.rendezvous.registry"])
    assert dynamic_rendezvous.__name__.rpartition(".")[2] in source


def test_hooked_collectives_exist_and_no_public_one_is_forgotten() -> None:
    hooked = {name for names in _NAMES.values() for name in names}
    missing = {name for name in hooked if not hasattr(c10d, name)}
    assert missing <= {
        "_all_gather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "reduce_scatter_single",
        "split_group",
    }
    waits = {
        name for name in c10d.__all__
        if name != "reduce_op" and inspect.isfunction(function := getattr(c10d, name)) and {"group", "async_op"} <= set(inspect.signature(function).parameters)
    }  # fmt: skip
    assert waits <= hooked, "torch has got a new collective"


def test_the_recorder_reports_what_is_begun_and_which_of_it_is_done() -> None:
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "200", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", _RECORDING], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [4, 0, 4, 4]


def test_a_recorder_is_found_as_soon_as_torch_is_loaded() -> None:
    dumps = recorders()
    assert dumps
    for dump in dumps:
        short = json.loads(dump(includeCollectives=False))
        assert begun_of(short) >= 0
        assert "entries" not in short
    assert pending_of({"entries": [{"retired": False}, {"retired": True}]}) == 1


def ports_of_two_starts(kind: type[DynamicRendezvousHandler]) -> list[int | None]:
    """Of the stores that a launcher of one node gives to the ranks of its first start and of its
    second.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handler = kind.from_backend(
        "starts", store, C10dRendezvousBackend(store, "starts"), 1, 1, local_addr="127.0.0.1"
    )
    try:
        found = [handler.next_rendezvous().bootstrap_store_info for _ in range(2)]
    finally:
        handler.shutdown()
    return [info.master_port if info else None for info in found]


class Forgetting(DynamicRendezvousHandler):
    next_rendezvous = _forgetting(DynamicRendezvousHandler.next_rendezvous)


def test_ranks_that_are_started_again_get_a_different_store() -> None:
    one, other = ports_of_two_starts(Forgetting)
    assert one != other


def test_torch_gives_restarted_ranks_the_store_of_those_before() -> None:
    """If it does not any more, `inside/starts.py` can go for that torch: pytorch/pytorch#135712."""
    one, other = ports_of_two_starts(DynamicRendezvousHandler)
    assert one == other


@pytest.mark.parametrize(("nodes", "launchers", "found"), [("1", "elsewhere", [False] * 3), ("2", "elsewhere", [False, True, True]), ("2", "there", [False] * 3)])  # fmt: skip
def test_each_start_has_names_of_its_own_in_one_store_if_all_count_alike(
    nodes: str, launchers: str, found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    if launchers == "there":
        dist.PrefixStore("none", store).set("torchelastic/assigned_ranks/0", "")
    meet = with_own_names(lambda *_, **__: iter([(store, 0, 2)]), c10d)
    seen = []
    reported = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": nodes, "GROUP_RANK": "0"}  # fmt: skip
    for start in range(3):
        for name, value in {**reported, "TORCHELASTIC_RESTART_COUNT": str(start)}.items():
            monkeypatch.setenv(name, value)
        ((of_ranks, rank, world_size),) = meet("env://")
        assert (rank, world_size) == (0, 2)
        seen.append(of_ranks.check(["address"]))
        of_ranks.set("address", "here")
    assert seen == found


def test_init_meets_by_the_name_that_is_hooked() -> None:
    original = inspect.unwrap(dist.init_process_group)
    assert "rendezvous" in original.__code__.co_names
    assert c10d.PrefixStore is dist.PrefixStore


def test_init_and_destroy_have_the_parameters_that_are_given_and_read() -> None:
    wanted = {"backend", "init_method", "world_size", "rank", "store", "device_id"}
    assert wanted <= set(inspect.signature(dist.init_process_group).parameters)
    assert list(inspect.signature(dist.destroy_process_group).parameters) == ["group"]
    assert dist.HashStore is not None


def test_torch_refuses_to_give_the_backend_of_a_destroyed_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        assert dist.get_backend(group) == "gloo"
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="not initialized"):
            dist.get_backend(group)
    finally:
        dist.destroy_process_group()
    assert c10d.GroupMember.NON_GROUP_MEMBER is not None


def test_gloo_threads_are_known_by_name_and_sleep_when_they_are_done() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1000))
        assert let_gloo_finish()
        assert set(gloo_states()) == {"S"}
    finally:
        dist.destroy_process_group()


def test_every_loader_of_torch_reads_through_one_iterator() -> None:
    rows = TensorDataset(torch.ones(4))
    reading = iter(DataLoader(rows))
    assert isinstance(reading, dataloader._BaseDataLoaderIter)
    assert reading._dataset is rows, "it knows whose batches it gives"
    assert "__next__" in vars(dataloader._BaseDataLoaderIter)


def test_optimizers_report_their_steps_by_a_hook_for_all_of_them() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    heard: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *words: heard.append(words[0]))
    optimizer = torch.optim.SGD([weight])
    optimizer.step()
    handle.remove()
    assert heard == [optimizer]


def split_twice(data: object, *, seeds: tuple[int, int]) -> list[str | None]:
    return [
        digest_of(random_split(data, [6, 2], generator=torch.Generator().manual_seed(seed))[0])
        for seed in seeds
    ]


def test_different_splits_have_different_digests_and_equal_ones_the_same() -> None:
    rows = TensorDataset(torch.arange(8.0))
    one, other = split_twice(rows, seeds=(0, 1))
    assert one != other
    one, other = split_twice(ConcatDataset([rows]), seeds=(3, 3))
    assert one == other


def test_a_split_of_the_library_datasets_is_distinguished_by_its_indices(tmp_path: Path) -> None:
    del tmp_path
    table = datasets.Dataset.from_dict({"x": list(range(50))})
    digests = [digest_of(table.train_test_split(0.2, seed=seed)["train"]) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] is not None


@pytest.mark.parametrize("seed", [0, 5])
def test_a_sampler_that_deals_rows_out_is_reported_with_its_part(seed: int) -> None:
    rows = TensorDataset(torch.arange(10.0))
    dealt = [
        sharded_rows_of(
            DataLoader(
                rows, batch_size=2, sampler=DistributedSampler(rows, num_replicas=2, rank=rank, seed=seed)
            )
        )
        for rank in (0, 1)
    ]
    assert dealt[0] is not None
    assert dealt[1] is not None
    assert dealt[0].facts == dealt[1].facts
    assert (
        dealt[0].replicas,
        dealt[0].facts["rows"],
        dealt[0].facts["batches"],
        dealt[0].facts["sampler_seed"],
    ) == (2, 10, 3, seed)
    assert sharded_rows_of(DataLoader(rows)) is None


def test_the_sampler_of_accelerate_is_reported_too() -> None:
    from accelerate.data_loader import prepare_data_loader

    rows = TensorDataset(torch.arange(10.0))
    loader = prepare_data_loader(
        DataLoader(rows, batch_size=2), num_processes=2, process_index=1, put_on_device=False
    )
    dealt = sharded_rows_of(loader)
    assert dealt is not None
    assert (dealt.replicas, dealt.details["part"], dealt.facts["rows"]) == (2, 1, 10)
