"""How a run goes, without FLARE: rounds, collector of replies, sites, checkpoints, a transport in one process."""
