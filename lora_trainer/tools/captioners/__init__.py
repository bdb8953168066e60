"""The kinds of model that describe pictures; `tools.captioning` puts them to work."""
