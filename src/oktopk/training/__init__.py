"""The loop, checkpoints and the run directory. It knows workloads and the reducer by their protocols only."""
