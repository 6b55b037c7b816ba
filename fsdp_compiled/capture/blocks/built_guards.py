"""Guards of written blocks: Dynamo builds those of the first, and what it asked of C++ for these is asked again.

    of the first, by Dynamo        layer.get_generic_dict_manager(...)  ->  dict_getitem_manager("eps")
                                   add_equals_match_guard(1e-5, ["L['model'].layers['2'].eps == 1e-05"])
    of the next                    the same, with its own values, and ['3'] in the place of ['2']

Dynamo takes a seventh of a millisecond for each parameter of a block: it looks every place up by its name, several
times. What is built is a tree of managers, one for each place, and on them the guards. Each guard is asked of the next
block's own values before it is repeated; where one would not hold, or what Dynamo asked is not known here, Dynamo
builds those of that block as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdp_compiled.capture.blocks.block_calls import BLOCK, BlockCall, bare
from fsdp_compiled.capture.blocks.written_blocks import WrittenBlock
from fsdp_compiled.torch_private.dynamo import Guard, GuardManager, LocalSource

# Kinds of guards that look at one place alone, and ask no more than its value.
KINDS = ("TYPE_MATCH", "NOT_PRESENT_IN_GENERIC_DICT", "CONSTANT_MATCH", "EQUALS_MATCH", "SEQUENCE_LENGTH")
# What is asked of a manager for one further on.
FURTHER = ("dict_getitem_manager", "get_generic_dict_manager", "getattr_manager")
# What is added to a manager, and whether it holds of the value there.
HOLDS: dict[str, Callable[..., bool]] = {
    "add_type_match_guard": lambda value, kind, *_: id(type(value)) == kind,
    "add_equals_match_guard": lambda value, known, *_: type(value) is type(known) and repr(value) == repr(known),
    "add_length_check_guard": lambda value, length, *_: len(value) == length,
    "add_dict_contains_guard": lambda value, there, key, *_: (key in value) == there,
    "add_true_match_guard": lambda value, *_: value is True,
    "add_false_match_guard": lambda value, *_: value is False,
    "add_none_match_guard": lambda value, *_: value is None,
}


class Asked(NamedTuple):
    """Of the manager in this place of the list. ``further``: that in which place it gave, if any."""

    place: int
    method: str
    args: tuple[Any, ...]
    named: dict[str, Any]
    further: int | None


class Plan:
    """What Dynamo asked for the guards of one written block. ``known``: whether all of it can be repeated.

    ``repeatable``, ``rest``: places of guards in the walked block's list, those that look at one value and the others.
    """

    def __init__(self, block: WrittenBlock, places: Sequence[int]) -> None:
        walked = block.walked
        self.repeatable = [one for one in places if walked.kinds[one] in KINDS and not walked.guards[one][2]]
        self.rest = [one for one in places if one not in self.repeatable]
        self.known = True
        self.added = 0  # guards
        self.name = block.call.source.name
        self._asked: list[Asked] = []
        self._sources = [self.name]  # of the managers
        self._dicts: dict[int, Noted] = {}  # of a manager, that of its ``__dict__``

    def note(self, place: int, method: str, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> Any:
        """Notes it, and gives what it gave, in which the same is noted."""
        further = None
        if method == "get_generic_dict_manager" and place in self._dicts:
            return self._dicts[place]
        if isinstance(result, GuardManager):
            further = len(self._sources)
            self._sources.append(named.get("source", ""))
            self.known &= type(result) is GuardManager and method in FURTHER and not args
            self.known &= "example_value" in named and self._sources[-1].startswith(self.name)
            result = Noted(result, self, further)
            if method == "get_generic_dict_manager":
                self._dicts[place] = result
        else:
            self.known &= method in HOLDS and not named and result is None
            self.added += 1
        self._asked.append(Asked(place, method, args, named, further))
        return result

    def end(self) -> None:
        """Nothing more is noted. Managers are read by one expression, in another block too."""
        if self.known:
            local = LocalSource(BLOCK).name
            texts = ", ".join(source.replace(self.name, local) for source in self._sources)
            self._values = compile(f"[{texts}]", "<managers>", "eval")

    def values(self, call: BlockCall) -> list[Any] | None:
        """What is there in another block, of each manager; None where a guard does not hold of it."""
        found = call.evaluate(self._values)
        added = (one for one in self._asked if one.further is None)
        return found if all(HOLDS[one.method](found[one.place], *one.args) for one in added) else None

    def repeat(self, builder: Any, call: BlockCall, values: Sequence[Any]) -> None:
        """The guards of another block."""
        mine, its = self.name, call.source.name
        place = bare(call.source)
        builder.src_get_value_cache[place] = call.module  # else Dynamo evaluates an expression
        managers = [builder.get_guard_manager_from_source(place)]
        for place, method, args, named, further in self._asked:
            ask = getattr(managers[place], method)
            if further is None:
                ask(*[[text.replace(mine, its) for text in one] if type(one) is list else one for one in args])
            else:
                given = {"source": named["source"].replace(mine, its), "example_value": values[further]}
                managers.append(ask(**{**named, **given}))


class Noted:
    """A manager that notes what is asked of it."""

    def __init__(self, manager: Any, plan: Plan, place: int) -> None:
        self._manager, self._plan, self._place = manager, plan, place

    @property  # Dynamo asks which kind it is
    def __class__(self) -> type:
        return type(self._manager)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError(kind)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        ask = getattr(self._manager, method)
        return lambda *args, **named: self._plan.note(self._place, method, args, named, ask(*args, **named))


class BlockGuards:
    """Stands for the guards of a written block where Dynamo builds guards, one after the other.

    ``plans``: by walked block. ``built``: takes those that Dynamo built itself, whose texts are compared.
    """

    def __init__(
        self,
        block: WrittenBlock,
        places: Sequence[int],
        plans: dict[int, Plan],
        built: list[tuple[WrittenBlock, int, Guard]],
    ) -> None:
        """``places``: of guards, in the walked block's list."""
        self.block, self.places, self._plans, self._built = block, places, plans, built

    def says_the_class(self) -> bool:
        """Whether one of them is of the block's class, which Dynamo notes too when it comes to a block."""
        walked = self.block.walked
        return any(
            walked.kinds[place] == "TYPE_MATCH" and walked.guards[place][0].name == walked.call.source.name
            for place in self.places
        )

    def is_specialized_nn_module(self) -> bool:
        return False

    def create(self, builder: Any) -> None:
        block = self.block
        plan = self._plans.get(id(block.walked))
        if plan is None:
            plan = self._plans[id(block.walked)] = Plan(block, self.places)
            self._noted(builder, plan)
        elif plan.known and (values := plan.values(block.call)) is not None:
            plan.repeat(builder, block.call, values)
        else:
            self._build(builder, plan.repeatable)
        self._build(builder, plan.rest)

    def _build(self, builder: Any, places: Sequence[int]) -> None:
        """By Dynamo."""
        for place in places:
            guard = self.block.guard(place)
            guard.create(builder)
            self._built.append((self.block, place, guard))

    def _noted(self, builder: Any, plan: Plan) -> None:
        """By Dynamo, which is watched, and does not know what else it built of this block."""
        manager = builder.get_guard_manager_from_source(self.block.call.source)
        before = builder._cached_guard_managers, builder.already_added_code_parts
        outside = {name: one for name, one in before[0].items() if not name.startswith(plan.name)}
        builder._cached_guard_managers = {**outside, plan.name: Noted(manager, plan, 0)}
        builder.already_added_code_parts = type(before[1])()
        try:
            for place in plan.repeatable:
                added = plan.added
                self._build(builder, [place])
                plan.known &= plan.added > added
        finally:
            builder._cached_guard_managers, builder.already_added_code_parts = before
        plan.end()
