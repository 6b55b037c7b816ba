"""Generated programs against plain PyTorch: models, losses, optimizers, modes, policies, and what a person does between
calls. Whatever a program does, it gives plain PyTorch's numbers, or an error by name: never other numbers in silence.

    python -m tests.fuzz --count 2000            as many programs, from --start on; prints what differs, and its seed
    python -m tests.fuzz --seed 17               one program, and what it is made of
    python -m tests.fuzz --stacks --count 1000   stacks of equal blocks that hold objects, changed between steps
    python -m tests.fuzz --loops --count 300     loops of `fully_shard` on two ranks, of sixty kinds of steps

A `Case` is made of its seed alone. It is run twice, call by call: by `Plain`, the loop that everybody writes, and by
`Ours`. Both are built from the same seed, and draw from PyTorch's generator at the same place. After each call results
and the generator are compared; at the end weights, buffers and the optimizer's rates. A case that fails is made
smaller, one thing at a time, while it still fails.
"""
