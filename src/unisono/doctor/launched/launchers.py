"""Who starts the look on the nodes: a person or ssh, as without `--launcher`; or Ray, or Slurm."""

from unisono.cluster.launchers import refuse_contradictions
from unisono.doctor.asked import DoctorRequest
from unisono.doctor.examining import Examination, examine, veiled
from unisono.errors import UsageError


def examine_where_asked(request: DoctorRequest) -> Examination:
    """The look, through the launcher that was asked for.

    Raises:
        UnisonoError: as `examine`; or if an option is another launcher's, or its cluster cannot give the nodes.
    """
    refuse_contradictions(request.training)
    if request.debug_comm and not request.ladder:
        raise UsageError.of(
            "--debug-comm keeps what the libraries say in the collectives of --ladder", where="command line",
            why="doctor without --ladder has nothing more to say of a collective than its outcome",
            fix=f"unisono doctor --ladder --debug-comm{'' if request.nproc is None else f' --nproc {request.nproc}'}, with the other options as they are",
        )  # fmt: skip
    if request.launcher == "slurm":
        from unisono.doctor.launched.slurm import examine_on_slurm

        return _safe(examine_on_slurm(request))
    if request.launcher == "ray":
        from unisono.doctor.launched.ray import examine_on_ray

        return _safe(examine_on_ray(request))
    return examine(request)


def _safe(examination: Examination) -> Examination:
    """What came from another process is pasted into issues like our own words."""
    return Examination(examination.host, veiled(examination.findings), agreed=examination.agreed)
