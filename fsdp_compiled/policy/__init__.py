"""Every decision that a user can make."""

from fsdp_compiled.policy.local_steps import LossScale as LossScale
from fsdp_compiled.policy.local_steps import OuterSGD as OuterSGD
from fsdp_compiled.policy.local_steps import Rendezvous as Rendezvous
from fsdp_compiled.policy.local_steps import sites as sites
from fsdp_compiled.policy.policy import MOST_AHEAD as MOST_AHEAD
from fsdp_compiled.policy.policy import PLACEMENTS as PLACEMENTS
from fsdp_compiled.policy.policy import Placement as Placement
from fsdp_compiled.policy.policy import Policy as Policy
