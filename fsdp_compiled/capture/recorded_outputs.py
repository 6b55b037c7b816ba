"""What models of transformers collect of their layers: ``output_router_logits``, ``output_hidden_states``.

transformers (5.0 and later) puts hooks on the layers when such outputs are first asked for, under a lock, which no
trace can enter. Where a trace fails at that lock, they are put there as transformers does it, and the trace is made
again. Models that are not asked have none: hooks on layers cost their trace.
"""

from __future__ import annotations

import sys

from torch import nn

MODULE = "transformers.utils.output_capturing"


def put_hooks(model: nn.Module, error: Exception) -> bool:
    """Whether the trace failed at the lock, and there are more hooks now."""
    transformers = sys.modules.get(MODULE)
    if transformers is None or "_hook_installation_lock" not in str(error):
        return False
    found = [one for one in model.modules() if getattr(one, "_can_record_outputs", None)]
    found = [one for one in found if not getattr(one, "_output_capturing_hooks_installed", False)]
    for one in found:
        transformers.maybe_install_capturing_hooks(one)
    return bool(found)
