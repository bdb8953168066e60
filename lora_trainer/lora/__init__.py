"""The trained parts: adapter layers, how they are put into networks, their dropout, norms and new tokens."""
