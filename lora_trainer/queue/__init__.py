"""The training queue: items as files, one worker a device."""
