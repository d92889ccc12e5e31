"""Run submodules under activation checkpointing: computed again in the backward pass, with no other effect.

PyTorch's own ``checkpoint`` computes a wrong gradient if a forward pass changes what it depends on: buffers,
attributes, lists, random numbers of Python or NumPy. Here the second pass starts from the state before the first one,
and leaves the state that it finds.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import UserError
from lightning_ga.recompute.state import ForwardEffects
from lightning_ga.snapshot.copies import by_id, versions, with_own_containers


@contextmanager
def recomputed(module: Module, names: str | Iterable[str]) -> Iterator[None]:
    """Run submodules under activation checkpointing: they keep their arguments, and are computed again if needed.

    The gradient is the same to the bit if the submodules are deterministic given their arguments and state: a second
    forward pass starts from the random numbers, buffers, attributes and lists of before the first one, and leaves
    those of now. This is valid for all calls within the context; their backward passes may come after it.

    Parameters, and tensors and arrays of more than 256 KiB, must not change in the forward pass. Whether they do is
    looked at in calls 1, 2, 4, 8, … of a submodule: the gradients of calls between the first change and the error are
    wrong. State outside of the module, such as a global variable, is not put back. Within ``torch.compile`` a submodule
    keeps its activations.

    Args:
        module: The module.
        names: Names of its submodules, as ``named_modules`` has them; none may lie inside another.

    Raises:
        UserError: If there is no such submodule, or if one lies inside another; in a forward pass, if the submodule
            writes to its arguments, or changes a parameter, a large tensor or a large array.

    Examples:
        The first half of a transformer, in a plain loop::

            with lightning_ga.recomputed(model, [f"blocks.{number}" for number in range(6)]):
                loss = model(batch).mean()
            loss.backward()
    """
    wanted = [names] if isinstance(names, str) else names
    with ExitStack() as stack:
        for name, part in submodules(module, wanted).items():
            stack.enter_context(shadowed(part, "forward", RunTwice(part, name, part.forward)))
        yield


class RecomputedParts:
    """Submodules of a training that are computed again; which ones may change between passes."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._held = ExitStack()
        self.names: tuple[str, ...] = ()

    def use(self, names: tuple[str, ...]) -> None:
        """Compute these submodules again from here on, and no others."""
        if names != self.names:
            self._held.close()
            self._held.enter_context(recomputed(self._module, names))
            self.names = names


def submodules(module: Module, names: Iterable[str], argument: str = "recomputed") -> dict[str, Module]:
    """Return the submodules with these names, each once.

    Raises:
        UserError: If there is no such submodule, or if one lies inside another.
    """
    known = dict(module.named_modules(remove_duplicate=False))
    found: dict[Module, str] = {}
    for name in names:
        if not name or name not in known:
            children = [child for child, part in module.named_children() if next(part.parameters(), None) is not None]
            near = difflib.get_close_matches(name, filter(None, known), n=3, cutoff=0.5) or children[:3]
            has = ", ".join(map(repr, near)) or "none"
            raise UserError(
                f"{argument} names {name!r}, and {type(module).__name__} has no such submodule: it has {has}."
            )
        found.setdefault(known[name], name)
    for part, name in found.items():
        for inner in part.modules():
            if inner is not part and inner in found:
                inside = found[inner]
                raise UserError(f"{argument} names {name!r} and {inside!r}, which lies inside it: name one of the two.")
    return dict(zip(found.values(), found))


class RunTwice:
    """The forward pass of a module, which runs again in the backward pass."""

    def __init__(self, module: Module, name: str, forward: Callable[..., Any]) -> None:
        self._name = name
        self._forward = forward
        self._effects = ForwardEffects(module, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled code keeps its activations
            return self._forward(*arguments, **named)
        given = [(arguments, named)]  # the caller sees what the first pass does to them
        leaves, structure = tree_flatten((arguments, named))
        tensors = by_id(tensors_in(leaves))  # each once: attention asks whether query is key
        places = {number: object() for number in tensors}
        # The caller may change its containers later, as DenseNet does.
        leaves = [with_own_containers(leaf, places) for leaf in leaves]

        def run(*saved: Any) -> Any:
            if given:
                arguments, named = given.pop()
            else:
                instead = dict(zip(map(id, places.values()), saved))
                arguments, named = tree_unflatten([with_own_containers(leaf, instead) for leaf in leaves], structure)
            return self._forward(*arguments, **named)

        written = versions(tensors.values())
        before = self._effects.before_call(given)
        output = checkpoint(
            run,
            *tensors.values(),
            use_reentrant=False,
            preserve_rng_state=False,  # ``before`` has more generators than PyTorch keeps
            context_fn=lambda: (nullcontext(), before),
        )
        self._effects.after_call()
        if versions(tensors.values()) != written:
            raise UserError(
                f"{self._name} cannot be computed again, because its forward pass writes to its arguments: leave it "
                "out, or name the module around it."
            )
        return output
