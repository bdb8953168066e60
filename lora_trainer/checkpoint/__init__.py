"""Resume states that survive a kill at any instant."""
