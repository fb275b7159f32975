"""Training: loop, optimizer, schedule, checkpoint, and the record of a run."""
