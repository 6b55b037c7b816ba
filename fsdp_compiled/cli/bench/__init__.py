"""`fsdp-compiled bench`: the same model and batches under this package and under its rivals, in one run.

    options -> start (the launching process) -> measure (each rank) -> result.json -> summary -> table, plot

`presets` says what is trained, `rivals` by whom, `observe` reads one step's profile, `network` makes gloo as slow
as a real wire.
"""
