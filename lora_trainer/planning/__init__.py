"""The planner: every `auto` becomes a value with a reason, from predicted memory and time; no torch."""
