"""Training from one call: runs with a folder, checkpoints, evaluation and a display."""
