"""Short trainings, watched and measured: bench and profile."""
