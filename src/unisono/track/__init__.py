"""How a run's figures are shown to people: the curve, and the trackers of other projects."""
