"""What NCCL's own lines say of the transports that it took.

Run: pytest tests/front/checks/devices/test_nccl_log.py
"""

from unisono.front.checks.ladder import TunedCollective, nccl_rows, read_nccl_log

# In the forms of NCCL 2.18 to 2.27, composed; hosts and addresses are invented.
NVLINK = """\
NCCL version 2.21.5+cuda12.4
ada:812:812 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
ada:812:901 [0] NCCL INFO NET/IB : No device found.
ada:812:901 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
ada:812:901 [0] NCCL INFO Using network Socket
ada:812:901 [0] NCCL INFO comm 0x5581 rank 0 nranks 2 cudaDev 0 nvmlDev 6 busId a8000 commId 0x9 - Init START
ada:813:902 [1] NCCL INFO comm 0x5582 rank 1 nranks 2 cudaDev 1 nvmlDev 7 busId b8000 commId 0x9 - Init START
ada:812:901 [0] NCCL INFO Channel 00/0 : 0[6] -> 1[7] via P2P/CUMEM/read
ada:812:901 [0] NCCL INFO Channel 01/0 : 0[6] -> 1[7] via P2P/CUMEM/read
ada:813:902 [1] NCCL INFO Channel 00/0 : 1[7] -> 0[6] via P2P/CUMEM/read
ada:813:902 [1] NCCL INFO Channel 01/0 : 1[7] -> 0[6] via P2P/CUMEM/read
ada:812:901 [0] NCCL INFO Connected all rings
ada:812:901 [0] NCCL INFO Connected all trees
ada:812:901 [0] NCCL INFO 2 coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer
ada:812:812 [0] NCCL INFO AllReduce: 4194304 Bytes -> Algo 1 proto 2 time 47.0
ada:812:812 [0] NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
"""
OLD = """\
bob:31:40 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.
bob:31:40 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[1c000] via direct shared memory
bob:31:40 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[1c000] via SHM/direct/direct
"""
NETWORK = """\
cyd:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.3<0>
cyd:1:2 [0] NCCL INFO Using network IB
cyd:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
dan:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [receive] via NET/IB/0/GDRDMA
dan:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/Socket/0
dan:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.3 with status=12
some other program's line
"""


def test_pairs_devices_rings_and_algorithms_are_read() -> None:
    log = read_nccl_log(NVLINK.splitlines())
    assert (log.version, log.ranks, log.devices) == ("2.21.5", 2, {0: "6", 1: "7"})
    assert {pair: dict(ways) for pair, ways in log.ways.items()} == {
        (0, 1): {"P2P/CUMEM/read": 2},
        (1, 0): {"P2P/CUMEM/read": 2},
    }
    assert (log.rings, log.trees, log.channels, log.network) == (True, True, 2, "Socket")
    assert log.tuned == (
        TunedCollective("AllReduce", 4194304, "Ring", "Simple"),
        TunedCollective("AllReduce", 8, "Ring", "LL"),
    )


def test_old_forms_and_settings_that_nccl_obeys_are_read() -> None:
    log = read_nccl_log(OLD.splitlines())
    assert log.settings == {"NCCL_P2P_DISABLE": "1"}
    assert (dict(log.ways[0, 1]), log.devices) == ({"SHM/direct/direct": 1}, {0: "1b000", 1: "1c000"})
    assert not log.rings


def test_a_channel_of_which_both_ends_speak_counts_once() -> None:
    log = read_nccl_log(NETWORK.splitlines())
    assert {pair: dict(ways) for pair, ways in log.ways.items()} == {
        (0, 8): {"NET/IB/0/GDRDMA": 1},
        (8, 0): {"NET/Socket/0": 1},
    }
    rows = nccl_rows(log)
    assert "0→8: NET/IB/0/GDRDMA × 1" in rows
    assert any(row.startswith("network: IB; NET/IB [0]mlx5_0:1/IB") for row in rows)
    assert any("rings NOT connected" in row for row in rows)
    assert any("status=12" in row for row in rows)


def test_a_log_of_a_different_program_reports_nothing() -> None:
    assert nccl_rows(read_nccl_log(["epoch 1", "loss 2.0"])) == []
