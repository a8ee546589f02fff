"""Public data sets: what there is, under which licence, and how it gets onto this disk. Nothing is fetched unasked."""
