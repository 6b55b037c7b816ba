"""Saves and loads what a `Sharded` holds: checkpoints, state dictionaries, Hugging Face's layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import closing, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compiled.capture.global_modes import outside_modes
from fsdp_compiled.distributed.mesh import Work, lockstep
from fsdp_compiled.runtime.checkpoint import dcp, hugging_face, loading, whole
from fsdp_compiled.runtime.checkpoint.contents import Trained, check_extra
from fsdp_compiled.runtime.checkpoint.saving import check_wish, path
from fsdp_compiled.runtime.checkpoint.writing import Busy, Saving
from fsdp_compiled.runtime.sharded_calls import ShardedCalls, one_thread
from fsdp_compiled.runtime.state import wait_for_host_memory


class ShardedCheckpoints(ShardedCalls):
    """Saving and loading."""

    @one_thread
    def full_state_dict(self) -> dict[str, Any]:
        """The ordinary ``model.state_dict()``, on the CPU of rank 0; empty on the other ranks. Collective."""
        with self._refusing():
            self._as_one("full_state_dict")
            trained = self._trained("full_state_dict", optimizer=False)
        work = whole.full_state_dict(self.model, trained, self._mesh)
        return self._together("What full_state_dict collects", work, "full_state_dict")

    @one_thread
    def save(
        self,
        folder: str | Path,
        step: int | None = None,
        keep: int | None = None,
        wait: bool = False,
        extra: Mapping[str, Any] | None = None,
        *,
        replace: bool = False,
        busy: Busy = "wait",
    ) -> Saving:
        """Saves all that training needs to go on, in ``folder/step-N/``, for any number of ranks. Collective.

        ``step``: N; by default, how many updates were made. ``keep``: how many checkpoints stay; older ones are removed
        once this one is complete; None: all stay. ``extra``: objects by name whose ``state_dict()`` is saved too, such
        as a scheduler or a sampler. ``replace``: whether a checkpoint of this step may exist already.

        Under ``Policy.sync_every`` each rank's own state is saved too, at any step; on another mesh `load` refuses it.

        Returns a future once the state is copied. Files are written in the background, unless ``wait``. ``result()``
        gives the checkpoint's folder, or raises `SaveError` on every rank, as does the next call. ``busy``: what to do
        while the checkpoint before is being written: ``"wait"``; ``"refuse"``; or ``"double_buffer"``: copy into a
        second buffer, and write it after that one.
        """
        with self._refusing():
            if busy not in get_args(Busy):
                raise ValueError(f"busy is {busy!r}; expected one of {', '.join(map(repr, get_args(Busy)))}.")
            wish = check_wish(folder, step, keep, replace)
            given = check_extra(extra, load=False)
            self._between_steps("save")
            self._checkpoints.wait(busy, wish.folder, int(self._state.step) if wish.step is None else wish.step)
            trained = self._trained("save")
        if wish.step is None:
            wish = dataclasses.replace(wish, step=int(self._state.step))
        with self._meeting(f"save to {wish}, extra {list(given)}"), outside_modes():
            future = self._checkpoints.save(wish, trained, given)
        if wait:
            future.result()
        return future

    @one_thread
    def load(
        self,
        folder: str | Path,
        step: int | None = None,
        strict: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> int | None:
        """Goes on from the newest complete checkpoint in the folder, or the one of this step. Collective.

        Returns its step, or None if there is none. Any number of ranks, placement and units may have written it. All
        tensors keep their addresses, and programs stay compiled. ``extra``: objects whose ``load_state_dict`` gets what
        was saved under their names. Nothing is changed unless every rank has read and verified all of it. Raises
        ``ValueError``, by name, for a damaged checkpoint, and for one of another model or optimizer. From the latter,
        ``strict=False`` loads what fits by name, shape and dtype, and says what did not.
        """
        with self._refusing():
            if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
                raise ValueError(f"step is {step!r}; expected a whole number, or None for the newest checkpoint.")
            place, given = path(folder), check_extra(extra, load=True)
            self._outside_join("load")
            self._checkpoints.wait()
            trained = self._trained("load")
        label = f"load from {place}, step {step}, strict={bool(strict)}, extra {list(given)}"
        work = loading.load(place, step, bool(strict), trained, given, self._mesh)
        # One rank may load after a call that left its state half updated.
        found = self._together("What load reads", work, label if self._mesh.world > 1 else None)
        if found is not None:
            self._row.end()
            self._calls.reopen()
        return found

    @one_thread
    def export(self, folder: str | Path) -> None:
        """Writes the weights in the layout of Hugging Face, for ``from_pretrained(folder)``. Collective.

        Safetensors files, their index where there are several, ``config.json`` where the model has a ``config``. No
        rank holds more than its own shards. ``folder`` must not exist, or be empty; it is written whole or not at all.
        """
        with self._refusing():
            place = path(folder)
            self._as_one("export")
            trained = self._trained("export", optimizer=False)
        work = hugging_face.export(place, self.model, trained, self._mesh)
        self._together("What export writes", work, f"export to {place}")

    @one_thread
    def import_weights(self, folder: str | Path, strict: bool = True) -> None:
        """Loads weights in the layout of Hugging Face, cast to the parameters' dtypes. Collective.

        The optimizer's state stays as it is. No rank reads more than its own shards. Raises ``ValueError``, by name,
        for weights of another model; ``strict=False`` loads what fits, and says what did not.
        """
        with self._refusing():
            place = path(folder)
            trained = self._trained("import_weights", optimizer=False)
        work = hugging_face.read_weights(place, bool(strict), self.model, trained, self._mesh)
        label = f"import from {place}, strict={bool(strict)}"
        self._together("What import_weights reads", work, label, then=True)

    @one_thread
    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads an ordinary ``model.state_dict()``, that of rank 0; others may give ``{}``. Collective.

        The optimizer's state stays as it is. Raises ``ValueError``, by name, for weights of another model.
        """
        with self._refusing():
            trained = self._trained("load_full_state_dict", optimizer=False)
        work = whole.load_given_weights(state_dict, self.model, trained, self._mesh)
        self._together("What load_full_state_dict is given", work, "load_full_state_dict", then=True)

    @one_thread
    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The ordinary ``optimizer.state_dict()``, on the CPU of rank 0; empty on the other ranks. Collective."""
        with self._refusing():
            self._need_optimizer("full_optimizer_state_dict")
            self._of_all_sites("full_optimizer_state_dict")
            trained = self._trained("full_optimizer_state_dict")
        work = whole.optimizer_state_dict(trained, self._mesh)
        return self._together("What full_optimizer_state_dict collects", work, "full_optimizer_state_dict")

    @one_thread
    def load_full_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads an ordinary ``optimizer.state_dict()``, that of rank 0; others may give ``{}``. Collective.

        Of the groups' options, it loads the rates. Raises ``ValueError``, by name, for what does not fit.
        """
        with self._refusing():
            self._need_optimizer("load_full_optimizer_state_dict")
            self._of_all_sites("load_full_optimizer_state_dict")
            trained = self._trained("load_full_optimizer_state_dict")
        work = whole.load_optimizer(state_dict, trained, self._mesh)
        label = "load_full_optimizer_state_dict"
        self._together(f"What {label} is given", work, label, then=True)

    @one_thread
    def state_dict(self) -> dict[str, Any]:
        """For `torch.distributed.checkpoint`: ``dcp.save({"app": sharded})``, or ``async_save``. Collective.

        ``{"model": {...}, "optim": {"state": {...}, "param_groups": [...]}, "updates": ...}`` by the model's own names.
        A tensor of which this rank holds a part is a DTensor over views of the shards. So DCP copies directly out of
        the state, and into it when it loads: a failed DCP load leaves the state half loaded, unlike `load`. Random
        states are not included. State kept by owners of whole matrices is in whole tensors, on the owner.
        """
        with self._refusing():
            self._between_steps("state_dict")
            self._of_all_sites("state_dict")
            self._checkpoints.wait()
            trained = self._trained("state_dict")
        work = dcp.state_dict(trained, self._mesh, lambda: self._ranks)
        return self._together("What state_dict collects", work, "state_dict")

    @one_thread
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a dictionary that `state_dict` returned and DCP filled, or one like it with whole tensors. Collective.

        Raises ``ValueError`` by name, with nothing changed, for what does not fit.
        """
        with self._refusing():
            self._of_all_sites("load_state_dict")
            trained = self._trained("load_state_dict")
        work = dcp.load_state_dict(state_dict, trained, self._mesh)
        self._together("What load_state_dict is given", work, "load_state_dict", then=True)
        self._row.end()

    def _together(self, what: str, work: Work[Any], label: str | None, then: bool = False) -> Any:
        """Returns the work's result on this rank once every rank has come to its end. Collective.

        ``label``: of the call, in which ranks meet first; None: they do not. ``then``: whether the result is a function
        that writes what was read, which is called.
        """

        def stages() -> Work[Any]:
            wait_for_host_memory(self.plan)
            return (yield from work)

        with self._meeting(label) if label is not None else nullcontext(), outside_modes():
            with closing(stages()) as begun:
                found = lockstep(self._mesh, what, begun)
            if then:
                found()
        if then and self._local is not None:
            self._local.restart()  # what was loaded is where the sites begin
        return found

    @cached_property
    def _ranks(self) -> DeviceMesh | None:
        """All ranks on one axis. Collective where it is made."""
        return init_device_mesh(self._mesh.device.type, (self._mesh.world,)) if self._mesh.world > 1 else None

    def _outside_join(self, call: str) -> None:
        if self._joined is not None:
            raise RuntimeError(f"{call} inside join: the other ranks may still train. Call it after the block.")

    def _between_steps(self, call: str) -> None:
        """Raises for a call that is possible only between steps."""
        self._outside_join(call)
        if self._row.programs or self._row.failure is not None:
            raise RuntimeError(
                f"{call} between microbatches: their sums are no part of a checkpoint. Call it after sharded.step."
            )

    def _as_one(self, call: str) -> None:
        """Raises an error for a call that gives weights away, if they differ between sites."""
        if self._local is not None and self._local.steps:
            raise RuntimeError(
                f"{call} between exchanges: sites have made {self._local.steps} steps by themselves since the last, "
                "and have other weights each. Call sharded.synchronize() before."
            )

    def _of_all_sites(self, call: str) -> None:
        if self._local is not None:
            raise ValueError(
                f"{call} under Policy.sync_every: sites have an optimizer's state of their own each, for which this "
                "layout has no place. Use sharded.save and sharded.load."
            )

    def _trained(self, call: str, optimizer: bool = True) -> Trained:
        """What is saved and loaded. ``optimizer``: whether its state is."""
        self._outside_join(call)
        updates = self._updates if optimizer else ()
        for update in updates:
            update.read(self._state.optimizer)
        self._taken.check()
        self._programs.module_buffers.take(self._state.buffers)
        return Trained(self.plan, self._state, self.optimizer, self._programs.rules, updates, self._local)
