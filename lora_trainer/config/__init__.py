"""Every setting: declared once, layered with origins, built into one typed value."""
