"""Methods of federated segmentation: formulas, at a site and at the server.

`base` says what a method is, `protocol` what its two halves may know of each other, `registry` finds methods by name.
`presets` is a table of those that only combine pieces; every other file next to it, and every package with a `method`,
is a method. `shared` has pieces of several methods, `about` tells people and policies about any of them.
"""
