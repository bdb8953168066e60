"""The planner: what a run will take, in bytes and seconds, and what every `auto` becomes; without torch."""
