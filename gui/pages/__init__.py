"""One module per page: which widgets it has, and what they call."""
