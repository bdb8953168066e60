"""What this machine has, found without importing torch; the calls of torch that differ by device."""
