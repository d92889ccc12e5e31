import errno

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.app.errors import explain, explain_key


def test_an_unknown_key_suggests_its_neighbour():
    """Keys of the same section are offered, or a section of nearly that name."""
    config = OmegaConf.create({"a": {"batch": 1, "other": 2}, "data": {"size": 3}})
    OmegaConf.set_struct(config, True)

    def told(key: str) -> str:
        with pytest.raises(OmegaConfBaseException) as caught:
            OmegaConf.update(config, key, 3)
        return explain_key(key, caught.value, ["a", "data"])

    assert "did you mean a.batch?" in told("a.bach")
    assert "did you mean" not in told("a.qqq")
    assert "did you mean data.size?" in told("datas.size")


def test_a_value_that_another_section_lacks_names_both():
    """As of a language model with pictures."""
    config = OmegaConf.create({"model": {"context": "${data.max_length}"}, "data": {"size": 3}})
    with pytest.raises(OmegaConfBaseException) as caught:
        OmegaConf.to_container(config, resolve=True)
    told = explain(caught.value)
    assert told.startswith("model.context is read from data.max_length, which the configuration does not have")
    assert "data=…" in told
    assert "model.context=…" in told


def test_disks_and_folders_are_told_in_one_sentence():
    """Which file, why, and which keys choose another place; other errors of the system are bugs."""
    full = OSError(errno.ENOSPC, "No space left on device")
    assert explain(full) is not None
    assert explain(full).startswith("A file of this run, or what it prints, cannot be written: No space left on device")
    denied = PermissionError(errno.EACCES, "Permission denied", "/somewhere")
    assert "'/somewhere' cannot be written" in explain(denied)
    assert "hydra.run.dir=FOLDER" in explain(denied)
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "cat.png")  # of the data, perhaps
    assert explain(missing).startswith("'cat.png' cannot be written, or read: No such file or directory (--traceback")
    assert "If this run writes it, choose another folder" in explain(missing)
    assert explain(FileNotFoundError(errno.ENOENT, "No such file or directory")).startswith(
        "The current folder has been"
    )
    wrapped = RuntimeError("unexpected pos 64 vs 0")
    wrapped.__cause__ = full
    assert explain(wrapped) is not None
    assert explain(OSError(errno.ECHILD, "No child processes")) is None


def test_what_an_error_leaves_out_is_not_told_in_its_place():
    bug = KeyError("a bug")
    bug.__context__ = FileNotFoundError(errno.ENOENT, "No such file", "cache.json")
    assert explain(bug) is not None
    bug.__suppress_context__ = True
    assert explain(bug) is None


def test_errors_of_loggers_name_what_does_without_an_account():
    refused = type("UsageError", (Exception,), {"__module__": "wandb.errors.errors"})("No API key configured.")
    told = explain(refused)
    assert told == "No API key configured. (logger=default needs no account and no network)"


def test_memory_that_ran_out_is_told_in_one_sentence():
    """Without a callback too; what is known of the memory follows."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has …")
    error.add_note("As the probe recorded it: …")
    told = explain(error)
    assert told.startswith("Memory ran out (CUDA out of memory): ")
    assert "accumulate.on_oom=split" in told
    assert told.endswith("As the probe recorded it: …")


def test_a_model_that_does_not_fit_is_not_told_to_use_smaller_batches():
    """No batch was read when memory ran out."""

    def build_model():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has …")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        build_model()
    assert "the model alone does not fit; use a smaller one" in explain(caught.value)
    assert "batch" not in explain(caught.value)


def test_a_name_that_is_not_utf8_is_told():
    told = explain(UnicodeEncodeError("utf-8", "caf\udce9", 3, 4, "surrogates not allowed"))
    assert told == "'caf\\udce9' is not read as UTF-8: give it another name, or set PYTHONUTF8=1 if it should be."


def test_what_an_optimizer_or_a_schedule_cannot_take_is_told():
    """In ``configure_optimizers`` or in their first step: what they are given comes from the configuration."""

    def configure_optimizers():
        raise TypeError("got an unexpected keyword argument 'warmup'")

    given = "optimizer or lr_scheduler cannot work with what it is given"
    with pytest.raises(TypeError) as caught:
        configure_optimizers()
    assert explain(caught.value).startswith(f"{given} (got an unexpected keyword argument 'warmup')")
    weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(TypeError) as caught:
        torch.optim.Adam([weight], eps="x")
    assert explain(caught.value).startswith(f"{given} ('<=' not supported between instances of ")
