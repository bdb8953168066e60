"""The hardware of this machine, found without importing torch; the calls of torch that differ by device."""
