"""The catalogue of causes is complete, consistent and legal.

Run: pytest tests/causes
"""

import math
import re

import pytest

from unisono.base.causes import CATALOGUE, find_cause
from unisono.base.causes.entries import Entry, all_entries
from unisono.base.causes.signatures import find_signature
from unisono.base.causes.variables import GROUP_MEANING, VARIABLES, find_variable
from unisono.base.causes.verdict import Cause

# Codes that a cause can end a run with; 1 is a defect, 130 the keyboard, and neither is a cause.
LEGAL_CODES = {0, 2, 3, 4, 5, 6, 7, 75}

_BEFORE = """
nproc_mismatch config_mismatch data_mismatch split_mismatch tokenizer_files_mismatch weights_mismatch code_mismatch
version_mismatch env_mismatch device_mismatch duplicate_gpu plan_mismatch resume_mismatch node_missing node_duplicate
stale_process head_unreachable token_rejected address_unreachable mtu_blackhole hostname_loopback storage_not_shared
storage_unfit port_in_use clock_skew
"""

_DURING = """
rank_killed host_oom_killed cuda_oom user_code_error rank_stopped gil_held user_code_stuck io_blocked data_starved
unequal_steps collective_mismatch node_unreachable straggler replicas_diverged nan_loss world_mismatch
preempted_sigterm teardown_crash
"""

_AFTER = """
nproc_mismatch invalid_device_ordinal duplicate_gpu single_device_nccl device_unbound_barrier port_in_use rdzv_timeout
dns_failure hostname_loopback nccl_socket_iface ib_unreachable p2p_blocked shm_too_small ulimit user_code_error
rank_died_first rank_stalled unequal_steps collective_mismatch unused_parameters_ddp process_group_destroyed_twice
teardown_crash nan_loss tokenizer_mismatch cuda_oom host_oom_killed disk_full gpu_fell_off ecc_error driver_too_old
cuda_arch_unsupported no_cuda_build preempted_sigterm ray_worker_died ray_resources_unsatisfiable checkpoint_not_shared
corrupt_checkpoint checkpoint_mismatch dataset_cache_race version_mismatch missing_dependency flash_attn_missing
bnb_no_gpu hub_unreachable gated_model model_path_missing healthy undetermined
"""

every_cause = pytest.mark.parametrize("cause", CATALOGUE.values(), ids=lambda cause: cause.id)


@pytest.mark.parametrize("entry", all_entries(), ids=lambda entry: entry.cause.id)
def test_lines_that_are_seen_with_a_cause_exist_and_are_not_its_signatures(entry: Entry) -> None:
    assert all(find_signature(name) for name in entry.seen_with)
    assert not set(entry.seen_with) & {signature.id for signature in entry.signatures}


def test_every_cause_has_a_position_of_its_own() -> None:
    assert len({entry.order for entry in all_entries()}) == len(CATALOGUE)
    stated = [
        entry.judgement.specificity for entry in all_entries() if entry.judgement.specificity < math.inf
    ]
    assert len(set(stated)) == len(stated)


@pytest.mark.parametrize(("moment", "words"), [("before", _BEFORE), ("during", _DURING), ("after", _AFTER)])
def test_every_id_that_was_promised_is_there_and_found_at_its_moment(moment: str, words: str) -> None:
    ids = words.split()
    assert [id_ for id_ in ids if id_ not in CATALOGUE] == []
    assert [id_ for id_ in ids if moment not in CATALOGUE[id_].when] == []


def test_first_edition_has_46_causes_and_two_answers_that_blame_nobody() -> None:
    assert len(_AFTER.split()) == len(set(_AFTER.split())) == 46 + 2


@every_cause
def test_an_entry_reports_everything(cause: Cause) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", cause.id)
    assert cause.title
    assert not cause.title.endswith(".")
    assert cause.meaning.endswith(".")
    assert cause.telltales
    assert cause.remedy
    assert all(text.strip() == text != "" for text in (*cause.telltales, *cause.remedy))
    assert cause.when


@every_cause
def test_an_entry_is_distinguished_from_neighbours_that_exist(cause: Cause) -> None:
    names = [name for name, _ in cause.neighbours]
    assert names
    assert set(names) <= CATALOGUE.keys() - {cause.id}
    assert len(names) == len(set(names))
    assert all(difference for _, difference in cause.neighbours)


def test_every_exit_code_is_one_that_a_run_can_end_with() -> None:
    assert {cause.exit_code for cause in CATALOGUE.values()} == LEGAL_CODES


def test_exit_codes_are_those_of_the_design() -> None:
    """Disagreement 3, ended by a verdict 4, died 5, machine 6, damage 7, preempted 75, finished
    0.
    """
    codes = {
        "config_mismatch": 3, "node_missing": 3, "nan_loss": 4, "rank_stalled": 4, "unequal_steps": 4,
        "collective_mismatch": 4, "node_unreachable": 4, "rank_killed": 5, "cuda_oom": 5, "user_code_error": 5,
        "disk_full": 6, "ecc_error": 6, "corrupt_checkpoint": 7, "preempted_sigterm": 75, "healthy": 0,
    }  # fmt: skip
    assert {id_: CATALOGUE[id_].exit_code for id_ in codes} == codes


def test_texts_are_one_line_each() -> None:
    for cause in CATALOGUE.values():
        pieces = [
            cause.title,
            cause.meaning,
            *cause.telltales,
            *cause.remedy,
            *(d for _, d in cause.neighbours),
        ]
        assert not any("\n" in piece for piece in pieces), cause.id


def test_an_unknown_id_finds_nothing() -> None:
    assert find_cause("bad_luck") is None


def test_variables_are_unique_and_found_in_any_case() -> None:
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)
    assert find_variable("nccl_debug") is find_variable("NCCL_DEBUG") is not None


def test_a_variable_reports_everything_and_leads_to_causes_that_exist() -> None:
    for variable in VARIABLES:
        assert variable.meaning, variable.name
        assert variable.group in GROUP_MEANING, variable.name
        assert set(variable.causes) <= CATALOGUE.keys(), variable.name


def test_what_ranks_must_agree_on_reports_it() -> None:
    groups = {
        "NCCL_ALGO": "equal", "TORCH_DISTRIBUTED_DEBUG": "equal", "MASTER_ADDR": "equal", "RANK": "unique",
        "CUDA_VISIBLE_DEVICES": "per-node", "GLOO_SOCKET_IFNAME": "per-node", "OMP_NUM_THREADS": "per-node",
        "NCCL_DEBUG": "free",
    }  # fmt: skip
    found = {name: find_variable(name) for name in groups}
    assert {name: variable.group if variable else None for name, variable in found.items()} == groups
