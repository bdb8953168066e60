"""What the commands print: finished results as text for people and as plain values for scripts."""
