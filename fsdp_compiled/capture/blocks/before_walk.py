"""What a walk through a block changes beside what it returns: it may change nothing that there was before."""

from __future__ import annotations

import torch

from fsdp_compiled.capture.blocks.block_calls import BlockCall, Unlike
from fsdp_compiled.capture.blocks.changes import NEW
from fsdp_compiled.torch_private.dynamo import TensorVariable


class Before:
    """What there is before a block is walked through. ``nodes``: of the graph."""

    def __init__(self, call: BlockCall) -> None:
        output = call.output
        self.nodes = set(output.graph.nodes)
        self._versions = {
            node: value._version
            for node in output.graph.nodes
            if isinstance(value := node.meta.get("example_value"), torch.Tensor)
        }
        self._counts = _counts(call)
        effects = output.side_effects
        # Of objects that there are, in the trace too: by what says how each may change, which its copies share.
        self._objects = {id(one): one for one in (known.mutation_type for known in effects.id_to_variable.values())}
        self._stored = {one: dict(attributes) for one, attributes in effects.store_attr_mutations.items()}

    def check(self, call: BlockCall) -> None:
        """Raises `Unlike` where the walk through this block changed something of it."""
        if call.changed() != call.changes or self._counts != _counts(call) or self._put_into_objects(call):
            raise Unlike("it changes objects")
        if any(node.meta["example_value"]._version != version for node, version in self._versions.items()):
            raise Unlike("it writes tensors in place")

    def _put_into_objects(self, call: BlockCall) -> bool:
        """Whether something was put into a tensor, or into an object that the trace had made before.

        What the block made for itself, such as a function inside of its own, nobody else can reach: it returns tensors
        and numbers, and was given such. Objects that there were before the trace are `changes`.
        """
        for one, attributes in call.output.side_effects.store_attr_mutations.items():
            kind = one.mutation_type
            if one in self._stored:
                if isinstance(kind, NEW) and attributes != self._stored[one]:
                    return True
            elif isinstance(one, TensorVariable) or not isinstance(kind, NEW) or id(kind) in self._objects:
                return True
        return False


def _counts(call: BlockCall) -> tuple[int, ...]:
    """What else a walk may add to, which is not repeated."""
    output, effects = call.output, call.output.side_effects
    others = effects.tensor_hooks, effects.save_for_backward
    return tuple(map(len, (output.nn_modules, output.random_calls, output.aotautograd_guards, *others)))
