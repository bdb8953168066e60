"""Loading and changing networks: base models, adapters, attention kernels."""
