"""Sets that are fetched from the network: one sentence when they are missing or cannot be fetched."""

from collections.abc import Callable

from lightning_ga.errors import UserError


def missing(name: str, root: str) -> UserError:
    """The error for a set whose files are not there, with the way to get them."""
    return UserError(
        f"data={name} is not in data.root={root!r}: add data.download=true to the same line to fetch it "
        "(in Python, download=True), or say where it is."
    )


def fetch(name: str, root: str, download: Callable[[], object]) -> None:
    """Run a download; if it fails, the network's own message is in the error."""
    try:
        download()
    except (OSError, RuntimeError) as error:  # no network, or no mirror that answers
        reason = str(error).strip().split("\n")[0].rstrip(":")
        raise UserError(
            f"data={name} could not be downloaded ({reason}); check the network, or copy its files into "
            f"data.root={root!r}."
        ) from error
