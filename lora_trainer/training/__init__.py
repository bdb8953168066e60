"""The training step and loop: batches, timesteps, loss, optimizers, guards."""
