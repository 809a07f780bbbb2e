"""Who starts the look on the nodes: a person or ssh, as without `--launcher`; or Ray, or Slurm."""

from unisono.doctor.asked import DoctorRequest
from unisono.doctor.examining import Examination, examine, veiled
from unisono.launch.launchers import refuse_contradictions


def examine_where_asked(request: DoctorRequest) -> Examination:
    """The look, through the launcher that was asked for.

    Raises:
        UnisonoError: as `examine`; or if an option is another launcher's, or its cluster cannot give the nodes.
    """
    refuse_contradictions(request.training)
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
