"""What a network costs, traced on meta tensors and kept in a table."""
