"""How the fronts of several nodes come together before there is a plan: they call the head, report, compare, and try the network."""
