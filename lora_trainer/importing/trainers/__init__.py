"""One module a trainer: its keys, and what becomes of them. Facts from the trainers' own argument lists."""
