"""Is the uncertainty any good? Metrics, reports, sweeps over the prior precision."""
