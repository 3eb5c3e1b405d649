"""What is done to a pool to see whether it keeps its promises: simulated worlds, planted bugs, chaos, kills."""
