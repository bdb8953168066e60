"""Settings files of other trainers, read as settings of this one."""
