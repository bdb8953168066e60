"""Commands on finished files: convert, merge, resize and extract adapters, in bounded memory."""
