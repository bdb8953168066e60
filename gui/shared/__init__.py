"""The parts that several pages have: their templates and scripts, and what those ask."""
