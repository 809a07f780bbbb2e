"""One node's front up to the end of the meeting: `python -m tests.jobs.runs.standins.meeting_node
SCRIPT-JSON`, as tests start it.

It prints one JSON line for each thing that it shows, and at the end `done` or `error` with exit
code and verdict.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.guard.agree.making import node
from unisono.base.causes import Evidence, Verdict
from unisono.base.errors import DataError, Disagreed, UnisonoError
from unisono.base.messages import Show
from unisono.guard.agree.reports import Interface, NodeReport
from unisono.guard.places.ranks import DeviceChoice
from unisono.guard.places.topology import Topology
from unisono.guard.rendezvous.head_address import refusals_reported
from unisono.guard.rendezvous.meeting_sides import hold_meeting, join_meeting
from unisono.guard.rendezvous.party import ChannelFacts, Party
from unisono.guard.supervise.interrupts import Interrupts, Stopped
from unisono.guard.supervise.node_messages import JobEnded


def notify(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, "at": time.monotonic(), **fields}), flush=True)


def main(script: dict[str, Any]) -> int:
    topology = Topology(
        nodes=script["nodes"], node_rank=script["rank"], head_host=script["head"], head_port=script["port"], nproc=2,
        nproc_declared=True, nproc_origin="--nproc",
    )  # fmt: skip
    party = Party(
        topology=topology, token=script["token"].encode(), host=script["host"], join_timeout_s=script.get("join_timeout", 60.0),
        show=lambda message: notify("shown", message=message),
    )  # fmt: skip
    with Interrupts():
        try:
            with refusals_reported(party):
                if "refuses" in script:
                    raise DataError.of(script["refuses"], where="c.yaml:4", fix="did you mean it?")
            meet(party, script)
        except UnisonoError as error:
            verdict = error.verdict.to_json() if error.verdict else None
            notify("error", exit_code=error.exit_code, verdict=verdict, lines=error.lines())
            return error.exit_code
        except Stopped as stopped:
            notify("stopped", signal=stopped.number.name, where=stopped.where)
            return 130
    notify("done")
    return 0


def meet(party: Party, script: dict[str, Any]) -> None:
    def make(channel: ChannelFacts, show: Show) -> NodeReport:
        show({"kind": "phase", "phase": "digests", "text": "looking"})
        wait_for = script.get("reports_after")
        while wait_for and not Path(wait_for).exists():
            time.sleep(0.02)
        if "report_fails" in script:
            raise DataError.of(script["report_fails"], where="here")
        return report(party, channel, script)

    if party.topology.node_rank == 0:
        with hold_meeting(party, make, welcome={"nonce_file": "x"}) as meeting:
            notify(
                "met",
                checks=[check.to_json() for check in meeting.agreement.checks],
                nodes=len(meeting.reports),
            )
            if "head_raises" in script:
                raise DataError.of(script["head_raises"])
            meeting.broadcast({"kind": "prepare"})
            printed = meeting.gather("prepared", timeout_s=30)
            notify("gathered", of=sorted(printed))
            meeting.end(JobEnded(exit_code=0, result={"step": 1}))
        return
    with join_meeting(party, make) as member_side:
        notify("met", welcome=member_side.welcome)
        member_side.wait_for("prepare")
        if "node_raises" in script:
            verdict = Verdict(
                cause="plan_mismatch", when="before", summary=script["node_raises"],
                evidence=(Evidence(where="here", text="seen"),), fix=("mend it",),
            )  # fmt: skip
            raise Disagreed.of(verdict.summary, verdict=verdict)
        member_side.send({"kind": "prepared", "digest": "x"})
        last = member_side.wait_for("ended")
        notify("last", result=last["result"])


def report(party: Party, channel: ChannelFacts, script: dict[str, Any]) -> NodeReport:
    lo = Interface(
        name="lo",
        addresses=["127.0.0.1", channel.address],
        mtu=65536,
        up=True,
        loopback=True,
        kind="loopback",
    )
    place = DeviceChoice(kind="cpu", name="A CPU", memory_bytes=10**9, bfloat16=False)
    values = {
        "address": channel.address, "nodes": party.topology.nodes, "interfaces": [lo], "places": [place] * 2,
        "clock_offset_s": channel.clock_offset_s, "probe_ports": channel.probe_ports, "pid": os.getpid(), "variables": {},
        "nproc_declared": True, "head_addresses": [channel.address], "host_addresses": [channel.address],
        **script.get("report", {}),
    }  # fmt: skip
    return node(party.topology.node_rank, party.host, **values)


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    notify("threads", names=[thread.name for thread in threading.enumerate()])
    sys.exit(code)
