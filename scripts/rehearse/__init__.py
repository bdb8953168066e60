"""Rehearsals of the cells of docs/plans.md on a pretended card."""
