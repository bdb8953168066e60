"""The page Queue: trainings in their order, one after another on each card."""
