"""Products of a few tokens with matrices on a Hopper GPU: what a decode step's projections and experts run."""
