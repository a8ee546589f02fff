"""From the folder a user has to cases: files, formats, layouts, labels, splits. No torch."""
