"""The training step and what surrounds it: objective, optimizer, guards, loop."""
