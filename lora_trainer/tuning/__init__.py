"""Settings found by trying: trainings of the queue whose settings Optuna proposes, within a budget of hours."""
