"""Saving and loading what one `Sharded` trains: the calls, and what they refuse."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.lockstep import Exchange, Work, lockstep
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.checkpoint import dcp, loading, saving, writing
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint import manifest as manifests
from fsdp_compiled.runtime.checkpoint.chunks import place_of
from fsdp_compiled.runtime.checkpoint.contents import Trained
from fsdp_compiled.runtime.checkpoint.loading import (
    check_saved_extra,
    chosen_values,
    load_extra,
    match_local,
    prepare_values,
)
from fsdp_compiled.runtime.checkpoint.manifest import Manifest, refusing_edited
from fsdp_compiled.runtime.checkpoint.matching import Match, match, refusal
from fsdp_compiled.runtime.checkpoint.saving import Image, Plans, Wish
from fsdp_compiled.runtime.checkpoint.values import decode
from fsdp_compiled.runtime.checkpoint.writing import SaveError, Saving
from fsdp_compiled.runtime.state import wait_for_host_memory

T = TypeVar("T")
Busy = Literal["wait", "refuse", "double_buffer"]
log = logging.getLogger("fsdp_compiled")


def check_wish(folder: Any, step: Any, keep: Any, replace: Any) -> Wish:
    """Raises ``ValueError`` for arguments that make no sense."""
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name} is {value!r}; expected a whole number of {least} or more, or None.")
    return Wish(path(folder), step, keep, bool(replace))


def path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder is a {type(folder).__name__}; expected a path.")
    if not str(folder) or "\0" in str(folder):
        raise ValueError(f"folder is {str(folder)!r}; expected a path. The folder one is in is '.'.")
    return Path(folder).absolute()


class Checkpoints:
    """The checkpoints of one `Sharded`: one is being written at a time, and at most one more waits to be."""

    def __init__(self, mesh: Mesh, calls: Calls) -> None:
        self._mesh, self._calls = mesh, calls
        self._images = [Image(mesh.device)]  # a second one where `busy` was "double_buffer"
        self._plans = Plans()
        self._open: list[tuple[Saving, Image]] = []  # saves that run, or whose failure nobody was told
        self._count = 0

    def check(self) -> None:
        """Raises `SaveError`, once, if a checkpoint could not be written in the background."""
        for one, _ in self._open:
            if (error := one.failed()) is not None:
                one.told = True
                raise error

    def heard(self, text: str) -> None:
        """Notes that this rank heard what other ranks said. If it was this error, nobody needs to hear it again."""
        for one, _ in self._open:
            if one.save is not None and one.save.what in text:
                one.told = True

    def wait(self, busy: Busy = "wait", folder: Path | None = None, step: int | None = None) -> None:
        """Waits until no checkpoint is being written, but for one earlier than this one under ``"double_buffer"``.

        Raises `SaveError` for a save that failed and nobody was told of; under ``"refuse"``, ``ValueError`` while one
        is being written.
        """
        for one, _ in list(self._open):
            save = one.save
            assert save is not None
            if busy == "refuse" and not one.done():
                raise ValueError(f"{save.what} is still being written.")
            before = save.aside.parent != folder or step is None or save.head.step < step
            if busy == "double_buffer" and before and len(self._open) == 1 and not one.done():
                return
            told = one.told
            try:
                one.result()
            except SaveError:
                if not told:
                    raise
            self._open.pop(0)

    def save(self, wish: Wish, trained: Trained, extra: Mapping[str, Any]) -> Saving:
        """Saves a checkpoint. Collective, up to the copy. All ranks have agreed that they save."""
        wait_for_host_memory(trained.plan)
        begun: list[Path] = []
        self._count += 1
        work = saving.prepare(wish, self._count, self._mesh, trained, extra, self._plans, begun)
        try:
            save, own = lockstep(self._mesh, "What save writes", work)
        except BaseException:
            for aside in begun:
                folders.abandon(aside)
            raise
        finally:
            work.close()
        image = self._free_image()
        copied: writing.Copied | None = None
        try:
            copied = image.fill(own.files, own.beside)
        except Exception as error:
            copied = error
        finally:  # if this rank was interrupted, the others hear of that too
            if copied is None:
                copied = RuntimeError("it was interrupted while it copied")
            after = self._open[-1][0] if self._open else None
            self._open.append((writing.start(save, own, copied, self._mesh.rank, self._calls.board, after), image))
        return self._open[-1][0]

    def _free_image(self) -> Image:
        """An image that is not being written."""
        used = [image for _, image in self._open]
        free = [image for image in self._images if not any(image is one for one in used)]
        if not free:
            free = [Image(self._mesh.device)]
            self._images += free
        return free[0]

    def load(
        self, folder: Path, step: int | None, strict: bool, trained: Trained, extra: Mapping[str, Any]
    ) -> int | None:
        """Collective. Nothing is changed unless every rank has read and verified all of it."""
        return self.run(trained, "What load reads", self._load(folder, step, strict, trained, extra))

    def state_dict(self, trained: Trained) -> dcp.StateDict:
        """Collective at its first call, which makes a `DeviceMesh`."""
        wait_for_host_memory(trained.plan)
        found = dcp.state_dict(trained, self._mesh, self._ranks)
        if trained.updates:
            owned = self.run(trained, "What state_dict collects of owners", dcp.of_owners(trained))
            found["optim"]["state"] |= owned.pop("state")
            found |= owned
        return found

    @cached_property
    def _ranks(self) -> DeviceMesh | None:
        """All ranks on one axis. Collective where it is made."""
        return init_device_mesh(self._mesh.device.type, (self._mesh.world,)) if self._mesh.world > 1 else None

    def run(self, trained: Trained, what: str, work: Work[T]) -> T:
        """Runs the work; returns its result on this rank once every rank has come to its end. Collective."""
        wait_for_host_memory(trained.plan)
        try:
            return lockstep(self._mesh, what, work)
        finally:
            work.close()

    def _load(
        self, folder: Path, step: int | None, strict: bool, trained: Trained, extra: Mapping[str, Any]
    ) -> Work[int | None]:
        mesh = self._mesh
        chosen = loading.choose(folder, step) if mesh.rank == 0 else None
        said = yield Exchange("which checkpoint", (chosen, saving.row_of(mesh)))
        chosen, rows = said[0][0], [row for _, row in said]
        if chosen is None:
            return None
        manifest = manifests.read(chosen)
        yield f"{chosen.name} {manifest.written_by.get('id', '')}"
        with refusing_edited(chosen):
            found = match(manifest, trained, place_of(mesh))
        match_local(manifest, trained, found, mesh.rank, rows)
        found.differences += [
            f"extra[{name!r}] is not in the checkpoint" for name in extra if f"extra {name}" not in manifest.values
        ]
        if found.differences and strict:
            raise ValueError(refusal(f"{chosen} is of another model or optimizer", found.differences))
        values = chosen_values(manifest, found, extra, mesh.rank, rows)
        trees = [tree for tree, _ in values.values()]
        pairs, tensors = yield from loading.read(chosen, manifest, mesh, found.wanted, trees)
        check_saved_extra(manifest, values, extra, len(set(rows)))
        with refusing_edited(chosen, RuntimeError):
            row = f"{saving.row_of(mesh)} of {len(set(rows))}"
            write_values = prepare_values(values, tensors, found, trained, row)
        undo = load_extra({name: decode(tree, tensors) for name, (tree, _) in values.items()}, extra)
        try:
            yield "what they have read is whole"
        except BaseException:
            undo()
            raise
        loading.write(pairs)
        write_values()
        if mesh.rank == 0:
            _report(chosen, manifest, found, extra)
        return manifest.step


def _report(chosen: Path, manifest: Manifest, found: Match, extra: Mapping[str, Any]) -> None:
    """Reports what was not loaded, and what is not as it was."""
    if found.differences:
        lines = "".join(f"\n  {line}" for line in found.differences)
        log.warning("loaded what fits of %s, and left the rest as it was:%s", chosen, lines)
    saved = [name.removeprefix("extra ") for name in manifest.values if name.startswith("extra ")]
    if idle := [name for name in saved if name not in extra]:
        log.warning("%s holds extra %s too, which load was not given.", chosen, ", ".join(map(repr, idle)))
