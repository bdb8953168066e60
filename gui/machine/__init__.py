"""The page Machine: what this machine has, what is missing, where things lie, and the cache."""
