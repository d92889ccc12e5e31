"""Tell which weights an attempt has changed, and restore those that steps change."""

from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_ga.snapshot.checksums import changed_by_value, checksums
from lightning_ga.snapshot.copies import SmallCopies, versions

_IS_TRAINED = attrgetter("requires_grad")
LOOKS = 8  # attempts in which the values of all weights are compared


class WeightSnapshot:
    """The weights that a step itself changes, such as those of a teacher that follows its student.

    The first attempts that go through show which they are. Until then, for weights that change now and
    then, and for weights that get gradients (what steps within the backward pass has states too), a change
    is noticed, not undone: by versions, by the values of weights that changed without one in those first
    attempts (``weight.data``, fused kernels), and by the steps of optimizers. Whether weights want gradients
    is kept of all.

    Reading the versions of thousands of weights takes longer than a small step may cost more. After the first
    attempts it is done where a window begins; of weights that were seen to change within a window, before every
    attempt. One that changes in a later window for the first time is noticed at a failure in that window, be it
    that an earlier attempt has changed it.
    """

    def __init__(self, module: Module) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._parameters = list(module.parameters())
        self._versions = versions(())
        self._restless: set[int] = set()  # places of weights that change within windows
        self._looks_within = LOOKS
        self._trained = b""  # a list of a thousand values would be searched by the garbage collector
        self._summed = self._parameters  # whose versions may not tell
        self._sums: list[int | None] = []
        self._silent: set[int] = set()  # weights that are trained and change without raising their version
        self._looks = LOOKS
        self._changing: dict[int, Tensor] = {}
        self.changing: tuple[str, ...] = ()  # names of the weights that attempts change
        self._copies = SmallCopies()
        self._stepped: set[str] = set()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        return self._copies.tensors()

    def expect(self, names: Collection[str]) -> None:
        """Copy these weights from the first attempt on, if they are not trained: the step is known to change them."""
        named = ((self._names[id(parameter)], parameter) for parameter in self._parameters)
        self._copy_from_now_on(p for name, p in named if name in names and _is_untrained(p))

    @property
    def is_learning(self) -> bool:
        """Whether the attempts are still to come that show what changes."""
        return self._looks > 0

    def note_steps(self) -> RemovableHandle:
        """Note the optimizers that step after the last ``take``, until the handle is removed."""
        stepped = self._stepped
        return register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.add(type(optimizer).__name__))

    def take(self, *, anew: bool = True) -> None:
        """Copy what changes, before an attempt; ``anew`` where a window begins: its optimizer has stepped."""
        if self._changing:
            self._copies.take()
        if anew or self._looks_within:
            before, self._versions = self._versions, versions(self._parameters)
            if not anew:
                self._looks_within -= 1
                self._restless.update(at for at, pair in enumerate(zip(before, self._versions)) if pair[0] != pair[1])
        for place in self._restless:
            self._versions[place] = self._parameters[place]._version
        self._trained = bytes(map(_IS_TRAINED, self._parameters))
        self._sums = checksums(self._summed) if self._summed else []
        self._stepped.clear()

    def learn(self) -> None:
        """Note that an attempt went through: what changes in one shows."""
        if not self._looks:
            return
        self._looks -= 1
        self._copy_from_now_on(p for p in self._changed() if _is_untrained(p))
        self._silent |= {id(p) for p in changed_by_value(self._summed, self._sums) if p.requires_grad}
        if not self._looks:
            self._summed = [parameter for parameter in self._parameters if id(parameter) in self._silent]

    def restore(self) -> None:
        """Write the copies back."""
        self._copies.restore()
        for parameter, trained in zip(self._parameters, self._trained):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(bool(trained))

    def lost(self) -> str | None:
        """Name weights that have changed and of which there is no copy."""
        if self._stepped:
            return f"weights by an optimizer of its own ({min(self._stepped)})"
        lost = [parameter for parameter in self._changed() if id(parameter) not in self._changing]
        return f"weights without an optimizer ({self._names[id(lost[0])]})" if lost else None

    def _copy_from_now_on(self, parameters: Iterable[Tensor]) -> None:
        new = {id(parameter): parameter for parameter in parameters if id(parameter) not in self._changing}
        if new:
            self._changing |= new
            self.changing = tuple(self._names[key] for key in self._changing)
            self._copies = SmallCopies(self._changing.values())

    def _changed(self) -> list[Tensor]:
        marks = zip(self._parameters, self._versions)
        by_version = [parameter for parameter, version in marks if parameter._version != version]
        known = {id(parameter) for parameter in by_version}
        by_value = changed_by_value(self._summed, self._sums)
        return [*by_version, *(parameter for parameter in by_value if id(parameter) not in known)]


def _is_untrained(parameter: Tensor) -> bool:
    """Return whether no gradient reaches a weight, as those of an average that nobody froze (``AveragedModel``)."""
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks  # they may update it, and drop those
    return not parameter.requires_grad or (parameter.grad is None and not hooks)
