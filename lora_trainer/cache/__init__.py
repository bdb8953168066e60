"""From records to encoded entries on disk, keyed by content."""
