"""What Ray says of its cluster."""

from unisono.diagnose.finding import Finding
from unisono.diagnose.rules.view import View, first_of_each


def find_ray_resources(view: View) -> list[Finding]:
    """More was asked for than there is, and the workers never started."""
    said = view.facts.pointing_to("ray_resources_unsatisfiable")
    if not said:
        return []
    last = said[-1]
    started = [event for event in view.facts.of("ray_member", "ray_rank", "ray_started", "bar", "step", "log_row") if event.source == last.source and event.order > last.order]  # fmt: skip
    if started:
        return []
    asked = view.facts.of("ray_asked")
    return [Finding("ray_resources_unsatisfiable", "the cluster does not have the resources that were asked for", (*first_of_each(said), *asked[:1]), confidence=0.9)]  # fmt: skip
