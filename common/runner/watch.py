"""Sees what a changed line keeps where a run does not look for it.

A resumed run begins without such a variable, and each process has its own. So its name is said on
stderr. An import inside a function is refused, because no run would record its code.
"""

import ast
import inspect
import pickle
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from zlib import crc32

import numpy as np
import torch

from common import UserError
from common.folders import few, say_once
from common.runner.runs import own_modules

HOME = f"{Path(__file__).parents[2]}/"  # a late import from elsewhere may be a library's
NUMBERS = {}  # of the modules that it has met, in their order, which is the same after a resume
OF_MODEL = "_parameters", "_buffers", "training"  # of each nn.Module


class Watch:
    """The variables of a run, as they were when it began.

    modules  what the program had imported by then, by name
    trainer  the user's attributes, and parts of the model of the user's own classes, may keep
             something, too
    kept     hashes of federate()'s variables, which a checkpoint has, because a resumed run sets
             these anew; not of whole numbers, which may come from the round
    """

    def __init__(self, modules, trainer, kept):
        self.modules, self.trainer, self.kept, self.first = modules, trainer, kept, {}
        NUMBERS.clear()
        self.places = {name: modules[name] for name in modules if "common" not in name}
        self.places["clients"], self.own = trainer.clients, {*vars(trainer), "initial"}

    def look(self, rounds, state):
        """Says what has changed since the first look. Raises UserError for a late import.

        rounds  what federate() has returned
        state   what it has yielded in this round, or None while clients train
        """
        if state:
            late = [
                name
                for name, module in own_modules().items()
                if name not in self.modules and module.__file__.startswith(HOME)
            ]
            if late:
                raise UserError(
                    f"{few(late)} is imported in a function, where a run does not see its code: "
                    "import it at the top of the file"
                )
        now = self.kept_aside(rounds, state)
        changed = []
        for name in now:
            first = self.kept if "of federate" in name else self.first
            if first.setdefault(name, now[name]) != now[name]:
                changed += [name]
        if changed:
            say_once(
                f"\n{few(changed)} changes, but is not in the state that federate() yields: a "
                "resumed run lacks it, each process has its own, and a check repeats a client"
            )

    def kept_aside(self, rounds, state):
        """Hashes of what a method may keep beside the state, by the variable's name.

        These are the variables of modules, clients, trainer and parts of the model, functions
        included, for their attributes; and after a round, those that federate() sets before its
        loop. Of a model, whose weights somebody sets, only another one counts. What cannot be
        pickled is left out.
        """
        kept, found, of_trainer = {}, {}, vars(self.trainer)
        here = {f"trainer.{name}": of_trainer[name] for name in of_trainer.keys() - self.own}
        names = {*here}
        for name, part in self.trainer.model.named_modules(prefix="trainer.model"):
            if type(part).__module__ in self.modules:
                self.places[name] = part
        for place, holder in self.places.items():
            kept |= {f"{place}.{name}": value for name, value in vars(holder).items()}
        with suppress(Exception):  # no generator, or no source
            here |= rounds.gi_frame.f_locals
            source = inspect.getsource(rounds.gi_code)
            for statement in ast.parse(dedent(source)).body[0].body:
                parts = [*ast.walk(statement)]
                if any(isinstance(part, ast.Yield) for part in parts):
                    break
                if not isinstance(statement, ast.For | ast.While | ast.FunctionDef):
                    stored = [p for p in parts if isinstance(getattr(p, "ctx", None), ast.Store)]
                    names.update(getattr(part, "id", "") for part in stored)
            yielded = {*state, *(id(value) for value in state.values() if type(value) is not int)}
            for name in sorted(names & here.keys()):  # in an order that NUMBERS needs
                if name not in yielded and id(here[name]) not in yielded:
                    kind = "in" if isinstance(here[name], int) else "of"
                    kept[f"{name} {kind} federate()"] = here[name]
        for name, value in kept.items():
            with suppress(Exception):
                if ".__" not in name and not name.endswith(OF_MODEL):
                    Contents(text := BytesIO()).dump(value)
                    found[name] = crc32(text.getvalue())
        return found


class Contents(pickle.Pickler):
    """Writes what a function keeps, too, where pickle writes its name, or refuses a lambda."""

    def reducer_override(self, value):
        if isinstance(value, torch.nn.Module | torch.nn.Parameter):
            return int, (NUMBERS.setdefault(id(value), len(NUMBERS)),)
        if isinstance(value, torch.Tensor):
            return np.array, (value.detach().cpu().numpy(),)  # faster
        if not isinstance(value, FunctionType):
            return NotImplemented
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return tuple, ([value.__qualname__, value.__defaults__, vars(value), cells],)
